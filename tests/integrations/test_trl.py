"""TRL's published, unchanged `GRPOTrainer` with a fleet's completions and new weights after each step."""

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.cli.support import running_up, serves
from tests.integrations.support import PYTHON, ROOT, needs_trainers, run_program, started, until_line
from tests.support.processes import FOLDERS
from tests.support.real_fleet import RealWorkers
from tests.support.waits import ENGINE_STARTS_S, Shared, patient

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


# The integration with TRL's own types, without a fleet.


async def test_prompts_sampling_and_advantages_are_those_of_trl(policy: Path) -> None:
    """Prompts, sampling, advantages and groups equal TRL's.

    Seeds differ within a group, aborted answers resume, and workers without new weights are named.
    """
    async with asyncio.timeout(ENGINE_STARTS_S), started("trl_units.py", policy) as process:
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.endswith("ok\n")


async def test_all_ranks_end_if_rank_0_cannot_publish() -> None:
    """If rank 0 cannot publish, all ranks end. Without this, the other ranks would wait until their time limit."""
    async with asyncio.timeout(ENGINE_STARTS_S), started("trl_ranks.py") as process:
        said = (await process.communicate())[0].decode()
    # Both ranks write to one pipe, so the ends of their lines may be interleaved.
    assert "rank 0 of 2: the lease is lost" in said, said
    assert "rank 1 of 2: rank 0 has not published the policy; see the error of rank 0" in said


# The examples for TRL, run as by a user: beside modules with misleading names and without an engine.


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLBUS_"))}


class Place(NamedTuple):
    """A folder with the examples, and a fleet of one real worker with the tiny MoE."""

    folder: Path
    nats: str

    def run(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run an example until it exits."""
        return subprocess.run(
            [PYTHON, name, "--nats", self.nats, *arguments], cwd=self.folder, env=ENVIRONMENT,
            capture_output=True, text=True, check=False, timeout=patient(540.0),
        )  # fmt: skip


@contextmanager
def running_place(folder: Path) -> Iterator[Place]:
    """Copy the examples beside modules with the names of our packages, and start the fleet."""
    for example in (ROOT / "examples").glob("trl_*.py"):
        shutil.copy(example, folder)
    for name in FOLDERS:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py is not a part of rollbus')\n")
    state = folder / "state"
    state.mkdir()
    options = ("--http", "127.0.0.1:0", "--state-dir", str(state), "--cache-dir", str(state / "cache"))
    with running_up(*options, log=state / "log") as (_, info):
        yield Place(folder, info["nats"])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Place]]:
    """A place that all tests share as long as its worker serves."""
    with Shared(
        lambda: running_place(tmp_path_factory.mktemp("place")), is_sound=lambda place: serves(place.nats)
    ) as shared:
        yield shared


@pytest.fixture
def place(places: Shared[Place]) -> Place:
    """The place where the examples run."""
    return places.get()


def test_the_example_with_the_trainer_of_trl_raises_the_reward(place: Place) -> None:
    """The example with TRL's trainer raises the reward and prints a line for each step and the last version."""
    done = place.run("trl_grpo.py", "--steps", "10")

    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(reward) for reward in re.findall(r"^step \d+: mean reward (\S+)$", done.stdout, re.MULTILINE)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert re.search(r"^the fleet has the weights of version \d+$", done.stdout, re.MULTILINE)


def test_each_step_of_the_asynchronous_example_publishes_a_version(place: Place) -> None:
    """Each step of the asynchronous example publishes a version."""
    done = place.run("trl_async.py", "--steps", "3")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^step (\d+): mean reward \S+; weights are now (\d+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [1, 2, 3]
    versions = [int(version) for _, version in lines]
    assert versions == [*range(versions[0], versions[0] + 3)]


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_async.py"])
def test_a_number_of_steps_below_one_is_refused(place: Place, name: str) -> None:
    """Fewer than one step is a usage error with exit code 2 and one line."""
    done = place.run(name, "--steps", "0")

    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("error: argument --steps: 0 is not 1 or more")


# Megatron-Core's own router replay on a CPU, fed with the rows of a micro-batch.


async def test_megatron_core_replays_the_experts_of_the_rows() -> None:
    """Megatron-Core replays the experts of the rows, also for recomputed layers and for some layers or tokens.

    Gradients reach the router.
    """
    async with asyncio.timeout(ENGINE_STARTS_S), started("megatron_replay.py") as process:
        said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said
    assert said.endswith("ok\n")
