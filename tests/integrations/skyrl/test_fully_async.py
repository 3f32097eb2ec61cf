"""SkyRL's fully asynchronous loop, generator, environment and client on two vLLM workers; none of them is changed.

SkyRL asks for Python 3.12, for which the package index has no torch without CUDA. The program therefore runs on 3.11,
with `typing_extensions.TypedDict` as `typing.TypedDict`, because pydantic demands it. SkyRL's entry point cannot run:
`skyrl/backends/skyrl_train/workers/model_wrapper.py` imports flash_attn. The program creates the simulated trainer with
the methods of SkyRL's experiment. The released simulated trainer fails after its first step, with "'_SimDispatch'
object has no attribute 'get_timing_metrics'"; the program adds that method and one other in a subclass.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.workers.engines.vllm.tiny_moe import SPECIAL_TOKENS, TURN_END
from tests.http.support import http_before
from tests.integrations.support import find_python, needs, run_program
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, pytest.mark.routing, needs("skyrl")]

PROGRAM = Path(__file__).parent / "programs" / "fully_async.py"
END = SPECIAL_TOKENS.index(TURN_END)
TOLERANCE = 1e-3
"""Maximum difference of the log probabilities that the engine and Hugging Face compute; with the other checkpoint,
samples are 4 to 6 apart and all their rows differ."""
STEPS, GROUPS, SAMPLES = 6, 2, 2
IN_FLIGHT = 8
"""Most trajectories that run at once: four groups of two samples."""


class Reference:
    """A checkpoint in Hugging Face's implementation."""

    def __init__(self, checkpoint: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def score(self, token_ids: list[int], firsts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the log probability of each token but the first, and the sorted experts of each token.

        SkyRL samples with `min_tokens=1`: the tokens at the indexes `firsts`, the first ones of turns, are not `END`.
        """
        torch = self._torch
        with torch.no_grad():
            output = self._model(torch.tensor([token_ids]), output_router_logits=True)
        output.logits[0, firsts - 1, END] = -torch.inf
        scores = output.logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        experts = [logits.topk(4).indices.sort().values for logits in output.router_logits]
        return scores.numpy(), torch.stack(experts, 1).numpy()


def differs(sample: dict[str, Any], reference: Reference) -> tuple[float, float]:
    """Return the largest difference of log probabilities, and the share of rows with other experts."""
    sampled = np.array(sample["loss_mask"], np.bool_)
    (firsts,) = np.nonzero(sampled & ~np.append(False, sampled[:-1]))
    scores, experts = reference.score(sample["token_ids"], firsts + len(sample["token_ids"]) - sample["answer"])
    difference = np.array(sample["logprobs"]) - scores[-sample["answer"] :]
    # SkyRL fills the row of the last token, which no step has processed.
    rows = np.sort(np.array(sample["rows"][:-1]))
    return float(np.abs(difference[sampled]).max()), float((rows != experts[:-1]).any(axis=(1, 2)).mean())


def on_lines(actions: dict[str, Callable[[], object]]) -> Callable[[str], None]:
    """Return a callback that runs the action of a line."""

    def on_line(line: str) -> None:
        if line in actions:
            actions[line]()

    return on_line


async def test_the_fully_asynchronous_loop_survives_a_killed_worker_and_new_weights(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers, tmp_path: Path
) -> None:
    """The loop loads new weights, loses a worker and ends all its steps.

    Each sample that was sampled by one version has the log probabilities and experts of Hugging Face's implementation.
    """
    workers = await caller_workers.have(2)
    asked = {"model": "caller-0", "checkpoint": str(callers[0]), "new": str(callers[1]), "version": 1}
    asked |= {"data": str(tmp_path), "steps": STEPS, "prompts": 20, "seed": 11, "tokens": 60}
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers(2)
        trained = asyncio.Event()

        async def kill() -> None:
            await trained.wait()
            state = await until_state(http.rb, lambda found: any(worker.in_flight for worker in found.workers))
            workers[max(state.workers, key=lambda worker: worker.in_flight).worker].kill()

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            settings = json.dumps({**asked, "url": http.url})
            await run_program(PROGRAM, settings, python=find_python("skyrl"), on_line=on_lines({"step 2": trained.set}))
        left = [worker.weight_version for worker in (await http.rb.fleet.state()).workers]
        lost = http.own.stats().attempts_lost
    batches = json.loads((tmp_path / "batches.json").read_text())

    assert [len(batch) for batch in batches] == [GROUPS * SAMPLES] * STEPS
    samples = [sample for batch in batches for sample in batch]
    assert all(len(sample["rows"]) == len(sample["token_ids"]) for sample in samples)
    # Two turns with a message of the environment between them, which is not trained.
    assert any(0 in sample["loss_mask"] for sample in samples)
    old, new = Reference(callers[0]), Reference(callers[1])
    by_old = [rows for score, rows in (differs(sample, old) for sample in samples) if score < TOLERANCE]
    by_new = [rows for score, rows in (differs(sample, new) for sample in samples) if score < TOLERANCE]
    assert len(by_old) >= GROUPS * SAMPLES
    assert len(by_new) >= GROUPS * SAMPLES
    assert len(by_old) + len(by_new) >= len(samples) - IN_FLIGHT, "only requests in flight span the update"
    # A tie of two experts may be decided differently.
    assert max(by_old + by_new) < 0.01
    assert (left, lost > 0) == ([1], True)


async def test_the_released_simulated_trainer_fails_after_its_first_step(
    nats_url: str, callers: tuple[Path, Path], caller_workers: RealWorkers, tmp_path: Path
) -> None:
    """SkyRL's own simulated trainer fails in its own code after a step. If this passes, remove the subclass."""
    await caller_workers.have(1)
    asked = {"model": "caller-0", "checkpoint": str(callers[0]), "new": None, "released": True}
    asked |= {"data": str(tmp_path), "steps": 2, "prompts": 8, "seed": 5, "tokens": 8}
    async with http_before(nats_url, caller_workers.fleet) as http:
        await http.own.fleet.wait_for_workers()
        with pytest.raises(pytest.fail.Exception, match="'_SimDispatch' object has no attribute 'get_timing_metrics'"):
            await run_program(PROGRAM, json.dumps({**asked, "url": http.url}), python=find_python("skyrl"))
