"""`tests/docker/run` reports missing programs before it does anything."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.patience import SOON_S
from tests.support.processes import ROOT

USED = ("bash", "dirname", "env", "id", "mktemp", "rm", "sed")
"""Programs that every machine has."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a checkout without `.venv`, and beside it an empty folder for programs."""
    clone = tmp_path / "clone"
    for name in ("tests/docker/run", "tests/docker/sandbox", "deploy/docker/Dockerfile", "compose.yaml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    (tmp_path / "bin").mkdir()
    return clone


def run(clone: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run `tests/docker/run` with no other programs than these. Each program is a line of shell."""
    folder = clone.parent / "bin"
    # The folder contains no links, so that this code never overwrites the machine's own program.
    lines = {name: f'exec {shutil.which(name)} "$@"' for name in USED} | programs
    for name, line in lines.items():
        with (folder / name).open("x") as file:
            file.write(f"#!{shutil.which('bash')}\n{line}\n")
        (folder / name).chmod(0o755)
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ROLLBUS_")}
    command = [clone / "tests/docker/run"]
    environment = {**settings, "PATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=SOON_S)


def test_without_docker_the_script_names_the_programs_that_the_sandbox_lacks(clone: Path) -> None:
    """The script names each program that the sandbox lacks, with the command that installs it."""
    done = run(clone, python3="exit 1", unshare="exit 1")

    assert done.returncode == 2
    assert "tests/docker/sandbox needs: mmdebstrap slirp4netns." in done.stderr
    assert "apt-get install mmdebstrap slirp4netns" in done.stderr
    assert "command not found" not in done.stderr


def test_the_script_first_names_the_missing_tools_of_its_steps(clone: Path) -> None:
    """If Docker answers, the script first checks for the tools of its steps."""
    done = run(clone, docker="exit 0", make="exit 0", curl="exit 0")

    assert (done.returncode, done.stderr) == (2, "tests/docker/run needs jq: apt-get install jq\n")


@pytest.mark.parametrize("docker", ["exit 0", "exit 1"])
def test_a_fresh_clone_gets_its_environment_first(clone: Path, docker: str) -> None:
    """The script creates `.venv` first, because the tests of its last step need it, and ends if that fails."""
    sandbox = dict.fromkeys(("mmdebstrap", "slirp4netns", "unshare", "python3"), "exit 1")
    note = f'[ "$1" = info ] || echo docker "$@" >&2; {docker}'
    done = run(
        clone, docker=note, make='echo make "$@" >&2; exit 3', curl="exit 0", jq="exit 0", id="echo 0", **sandbox
    )

    assert (done.returncode, done.stderr) == (3, "make setup\n")
