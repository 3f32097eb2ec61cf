"""`deploy/docker/run-worker`: equal containers get different users and GPUs. A stand-in lists the GPUs."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.waits import SOON_S

WORKER = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER ${ROLLBUS_CREDS##*/}"; exec cat'
"""A stand-in for `rollbus` that prints its settings and runs until its input ends."""


class Containers:
    """Runs the script several times over the folders that containers share."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []
        (folder / "bin").mkdir()
        for path in ("keys/worker", "kv"):
            (folder / path).mkdir(parents=True)
        for number in range(3):
            (folder / f"keys/worker/w{number}.creds").touch()
        self._program("rollbus", WORKER)
        self._program("nvidia-smi", "\n".join(f"echo 'GPU {i}: NVIDIA (UUID: GPU-{i})'" for i in range(gpus)))
        script = (ROOT / "deploy/docker/run-worker").read_text()
        for path in ("/keys", "/kv"):
            assert path in script
            script = script.replace(path, f"{folder}{path.removeprefix('/tmp')}")
        (folder / "run-worker").write_text(script)

    def _program(self, name: str, script: str) -> None:
        path = self._folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self, **settings: str) -> subprocess.Popen[str]:
        """Start a container."""
        env: Mapping[str, str] = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "ROLLBUS_MODEL": "tiny-moe",
            **settings,
        }
        command = ["sh", str(self._folder / "run-worker")]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._running.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Let a container's worker exit."""
        process.communicate(timeout=SOON_S)

    def end_all(self) -> None:
        """Kill the workers of all containers."""
        for process in self._running:
            with process:
                process.kill()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    """Yield the containers of a machine with four GPUs."""
    containers = Containers(tmp_path, 4)
    yield containers
    containers.end_all()


def printed_settings(process: subprocess.Popen[str]) -> str:
    """Return the settings that a container's worker printed."""
    return process.stdout.readline().strip()


def test_no_two_containers_get_the_same_gpu(containers: Containers) -> None:
    """No two containers get the same GPU, and a container without free GPUs exits with the reason.

    The GPUs of an exited container are free again.
    """
    first, second = containers.start(ROLLBUS_GPUS="2"), containers.start(ROLLBUS_GPUS="2")
    shares = {printed_settings(first): first, printed_settings(second): second}
    assert {line.split()[0] for line in shares} == {"0,1", "2,3"}
    assert {line.split()[1] for line in shares} == {"PCI_BUS_ID"}
    assert {line.split()[2] for line in shares} == {"w0.creds", "w1.creds"}

    third = containers.start(ROLLBUS_GPUS="2")
    _, reason = third.communicate(timeout=SOON_S)
    assert (third.returncode, "of 4 GPUs, 2 for each worker (ROLLBUS_GPUS), not enough are free" in reason) == (1, True)

    line, process = next(iter(shares.items()))
    containers.end(process)
    assert printed_settings(containers.start(ROLLBUS_GPUS="2")).split()[0] == line.split()[0]


def test_without_rollbus_gpus_the_environment_does_not_change(containers: Containers) -> None:
    """Without ROLLBUS_GPUS, as in the other profiles, the script does not change the environment."""
    assert printed_settings(containers.start(CUDA_VISIBLE_DEVICES="")) == "w0.creds"


@pytest.mark.parametrize(
    ("value", "code", "reason"), [("two", 2, "is 'two'"), ("0", 2, "is '0'"), ("8", 1, "of 4 GPUs")]
)
def test_an_impossible_rollbus_gpus_is_rejected(containers: Containers, value: str, code: int, reason: str) -> None:
    """The script rejects an impossible ROLLBUS_GPUS with one line on stderr."""
    process = containers.start(ROLLBUS_GPUS=value)
    _, said = process.communicate(timeout=SOON_S)

    assert (process.returncode, reason in said) == (code, True)
