"""The assignment of GPUs to workers. Fake programs list the GPUs, so these tests run without any GPU."""

import argparse
import os
import signal
import stat
from pathlib import Path

import pytest

from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.local import fleet
from rollbus.frontend.cli.local.fleet import Gpus, divide_gpus, find_gpus, gpu_shares, gpus_per_engine
from tests.cli.support import ENV, processes_with, rollbus, running_up
from tests.support.processes import becomes_true

FOUR = "".join(f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-0000000{i}-a1b2)\n" for i in range(4))
WITH_MIG = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 3g.20gb     Device  0: (UUID: MIG-7a4b)
  MIG 3g.20gb     Device  1: (UUID: MIG-8c2d)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-6e9c)
"""


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a fake nvidia-smi on the PATH of this process and its child processes."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def lists(listing: str) -> str:
    """Return a script that prints `listing` if it is called with -L."""
    return f"[ \"$*\" = -L ] || exit 9\ncat <<'END'\n{listing}END"


def options(engine: str = "vllm", engine_args: str | None = None, each: int | None = None) -> argparse.Namespace:
    """Return options of `up`."""
    return argparse.Namespace(engine=engine, engine_args=engine_args, gpus_per_worker=each)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0", ("0",)),
        ("3,1", ("3", "1")),
        (" 0 , GPU-5d5ba0d6-11aa,MIG-7a4b", ("0", "GPU-5d5ba0d6-11aa", "MIG-7a4b")),
        ("MIG-GPU-5d5b/1/0", ("MIG-GPU-5d5b/1/0",)),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_the_variable_lists_gpus(value: str, devices: tuple[str, ...]) -> None:
    """The variable lists indices and UUIDs in order, and an empty value means no GPU."""
    assert Gpus.from_variable(value).devices == devices


@pytest.mark.parametrize(("value", "part"), [("0;1", "'0;1'"), ("0,,1", "''"), ("0,x", "'x'"), ("1,0,1", "'1' twice")])
def test_a_wrong_list_is_refused(value: str, part: str) -> None:
    """A list that CUDA would cut silently, or that names a GPU twice, is an error that quotes the wrong part."""
    with pytest.raises(CommandFailed, match="CUDA_VISIBLE_DEVICES") as caught:
        Gpus.from_variable(value)
    assert (part in str(caught.value), caught.value.exit_code) == (True, ExitCode.USAGE)


@pytest.mark.parametrize(
    ("listing", "devices"),
    [(FOUR, ("0", "1", "2", "3")), (WITH_MIG, ("MIG-7a4b", "MIG-8c2d", "1")), ("No devices were found\n", ())],
)
def test_the_driver_lists_gpus(listing: str, devices: tuple[str, ...]) -> None:
    """In the driver's list, the MIG devices of a GPU replace that GPU."""
    assert Gpus.from_driver(listing).devices == devices


def test_the_variable_comes_before_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is used only if the variable is not set. Without nvidia-smi, there are no GPUs."""
    driver(tmp_path, monkeypatch, lists(FOUR))

    assert find_gpus({"CUDA_VISIBLE_DEVICES": "7"}).devices == ("7",)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}).devices == ()
    assert find_gpus({}).devices == ("0", "1", "2", "3")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_gpus({}).devices == ()


def test_a_driver_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nvidia-smi fails, the command fails too, instead of assuming that the machine has no GPU."""
    driver(tmp_path, monkeypatch, 'echo "NVIDIA-SMI has failed because it could not communicate"; exit 9')

    with pytest.raises(CommandFailed, match=r"could not communicate; set \$CUDA_VISIBLE_DEVICES"):
        find_gpus({})


@pytest.mark.parametrize(
    ("engine_args", "number"),
    [
        (None, 1),
        ('{"max_model_len": 8}', 1),
        ('{"tensor_parallel_size": 2, "pipeline_parallel_size": 3}', 6),
        ('{"tensor_parallel_size": 2, "data_parallel_size": 4}', 8),
        ('{"data_parallel_size": 4, "data_parallel_size_local": 2}', 2),
    ],
)
def test_an_engine_uses_the_product_of_its_parallel_sizes(engine_args: str | None, number: int) -> None:
    """The number of GPUs of an engine is the product of its parallel sizes on this machine."""
    assert gpus_per_engine(engine_args) == number


@pytest.mark.parametrize("size", ["0", "true", '"two"'])
def test_an_invalid_parallel_size_is_refused(size: str) -> None:
    """An invalid parallel size is an error that names the engine argument."""
    with pytest.raises(CommandFailed, match="--engine-args: tensor_parallel_size is"):
        gpus_per_engine(f'{{"tensor_parallel_size": {size}}}')


