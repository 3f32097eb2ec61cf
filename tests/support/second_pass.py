"""A second forward pass over a sample, by Hugging Face, and its comparison with what the engine returned.

Two experts with nearly equal logits are a tie, which rounding decides. Another choice changes the logits of all later
tokens in the second decimal, so the second pass replays the engine's choices. Each of them is then compared with the
logits of its own router, for which all earlier choices are the same.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollbus.schemas.rows import Rows
from rollbus.trainer import replay

NEAR = 1e-4
"""Largest difference of float32 values that two programs compute: log probabilities, and the router's logits."""


@dataclass(frozen=True)
class SecondPass:
    """The values of one forward pass over S tokens without the last one."""

    logits: npt.NDArray[np.float32]
    """f4[S - 1, vocabulary]."""
    routers: npt.NDArray[np.float32]
    """f4[S - 1, layers, experts]: the routers' logits."""

    def logprobs(
        self, token_ids: npt.NDArray[np.int32], allowed: dict[int, list[int]], biases: dict[int, float]
    ) -> npt.NDArray[np.float32]:
        """Return the log probability of each token but the first, f4[S - 1].

        Args:
            allowed: by position of a token, the only tokens that could be sampled there.
            biases: added to the logits of these tokens.
        """
        logits = self.logits.copy()
        logits[:, list(biases)] += np.array(list(biases.values()), np.float32)
        for position, tokens in allowed.items():
            forbidden = np.ones(logits.shape[1], np.bool_)
            forbidden[tokens] = False
            logits[position - 1, forbidden] = -np.inf
        most = logits.max(1, keepdims=True)
        whole: npt.NDArray[np.float32] = logits - most - np.log(np.exp(logits - most).sum(1, keepdims=True))
        found: npt.NDArray[np.float32] = whole[np.arange(len(whole)), token_ids[1:]]
        return found

    def compare_rows(self, rows: Rows) -> tuple[int, int]:
        """Return how many sets of experts differ from those of the routers by a tie, and how many by a fault.

        It is a tie if each expert that only one of the two sets has is as near as rounding to the limit of the set.
        """
        top_k, routers = rows.shape[-1], self.routers
        ordered = np.sort(routers, -1)
        limit = (ordered[..., -top_k] + ordered[..., -top_k - 1])[..., None] / 2
        chosen = np.zeros(routers.shape, np.bool_)
        np.put_along_axis(chosen, rows.astype(np.int64), values=True, axis=-1)
        differs = chosen != (routers > limit)
        is_far = differs & (np.abs(routers - limit) > NEAR)
        # An expert that a row has twice makes the set smaller.
        is_fault = is_far.any(-1) | (chosen.sum(-1) != top_k)
        assert is_fault.shape == rows.shape[:2]
        return int((differs.any(-1) & ~is_fault).sum()), int(is_fault.sum())


@functools.cache
def _load(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def run_second_pass(checkpoint: Path, token_ids: npt.NDArray[np.int32], rows: Rows) -> SecondPass:
    """Return the values of one pass over a sequence in float32, with the experts in `rows`, [S - 1, layers, top_k]."""
    import torch

    model = _load(checkpoint)
    with torch.no_grad(), replay(model, torch.tensor(rows.astype(np.int64))[None]):
        output = model(torch.tensor(token_ids[:-1])[None], output_router_logits=True)
    routers = np.stack([logits.numpy() for logits in output.router_logits], 1)
    return SecondPass(output.logits[0].numpy(), routers)


def check_second_pass(
    checkpoint: Path,
    sample: dict[str, Any],
    rows: Rows,
    allowed: dict[int, list[int]] | None = None,
    biases: dict[int, float] | None = None,
) -> None:
    """Assert that a second pass over a session's sample gives its log probabilities and its routed experts.

    Args:
        allowed: by position of a token, the only tokens that a grammar allowed there.
        biases: of tokens' logits.
    """
    ids, mask = np.array(sample["token_ids"], np.int32), np.array(sample["loss_mask"])
    assert len(rows) == len(ids) - 1
    again = run_second_pass(checkpoint, ids, rows)
    difference = np.abs(again.logprobs(ids, allowed or {}, biases or {}) - np.array(sample["logprobs"], np.float32)[1:])
    worst = int(np.where(mask[1:], difference, 0.0).argmax())
    assert difference[worst] < NEAR, f"{difference[worst]} at token {worst + 1} of {len(ids)}"
    ties, faults = again.compare_rows(rows)
    assert faults == 0
    assert ties <= rows.shape[0] * rows.shape[1] // 1000
    # The comparison would see rows that stand one position too late.
    assert again.compare_rows(np.roll(rows, 1, axis=0))[1] > rows.shape[0] * rows.shape[1] // 2
