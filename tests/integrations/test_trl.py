"""TRL's published, unchanged `GRPOTrainer` with a fleet's completions and new weights after each step."""

from pathlib import Path

import numpy as np
import pytest

from tests.integrations.support import needs_trainers, run_program, started, until_line
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, needs_trainers]

NUM_STEPS = 16
KILL_AFTER = 4


async def test_the_reward_rises_although_a_worker_is_killed(
    nats_url: str, policy: Path, policy_workers: RealWorkers, tmp_path: Path
) -> None:
    """The reward rises although a worker is killed.

    Sampler and trainer compute equal log probabilities, and each step has the weights of the step before it.
    """
    workers = await policy_workers.have(2)
    first = next(iter(workers.values()))

    def kill(line: str) -> None:
        if line == f"step {KILL_AFTER}":
            first.kill()

    seen = await run_program(
        "trl_grpo.py", nats_url, policy_workers.fleet, policy, NUM_STEPS, tmp_path / "out", on_line=kill
    )

    rewards = np.array(seen["rewards"])
    assert len(rewards) == NUM_STEPS
    assert rewards[-3:].mean() > rewards[:3].mean() + 0.25
    assert seen["difference"] < 1e-4
    assert seen["versions"] == [[version, version] for version in range(1, NUM_STEPS + 1)]
    assert seen["version"] == NUM_STEPS + 1
    assert sum(map(len, seen["workers"][:2])) >= 3, "both workers answered"
    assert all(len(names) == 1 for names in seen["workers"][-3:])


async def test_the_fleet_computes_with_the_adapter_that_is_trained(
    nats_url: str, policy: Path, policy_workers: RealWorkers, tmp_path: Path
) -> None:
    """The published weights include a LoRA adapter of PEFT, so the fleet's log probabilities equal the trainer's."""
    await policy_workers.have(1)

    seen = await run_program("trl_grpo.py", nats_url, policy_workers.fleet, policy, 6, tmp_path / "out", "lora")

    assert seen["difference"] < 1e-4
    assert seen["versions"] == [[version, version] for version in range(1, 7)]
    assert 0 < seen["stored"] < 1


async def test_a_killed_trainer_resumes_from_its_checkpoint_with_its_current_weights(
    nats_url: str, policy: Path, policy_workers: RealWorkers, tmp_path: Path
) -> None:
    """After a trainer resumes from its checkpoint, each batch has its current weights.

    This holds for conversations, accumulated batches that it uses twice, and evaluations.
    """
    workers = await policy_workers.have(2)
    first = next(iter(workers.values()))
    arguments = (nats_url, policy_workers.fleet, policy, 8, tmp_path / "out")
    async with started("trl_resume.py", *arguments) as process:
        await until_line(process, "step 4")
        process.kill()

    def kill(line: str) -> None:
        if line == "eval 4":  # the first of two batches
            first.kill()

    seen = await run_program("trl_resume.py", *arguments, on_line=kill)

    assert seen["resumed"]
    at_step_3 = seen["version"] - (8 - 3)
    assert at_step_3 > 5, "versions of the killed trainer are not given again"
    assert {kind for kind, *_ in seen["batches"]} == {"train", "eval"}
    for kind, step, versions, difference in seen["batches"]:
        assert versions == [at_step_3 + step - 3], (kind, step)
        assert difference < 1e-4


async def test_the_calls_of_the_asynchronous_trainer_work_on_a_fleet(
    nats_url: str, policy: Path, policy_workers: RealWorkers
) -> None:
    """The asynchronous trainer's calls work in its order and with its queue.

    Samples are complete and fresh, and later versions store only changes.
    """
    await policy_workers.have(2)

    seen = await run_program("trl_async.py", nats_url, policy_workers.fleet, policy, 4)

    assert seen["version"] == 5
    assert seen["difference"] < 1e-4
    assert max(seen["staleness"]) <= 3
    assert min(seen["staleness"]) >= 0
    assert seen["stored"][0] >= 1.0
    assert seen["lengths"] > 0