def test_no_gpu_is_assigned_twice() -> None:
    """Each worker receives the next GPUs of the list, and no GPU is assigned twice."""
    four = Gpus(("GPU-a", "GPU-b", "2", "3", "4"), "here")

    assert gpu_shares(four, ("w0", "w1"), 2) == {"w0": ("GPU-a", "GPU-b"), "w1": ("2", "3")}
    with pytest.raises(CommandFailed, match=r"3 workers with 2 GPUs each need 6 GPUs, but here lists 5 .* at most 2 "):
        gpu_shares(four, ("w0", "w1", "w2"), 2)


@pytest.fixture
def engines_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed vLLM look like a build for GPUs."""
    monkeypatch.setattr(fleet, "computes_on_cpu", lambda: False)


@pytest.mark.usefixtures("engines_use_gpus")
def test_each_engine_receives_its_number_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine receives its number of GPUs by default.

    The driver's indices set its order, and a user's list stays.
    """
    driver(tmp_path, monkeypatch, lists(FOUR))
    pair = '{"tensor_parallel_size": 2}'

    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert divide_gpus(options(), ("a", "b")) == {
        "a": {"CUDA_VISIBLE_DEVICES": "0", **order},
        "b": {"CUDA_VISIBLE_DEVICES": "1", **order},
    }
    assert capsys.readouterr().err == "GPUs of nvidia-smi: a has 0; b has 1; unused: 2, 3\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-x,GPU-y")
    assert divide_gpus(options(engine_args=pair, each=2), ("a",)) == {"a": {"CUDA_VISIBLE_DEVICES": "GPU-x,GPU-y"}}
    with pytest.raises(CommandFailed, match=r"--gpus-per-worker 1: an engine with these --engine-args uses 2"):
        divide_gpus(options(engine_args=pair, each=1), ("a",))
    with pytest.raises(CommandFailed, match=r"2 workers with 2 GPUs each need 4 GPUs"):
        divide_gpus(options(engine_args=pair), ("a", "b"))


@pytest.mark.usefixtures("engines_use_gpus")
def test_without_gpus_the_environment_stays_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs, or with zero GPUs per worker, the environment of the engines stays unchanged."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert divide_gpus(options(), ("a", "b")) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert divide_gpus(options(each=0), ("a", "b")) == {}
    assert divide_gpus(options("synthetic"), ("a", "b")) == {}


def test_workers_with_a_cpu_build_of_vllm_start_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vLLM build for CPUs, workers start without GPUs, and --gpus-per-worker is refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    assert divide_gpus(options(), ("a", "b")) == {}
    with pytest.raises(CommandFailed, match="--gpus-per-worker 1: the installed vLLM computes only on the CPU"):
        divide_gpus(options(each=1), ("a",))


def test_gpus_per_worker_is_refused_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs, --gpus-per-worker is a usage error before anything starts."""
    driver(tmp_path, monkeypatch, lists("No devices were found\n"))
    with pytest.raises(CommandFailed, match="--gpus-per-worker 2: no GPU listed by nvidia-smi") as caught:
        divide_gpus(options("synthetic", each=2), ("a",))
    assert caught.value.exit_code == ExitCode.USAGE


def visible(worker: str, nats: str) -> tuple[int, str]:
    """Return the process id of a worker and the GPUs in its environment."""
    (pid,) = processes_with(f"--worker-id {worker}", nats)
    variables = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return pid, variables.get("CUDA_VISIBLE_DEVICES", "all")


def is_back(worker: str, old: int, nats: str) -> bool:
    """Return True if another process than `old` serves as this worker."""
    return processes_with(f"--worker-id {worker}", nats) not in ([], [old])


@pytest.mark.slow
def test_up_assigns_each_worker_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` assigns GPUs also to prefill workers, keeps the assignment after a restart, and logs it."""
    driver(tmp_path, monkeypatch, lists(FOUR))
    env = {**ENV, "PATH": os.environ["PATH"]}
    log = tmp_path / "log"
    workers = ("--workers", "1", "--prefill-workers", "1", "--gpus-per-worker", "2")
    with running_up("--engine", "synthetic", *workers, log=log, env=env) as (_, info):
        nats = info["nats"]
        assert info.keys() == {"nats", "http", "workers"}
        old, first = visible("local-0", nats)
        assert (first, visible("local-1", nats)[1]) == ("0,1", "2,3")
        assert "GPUs of nvidia-smi: local-0 has 0, 1; local-1 has 2, 3\n" in log.read_text()
        os.kill(old, signal.SIGKILL)
        assert becomes_true(lambda: is_back("local-0", old, nats))
        assert becomes_true(lambda: visible("local-0", nats)[1] == "0,1")


@pytest.mark.slow
def test_up_refuses_more_workers_than_there_are_gpus() -> None:
    """If there are fewer GPUs than workers need, `up` starts nothing and reports both numbers in one line."""
    env = {**ENV, "CUDA_VISIBLE_DEVICES": "0,1"}

    done = rollbus("up", "--engine", "synthetic", "--workers", "3", "--gpus-per-worker", "1", env=env)

    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "3 workers with 1 GPU each need 3 GPUs, but $CUDA_VISIBLE_DEVICES lists 2 (0, 1)" in done.stderr
