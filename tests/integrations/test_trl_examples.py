"""The examples for TRL, run as by a user: beside modules with misleading names and without an engine."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cli.support import running_up, serves
from tests.integrations.support import PYTHON, ROOT, needs_trainers
from tests.support.one_name import FOLDERS
from tests.support.patience import patient
from tests.support.shared import Shared

pytestmark = [pytest.mark.vllm, needs_trainers]

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
