"""The training step in docs/trainer.md runs unchanged and learns."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollbus.schemas.errors import ErrorCode, request_error
from tests.trainer.models import FakeTurn, build, rows_of

DOC = Path(__file__).resolve().parents[2] / "docs" / "trainer.md"


Conversation = list[tuple[list[int], FakeTurn]]


def the_block() -> str:
    """Return the first Python block of the page."""
    block: str = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)[0]
    return block


def the_step() -> SimpleNamespace:
    """Return the names that the block defines."""
    names: dict[str, Any] = {}
    exec(the_block(), names)
    return SimpleNamespace(**names)


def conversation(seed: int, layers: int, top_k: int) -> Conversation:
    """Return two turns of random tokens with the rows that each turn would return."""
    random = np.random.default_rng(seed)
    token_ids = random.integers(0, 50, 14).astype(np.int32)
    rows = rows_of(13, layers=layers, top_k=top_k, seed=seed) % 2 + 2 * np.arange(top_k, dtype=np.uint8)
    turns = []
    for prompt_len, end, start in ((3, 7, 0), (9, 14, 6)):
        size = end - prompt_len
        logprobs = np.full(size, -4.0, np.float32)
        arrays = token_ids[prompt_len:end], logprobs, np.full(size, 3, np.int32), rows[start : end - 1]
        turn = FakeTurn(*arrays, start, prompt_len)
        turns.append((token_ids[:prompt_len].tolist(), turn))
    return turns


def failed(turns: Conversation) -> Conversation:
    """Return the turns with a last answer that has failed."""
    *others, (prompt, answer) = turns
    return [*others, (prompt, replace(answer, error=request_error(ErrorCode.WORKER_LOST, "its lease expired")))]


def unrouted(turns: Conversation) -> Conversation:
    """Return the turns without routed experts."""
    return [(prompt, replace(answer, routed_experts=None, start=0)) for prompt, answer in turns]


@pytest.mark.slow
@pytest.mark.parametrize("routed", [True, False])
def test_the_training_step_raises_the_logprobs_of_the_better_answer(routed: bool) -> None:
    """A few steps raise the logprobs of the answer with the higher reward and lower those of the other answer.

    The rollouts also contain failed conversations and groups without a second answer to compare.
    """
    step = the_step()
    model = build("qwen3_moe").eval()
    layers = model.config.num_hidden_layers
    talks = [conversation(seed, layers, 3) for seed in (0, 1)]
    if not routed:
        talks = [unrouted(turns) for turns in talks]
    group = [(turns, reward) for reward, turns in enumerate(talks)]
    rollouts = [[*group, (failed(talks[0]), 1)], [(failed(talks[1]), 0)], [(talks[0], 1)]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def mean_logprobs() -> list[float]:
        means = []
        for turns, _ in group:
            prompt, turn = turns[-1]
            token_ids = torch.tensor([[*prompt, *turn.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(input_ids=token_ids).logits[0, :-1]
            means.append(-float(torch.nn.functional.cross_entropy(logits, token_ids[0, 1:])))
        return means

    before = mean_logprobs()
    for _ in range(5):
        step.train_step(model, optimizer, rollouts, version=4)
    assert model.training
    after = mean_logprobs()

    assert after[1] - before[1] > 0.1
    assert after[0] < before[0]


def test_stale_rollouts_change_nothing() -> None:
    """If the version is too far ahead, all tokens are dropped and the weights stay unchanged."""
    step = the_step()
    model = build("qwen3_moe")
    before = [parameter.clone() for parameter in model.parameters()]
    group = [(conversation(seed, model.config.num_hidden_layers, 3), float(seed)) for seed in (0, 1)]

    step.train_step(model, torch.optim.SGD(model.parameters(), lr=1.0), [group], version=9)

    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
