"""The port of `rollbus up`, and the options and the environment that it passes to its workers."""

import socket
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from rollbus.frontend.cli.app import build_parser, main
from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.local.up import nats_port
from rollbus.frontend.cli.options import python_env, worker_flags
from rollbus.schemas.options import duration, size
from rollbus.workers.__main__ import main as worker_main
from rollbus.workers.__main__ import parser as process_parser
from rollbus.workers.engines import ENGINES
from tests.cli.support import ROOT


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
