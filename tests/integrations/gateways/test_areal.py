"""AReaL 1.0.4 from PyPI, unchanged: its remote vLLM engine, workflow executor and RLVR workflow, on two vLLM workers.

Replayed is only the trainer's side of a step: the order of its calls. AReaL's FSDP engine needs a GPU.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.workers.engines.vllm.tiny_moe import END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from tests.http.support import http_before
from tests.integrations.gateways.conftest import LogProbs
from tests.integrations.support import find_python, needs, run_program
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers
from tests.support.waits import ENGINE_HANGS_AFTER_S, until_true

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs("gateways")]

PROGRAM = Path(__file__).parent / "programs/areal_engine.py"
LONG = 2000
SEEDS = tuple(range(11, 27))
"""Samples at once. AReaL sends the tokenizer's special tokens as stop ids in spite of `ignore_eos`, so a sample of a
random model has 256 tokens on average. A sample that waits for another worker has as many left as at its start."""
STOPS = [SPECIAL_TOKENS.index(token) for token in (TURN_END, END_OF_TEXT)]
TOLERANCE = 1e-3
"""Largest difference of float32 log probabilities of vLLM and of Hugging Face."""


def check(logprobs: LogProbs, checkpoints: tuple[Path, Path], sample: dict[str, Any]) -> set[int]:
    """Assert that each token's log probability is that of the version AReaL gave it. Return the versions."""
    mask, versions = np.array(sample["loss_mask"], bool), np.array(sample["versions"])
    assert set(versions[~mask]) == {-1}
    for version in set(versions[mask]):
        of_version = versions == version
        expected = logprobs(checkpoints[version], sample["input_ids"])[of_version[1:]]
        np.testing.assert_allclose(np.array(sample["logprobs"])[of_version], expected, atol=TOLERANCE)
    assert np.all(np.diff(versions[mask]) >= 0)
    return set(versions[mask].tolist())


async def test_areal_rolls_out_through_a_killed_worker_and_an_update(
    nats_url: str, workers: RealWorkers, callers: tuple[Path, Path], logprobs: LogProbs
) -> None:
    """Every token has the log probability that its version's checkpoint gives it, and no trajectory is lost.

    The workers are two at first. The busier one is killed while long requests run; then AReaL pauses, updates and
    continues.
    """
    await workers.have(2)
    root = callers[0].parent
    settings = {
        "root": str(root), "trial": workers.fleet, "seeds": SEEDS, "long": LONG, "timeout_s": ENGINE_HANGS_AFTER_S
    }  # fmt: skip
    async with http_before(nats_url, workers.fleet) as http:
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers(2)

        submitted = asyncio.Event()

        async def interfere() -> None:
            await submitted.wait()
            state = await until_state(http.own, lambda state: any(worker.in_flight for worker in state.workers))
            workers.living[max(state.workers, key=lambda worker: worker.in_flight).worker].kill()
            # The survivor resumes the requests of the other.
            await until_true(lambda: http.own.stats().attempts_lost)
            await until_state(http.own, lambda state: len(state.workers) == 1 and state.workers[0].in_flight)
            (root / "go").touch()

        address = http.url.removeprefix("http://")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(interfere())
            seen = await run_program(
                *(PROGRAM, address, callers[0], callers[1], json.dumps(settings)),
                python=find_python("gateways"),
                on_line=lambda line: submitted.set() if line == "submitted" else None,
            )
        state = await http.rb.fleet.state()
        lost = http.own.stats().attempts_lost

    versions = {name: [check(logprobs, callers, each) for each in seen[name]] for name in ("before", "across", "after")}
    assert versions["before"] == [{0}] * 4
    assert versions["after"] == [{1}] * 4
    assert len(versions["across"]) == len(SEEDS)
    assert {0, 1} in versions["across"]
    assert lost > 0
    for sample in seen["across"]:
        assert sum(sample["loss_mask"]) == LONG or sample["input_ids"][-1] in STOPS
    for sample, scores in zip(seen["after"], seen["scores"], strict=True):
        mask = np.array(sample["loss_mask"], bool)
        np.testing.assert_allclose(np.array(scores)[mask], np.array(sample["logprobs"])[mask], atol=TOLERANCE)
    assert [worker.weight_version for worker in state.workers] == [1]
    # The trainer's default removes the checkpoint after the load: no later worker can load it.
    assert not seen["is_kept"]
