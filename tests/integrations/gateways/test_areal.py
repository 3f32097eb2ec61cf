"""AReaL 1.0.4 from PyPI, unchanged: its remote vLLM engine, workflow executor and RLVR workflow, on two vLLM workers.

Replayed is only the trainer's side of a step: the order of its calls. AReaL's FSDP engine needs a GPU.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbus
from tests.http.support import http_before
from tests.integrations.gateways.conftest import LogProbs
from tests.integrations.support import find_python, needs, run_program
from tests.support.fleet import until_state
from tests.support.real_fleet import RealWorkers
from tests.support.waits import ENGINE_HANGS_AFTER_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs("gateways")]

PROGRAM = Path(__file__).parent / "programs/areal_engine.py"
LONG = 3000
SEEDS = (11, 12, 13, 14)
TOLERANCE = 1e-3
"""Largest difference of float32 log probabilities of vLLM and of Hugging Face."""


def generated(state: rollbus.FleetState) -> int:
    """Return the tokens that the only worker has generated, or 0 before it announces them."""
    counters = state.workers[0].counters
    return 0 if counters is None else counters.generated_tokens


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

    The workers are two at first. One is killed while long requests run; then AReaL pauses, updates and continues.
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
            await until_state(http.own, lambda state: sum(worker.in_flight for worker in state.workers) == len(SEEDS))
            next(iter(workers.living.values())).kill()
            state = await until_state(http.own, lambda state: len(state.workers) == 1 and state.workers[0].in_flight)
            before = generated(state)
            # The survivor resumes the requests of the other, and generates some of their tokens.
            await until_state(http.own, lambda state: generated(state) > before + 50)
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

    versions = {name: [check(logprobs, callers, each) for each in seen[name]] for name in ("before", "across", "after")}
    assert versions["before"] == [{0}] * len(SEEDS)
    assert versions["after"] == [{1}] * len(SEEDS)
    assert {1} <= set().union(*versions["across"]) <= {0, 1}
    assert {0, 1} in versions["across"]
    assert [sum(each["loss_mask"]) for each in seen["across"]] == [LONG] * len(SEEDS)
    for sample, scores in zip(seen["after"], seen["scores"], strict=True):
        mask = np.array(sample["loss_mask"], bool)
        np.testing.assert_allclose(np.array(scores)[mask], np.array(sample["logprobs"])[mask], atol=TOLERANCE)
    assert [worker.weight_version for worker in state.workers] == [1]
    # The trainer's default removes the checkpoint after the load: no later worker can load it.
    assert not seen["is_kept"]
