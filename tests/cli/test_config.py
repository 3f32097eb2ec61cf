"""`rollbus init`, `rollbus up --config`, and the completion of shells."""

import argparse
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.app import build_parser, main
from rollbus.frontend.cli.exits import CommandFailed, ExitCode
from rollbus.frontend.cli.local import fleet
from rollbus.frontend.cli.local.fleet import Gpus, divide_gpus, find_gpus, gpu_shares, gpus_per_engine
from rollbus.frontend.cli.local.up import nats_port
from rollbus.frontend.cli.options import python_env, worker_flags
from rollbus.schemas.options import duration, size
from rollbus.workers.__main__ import main as worker_main
from rollbus.workers.__main__ import parser as process_parser
from rollbus.workers.engines import ENGINES
from tests.cli.support import ENV, ROOT, processes_with, rollbus, running_up
from tests.support.processes import becomes_true


def parse(path: Path, text: str, *argv: str) -> Any:
    """Return the options of `rollbus up` with a file of settings."""
    path.write_text(text)
    return build_parser().parse_args(["up", *argv, "--config", str(path)])


def test_settings_of_a_file_are_options_and_the_command_line_takes_precedence(tmp_path: Path) -> None:
    """Each key is an option. An option of the command line replaces the setting, before and after --config."""
    text = """
        workers = 3
        start_timeout = "5m"
        stage-bytes = "2GiB"
        secure = true
        otel = false
        weight-root = ["/a", "/b"]
        nats = "nats://127.0.0.1:4000"
        [engine-args]
        max_model_len = 64
    """
    args = parse(tmp_path / "fleet.toml", text, "--workers", "1")
    assert (args.workers, args.start_timeout, args.stage_bytes, args.secure) == (1, 300.0, 2**31, True)
    assert (args.weight_root, args.engine_args, args.otel) == (["/a", "/b"], '{"max_model_len": 64}', False)
    assert (args.nats, args.is_nats_named) == ("nats://127.0.0.1:4000", True)
    assert build_parser().parse_args(["up", f"--conf={tmp_path / 'fleet.toml'}", "--workers", "9"]).workers == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrkers = 2", 'no setting "wrkers" (did you mean workers?)'),
        ("json = true", 'no setting "json"'),
        ('workers = "x"', "workers: 'x' is not an integer of at least 1"),
        ("workers = true", "workers is True; allowed: N"),
        ("secure = 1", "secure is 1; allowed: true or false"),
        ('engine = "vlm"', "engine is 'vlm'; allowed: vllm, synthetic"),
        ('start-timeout = "5q"', "start-timeout: '5q' is not a duration"),
        ("model = 2026-01-01", "allowed: DIR|ID"),
        ("x = [", "Invalid value"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the file, the key and the allowed values, and the exit code is that of wrong usage."""
    path = tmp_path / "fleet.toml"
    with pytest.raises(SystemExit) as ended:
        parse(path, text)
    error = capsys.readouterr().err
    assert ended.value.code == ExitCode.USAGE
    assert error.startswith(f"rollbus up: {path}: ")
    assert message in error


def test_a_missing_file_of_settings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that cannot be read is an error with its name."""
    with pytest.raises(SystemExit):
        build_parser().parse_args(["up", "--config", str(tmp_path / "no.toml")])
    assert (
        capsys.readouterr().err
        == f"rollbus up: {tmp_path / 'no.toml'}: No such file or directory; `rollbus init` writes a file\n"
    )


def test_init_writes_every_option_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file changes nothing. With all comments removed, it sets every option to a valid value."""
    monkeypatch.setenv("ROLLBUS_NATS", "nats://user:secret@127.0.0.1:4222")
    path, unit, env = tmp_path / "fleet.toml", tmp_path / "fleet.service", tmp_path / "fleet.env"
    assert main(["init", str(path), "--systemd", str(unit), "--env", str(env)]) == ExitCode.OK
    text = path.read_text()
    assert tomllib.loads(text) == {}
    assert "secret" not in text
    settings = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#") and line[1:2] not in (" ", ""))
    args = parse(tmp_path / "all.toml", settings)
    own = {"command", "default_of", "is_nats_named", "with_option_names", "config", "json", "verbose", "help"}
    # Each setting is an option, or the parser would have failed.
    assert len(tomllib.loads(settings)) == len(vars(args).keys() - own)
    assert f"up --config {path}" in unit.read_text()
    assert f"EnvironmentFile=-{env}" in unit.read_text()
    assert env.stat().st_mode & 0o777 == 0o600
    assert main(["init", str(path)]) == ExitCode.USAGE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_options_and_values(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of each shell has the commands, their options and the allowed values, and the shell can read it."""
    assert main(["completion", shell]) == ExitCode.OK
    script = capsys.readouterr().out
    for word in ("update-weights", "served-model-name", "synthetic"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


# The port of `rollbus up`, and the options and the environment that it passes to its workers.


def test_up_uses_the_port_of_the_nats_option() -> None:
    """`up` uses the port of --nats. Without a port, or with port 0, it uses any free port."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]

    assert nats_port(f"nats://127.0.0.1:{free}", is_named=True) == free
    assert nats_port(f"localhost:{free}", is_named=True) == free
    assert nats_port("nats://127.0.0.1:0", is_named=True) == -1
    assert nats_port("nats://127.0.0.1", is_named=True) == -1


def test_only_a_busy_default_port_is_replaced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy port is an error if --nats or $ROLLBUS_NATS names it. A busy default port is replaced, with a message."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        url = f"nats://127.0.0.1:{port}"

        monkeypatch.delenv("ROLLBUS_NATS", raising=False)
        assert not build_parser().parse_args(["up"]).is_nats_named
        assert build_parser().parse_args(["up", "--nats", "nats://127.0.0.1:4222"]).is_nats_named
        monkeypatch.setenv("ROLLBUS_NATS", url)
        assert build_parser().parse_args(["up"]).is_nats_named

        assert nats_port(url, is_named=False) == -1
        assert capsys.readouterr().err == f"port {port} is in use: the NATS server listens at a free port\n"
        for argv in (["up", "--engine", "synthetic"], ["up", "--engine", "synthetic", "--nats", url]):
            assert main(argv) == ExitCode.FAILED
            assert capsys.readouterr().err == (
                f"rollbus: --nats {url}: port {port} is in use; name another port, or nats://127.0.0.1:0 for any free "
                "port\n"
            )


def test_worker_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rollbus worker` and `rollbus up` pass the options of workers to the process, which has the same options."""
    engine_args = '{"max_model_len": 64}'
    argv = ["up", "--engine", "synthetic", "--engine-args", engine_args, "--served-model-name", "m", "-v"]
    argv += ["--engine-timeout-s", "1m", "--weight-root", "a", "--weight-root", "b", "--cache-dir", "c"]
    argv += ["--stage-bytes", "7KB", "--fetch-rate", "8", "--no-prove-reload"]

    flags = worker_flags(build_parser().parse_args(argv))
    assert flags == [
        *("--engine", "synthetic", "--served-model-name", "m"),
        *("--engine-args", engine_args, "--engine-timeout-s", "60.0"),
        *("--weight-root", "a", "--weight-root", "b", "--cache-dir", "c", "--stage-bytes", "7000", "--fetch-rate", "8"),
        *("--no-prove-reload", "--log-level", "debug"),
    ]
    worker = process_parser().parse_args(flags)
    assert (worker.engine, worker.engine_timeout_s, worker.stage_bytes) == ("synthetic", 60.0, 7000)
    assert worker.weight_root == ["a", "b"]
    engines = next(action.choices for action in process_parser()._actions if action.dest == "engine")
    assert sorted(engines or ()) == sorted(ENGINES)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((duration, text, value) for text, value in (
            ("90", 90.0), ("1.5", 1.5), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), ("2d", 172800.0),
        )),
        *((size, text, value) for text, value in (
            ("1000000", 10**6), ("100MB", 10**8), ("1.5 GB", 1.5 * 10**9), ("2GiB", 2**31), ("4kib", 4096), ("7B", 7),
        )),
    ],
)  # fmt: skip
def test_durations_and_sizes_have_units(parse: Callable[[str], float], text: str, value: float) -> None:
    """A duration without a unit is in seconds, and a size in bytes."""
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (duration, ["", "0", "0s", "-1", "m", "5x", "5m 3", "inf", "nan"]),
        (size, ["", "0", "0.1B", "-1", "1.5", "5X", "5M"]),
    ],
)
def test_a_wrong_duration_or_size_shows_examples(parse: Callable[[str], float], texts: list[str]) -> None:
    """The error shows the value and correct ones."""
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=f"'{text}' is not a .* such as .*(5m or 1h30m|100MB or 2GiB)"):
            parse(text)


def test_pythonpath_of_workers_starts_with_the_rollbus_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's PYTHONPATH starts with the unresolved folder of rollbus, exactly once. The user's entries stay."""
    source = ROOT / "src"
    monkeypatch.setenv("PYTHONPATH", f"/theirs:{source}")
    assert python_env()["PYTHONPATH"] == f"/theirs:{source}"
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    assert python_env()["PYTHONPATH"] == f"{source}:/theirs"


@pytest.mark.parametrize("run", [lambda words: main(["up", *words]), worker_main], ids=["up", "worker"])
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--model", "{dir}"], "--model {dir} has no config.json; allowed: a folder of save_pretrained()"),
        (["--model", "{dir}/none"], "--model {dir}/none is not a folder; allowed: a folder, or a Hugging Face"),
        (["--model", "{model}", "--cache-dir", "{file}"], "--cache-dir {file} cannot be written: File exists"),
        (
            ["--model", "{model}", "--engine-args", '{{"enable_sleep_mode": true}}'],
            "--engine-args has enable_sleep_mode, which needs a GPU, and the installed vLLM computes only on the CPU",
        ),
    ],
)
def test_a_start_that_must_fail_is_refused_before_any_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    run: Callable[[list[str]], int],
    options: list[str],
    problem: str,
) -> None:
    """A wrong model, an option that the device cannot do and a place that cannot be written are usage errors.

    The worker process checks them too, for `rollbus worker` and for other programs that start it.
    """
    names = {"dir": tmp_path, "model": tmp_path / "model", "file": tmp_path / "file"}
    names["model"].mkdir()
    (names["model"] / "config.json").write_text("{}")
    names["file"].write_text("")
    monkeypatch.setattr("rollbus.schemas.options.computes_on_cpu", lambda: True)
    monkeypatch.setattr("rollbus.workers.__main__.make_engine", lambda *_: pytest.fail("an engine was made"))
    monkeypatch.setattr("rollbus.frontend.cli.local.up._up", lambda *_: pytest.fail("the fleet was started"))

    assert run(["--nats", "nats://127.0.0.1:0", *(text.format(**names) for text in options)]) == 2
    assert f": {problem.format(**names)}" in capsys.readouterr().err


def test_a_state_directory_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` names --state-dir, `demo` too, and `generate` --record, before they start or connect."""
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "state")
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}')
    for words in (
        ["up", "--engine", "synthetic", "--nats", "nats://127.0.0.1:0", "--state-dir", place],
        ["demo", "--state-dir", place],
        ["generate", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--record", place],
    ):
        assert main(words) == ExitCode.USAGE
        allowed = "a directory in which this user may create files"
        problem = f"{words[-2]} {place} cannot be written: Not a directory; allowed: {allowed}"
        assert capsys.readouterr().err == f"rollbus: {problem}\n"


@pytest.mark.parametrize(
    "words",
    [["init", "{}/fleet.toml"], ["auth", "init", "--dir", "{}"], ["auth", "remove", "--dir", "{}", "--trainer", "a"]],
)
def test_a_directory_of_settings_or_users_that_cannot_be_written_is_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` and `auth` have one line with the directory, the problem and what is allowed."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "users"

    assert main([word.format(place) for word in words]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        f"rollbus: the directory {place} cannot be written: Not a directory; allowed: a directory in which this user "
        "may create files\n"
    )


def test_a_wrong_option_of_a_worker_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The worker process prints the error without its usage, because `up` shows its last lines."""
    assert worker_main(["--engine", "synthetic", "--engine-args", '{"nope": 1}']) == ExitCode.USAGE
    assert worker_main(["--engine", "vllm"]) == ExitCode.USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("rollbus worker: ")
    assert second == "rollbus worker: --model is required for the engine vllm"


# The assignment of GPUs to workers. Fake programs list the GPUs, so these tests run without any GPU.


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
    with pytest.raises(CommandFailed, match="--gpus-per-worker 2: no GPU listed by nvidia-smi"):
        gpu_shares(Gpus((), "nvidia-smi"), ("a",), 2)


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


def visible(worker: str, nats: str) -> tuple[int, str]:
    """Return the process id of a worker and the GPUs in its environment."""
    (pid,) = processes_with(f"--worker-id {worker}", nats)
    variables = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return pid, variables.get("CUDA_VISIBLE_DEVICES", "all")


def is_back(worker: str, old: int, nats: str) -> bool:
    """Return True if another process than `old` serves as this worker."""
    return processes_with(f"--worker-id {worker}", nats) not in ([], [old])


@pytest.mark.slow
def test_up_assigns_each_worker_its_role_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --prefill-workers, each worker has a role, and long prompts go to a prefill worker first.

    `up` assigns GPUs also to prefill workers, keeps the assignment after a restart, and logs it.
    """
    driver(tmp_path, monkeypatch, lists(FOUR))
    env = {**ENV, "PATH": os.environ["PATH"]}
    log = tmp_path / "log"
    workers = ("--workers", "1", "--prefill-workers", "1", "--gpus-per-worker", "2")
    with running_up("--engine", "synthetic", *workers, log=log, env=env) as (_, info):
        nats = info["nats"]
        assert info.keys() == {"nats", "http", "workers"}
        assert info["workers"] == ["local-0", "local-1"]
        table = rollbus("status", nats=nats).stdout.partition("\n\n")[0]
        assert [line.split()[:4] for line in table.splitlines()[1:]] == [
            ["serving", "local-0", "synthetic", "decode"],
            ["serving", "local-1", "synthetic", "prefill"],
        ]
        prompts = tmp_path / "in.jsonl"
        prompts.write_text(json.dumps({"prompt_token_ids": [5] * 100, "max_tokens": 4}))
        done = rollbus("generate", "--input", str(prompts), "--output", str(tmp_path / "out.jsonl"), nats=nats)
        assert done.returncode == 0, done.stderr
        old, first = visible("local-0", nats)
        assert (first, visible("local-1", nats)[1]) == ("0,1", "2,3")
        assert "GPUs of nvidia-smi: local-0 has 0, 1; local-1 has 2, 3\n" in log.read_text()
        os.kill(old, signal.SIGKILL)
        assert becomes_true(lambda: is_back("local-0", old, nats))
        assert becomes_true(lambda: visible("local-0", nats)[1] == "0,1")
    assert "worker.ended worker=local-1 stats=WorkerStats(intake=IntakeStats(taken=1," in log.read_text()
