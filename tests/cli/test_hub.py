"""Models by Hugging Face id, from a cache and from a fake hub, without a network."""

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.cli.local import display
from rollbus.frontend.cli.local.display import FleetDisplay, LogFile, WorkerBoard
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.options import is_hub_id
from rollbus.schemas.presence import WorkerPresence, WorkerState
from tests.cli.support import ENV, on_terminal, rollbus, running_up
from tests.control.support import write_checkpoint
from tests.support.fleet import presence as presence_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ID = "org/tiny"
UP = ("up", "--engine", "synthetic", "--nats", "nats://127.0.0.1:0", "--http", "127.0.0.1:0", "--model", ID)


def hub_env(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a command with its own cache."""
    return {**ENV, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def write_cache(home: Path, checkpoint: Path) -> Path:
    """Write a checkpoint in the layout of the hub's cache, with links to blobs. Return the folder of the snapshot."""
    repo = home / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for folder in (repo / "refs", repo / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for file in checkpoint.iterdir():
        file.rename(repo / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    return snapshot


@contextmanager
def serving_hub(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one model as the hub does. Yield the address and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path == f"/api/models/{ID}/revision/main":
                self._answer({"id": ID, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            elif path == f"/api/models/{ID}/tree/{COMMIT}":
                self._answer(
                    [
                        {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for file, data in files.items()
                    ]
                )
            elif path == f"/{ID}/resolve/{COMMIT}/{name}" and name in files:
                self._send(200, files[name], {"ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'})
            else:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, value: Any) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="hub")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_folder_comes_before_a_model_id_and_a_path_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OWNER/NAME is a model id unless a folder has that name. No other form is an id."""
    monkeypatch.chdir(tmp_path)

    assert is_hub_id("Qwen/Qwen3-0.6B")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_id("Qwen/Qwen3-0.6B")
    assert not is_hub_id("Qwen")
    for wrong in ("./Qwen/x", "../x", "/Qwen/x", "/x", "~/x", "~x/y", "gpt2", "a/b/c", "a/", "a/.b", "a b/c", ""):
        with pytest.raises(InvalidRequest, match="is not a folder; allowed: a folder, or a Hugging Face model id"):
            is_hub_id(wrong)


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_served_under_its_id(tmp_path: Path) -> None:
    """The command downloads only the files that vLLM needs. Later runs serve the snapshot of the cache without the hub.

    Workers refuse weights from any other folder of the cache.
    """
    checkpoint = write_checkpoint(tmp_path / "one", seed=1)
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    env, log = hub_env(tmp_path / "hf"), tmp_path / "log"
    options = ("--engine", "synthetic", "--model", ID)
    with serving_hub({**files, "pytorch_model.bin": b"again", "model.gguf": b"again"}) as (url, asked):
        with running_up(*options, log=log, env={**env, "HF_ENDPOINT": url}) as (_, info):
            [worker] = json.loads(rollbus("status", "--json", nats=info["nats"]).stdout)["workers"]
        assert not any(path.endswith((".bin", ".gguf")) for path in asked)

    folder = Path(worker["model_path"])
    assert worker["model"] == ID
    assert folder.is_relative_to(tmp_path / "hf")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files
    other = write_checkpoint(tmp_path / "hf" / "hub" / "other", seed=2)
    with running_up(*options, log=log, env={**env, "HF_HUB_OFFLINE": "1"}) as (_, info):
        [again] = json.loads(rollbus("status", "--json", nats=info["nats"]).stdout)["workers"]
        refused = rollbus("update-weights", str(other), "--version", "1", nats=info["nats"])
    assert (again["model"], again["model_path"]) == (ID, worker["model_path"])
    assert refused.returncode == ExitCode.FAILED
    assert f"--model {ID}: not a folder; reading the model from Hugging Face" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "$HF_HUB_OFFLINE is set, and "),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached, and "),
    ],
)
@pytest.mark.parametrize("argv", [UP, ("worker", "--engine", "synthetic", "--model", ID)])
def test_a_model_that_cannot_be_downloaded_is_an_error_with_solutions(
    argv: tuple[str, ...], more: dict[str, str], reason: str, tmp_path: Path
) -> None:
    """If the model cannot be downloaded, nothing starts. The error gives the id, the reason and both solutions."""
    done = rollbus(*argv, env=hub_env(tmp_path, **more))

    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    _, error = done.stderr.splitlines()
    assert error.startswith(
        f"rollbus: --model {ID} is not a folder, and cannot be downloaded from Hugging Face: {reason}"
    )
    assert "--model DIR" in error
    assert "$HF_HOME" in error


@pytest.mark.slow
def test_an_unknown_or_incomplete_model_is_refused(tmp_path: Path) -> None:
    """An unknown model and an incomplete model in the cache are errors."""
    with serving_hub({}) as (url, _):
        unknown = rollbus(*UP[:-1], "org/other", env=hub_env(tmp_path / "empty", HF_ENDPOINT=url))
    snapshot = write_cache(tmp_path / "hf", write_checkpoint(tmp_path / "one", seed=1))
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    partial = rollbus(*UP, env=hub_env(tmp_path / "hf", HF_HUB_OFFLINE="1"))

    assert (unknown.returncode, partial.returncode) == (ExitCode.FAILED, ExitCode.FAILED)
    assert f"{url} has no model of this id, or the model needs a token with access" in unknown.stderr
    assert f"{snapshot} has no weights" in partial.stderr


# The output of `up` for a user: the worker states, the log file, and what `up` waits for at the end.


ANY_PORTS = ("--nats", "nats://127.0.0.1:0", "--http", "127.0.0.1:0")


def presence(worker: str, state: WorkerState, *, uptime_s: float = 0.0, in_flight: int = 0) -> WorkerPresence:
    """Return the presence of a worker."""
    return presence_of(worker=worker, state=state, uptime_s=uptime_s, in_flight=in_flight)


def test_each_change_of_a_worker_is_a_line() -> None:
    """The board shows a line per state change of its own workers, with the seconds from process start to serving."""
    board = WorkerBoard(("a", "b"), 100.0)

    assert board.line("a", 103.0) == "a  starting  3 s"
    assert board.set_workers([presence("a", WorkerState.STARTING), presence("x", WorkerState.SERVING)], 104.0) == [
        "a  loading  4 s"
    ]
    assert board.set_workers([presence("a", WorkerState.STARTING)], 105.0) == []
    both = [presence("a", WorkerState.SERVING), presence("b", WorkerState.STARTING)]
    assert board.set_workers(both, 112.0) == ["a  serving  12 s", "b  loading  12 s"]
    assert board.line("a", 200.0) == "a  serving  12 s"
    assert board.line("b", 120.0) == "b  loading  20 s"


def test_a_restarted_worker_is_timed_from_the_start_of_its_new_process() -> None:
    """The board ignores old presence of an ended process and counts the seconds from the start of the new process."""
    board = WorkerBoard(("a",), 0.0)
    board.set_workers([presence("a", WorkerState.SERVING)], 10.0)
    assert not board.is_starting()
    board.set_ended("a", 47.0)

    assert board.line("a", 49.0) == "a  ended  2 s"
    assert board.is_starting()
    assert board.set_workers([presence("a", WorkerState.SERVING)], 50.0) == []
    assert board.set_workers([presence("a", WorkerState.STARTING, uptime_s=2.0)], 60.0) == ["a  loading  2 s"]
    assert board.line("a", 65.0) == "a  loading  7 s"
    assert board.set_workers([presence("a", WorkerState.SERVING)], 70.0) == ["a  serving  12 s"]
    assert not board.is_starting()


def test_a_stopping_up_reports_the_workers_and_requests_that_remain(capsys: pytest.CaptureFixture[str]) -> None:
    """`up` reports the workers and requests that it waits for, with the time limit.

    A second signal kills the workers.
    """
    idle, busy = (FleetDisplay(("a", "b"), None, shows_logs=True) for _ in range(2))
    busy.set_workers([presence("a", WorkerState.SERVING, in_flight=5), presence("b", WorkerState.SERVING, in_flight=7)])
    capsys.readouterr()

    idle.stop()
    busy.stop()
    busy.stop()

    assert capsys.readouterr().err.splitlines() == [
        "stopping: 2 workers (30 s at most); Ctrl-C again kills",
        "stopping: 2 workers and 12 requests in flight (30 s at most); Ctrl-C again kills",
        "killing the remaining workers",
    ]


def test_log_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log files are bounded in size and number. The oldest files are removed, and other files stay."""
    monkeypatch.setattr(display, "MAX_BYTES", 1000)
    other = tmp_path / "notes.log"
    other.touch()
    for i in range(display.MAX_FILES + 5):
        (tmp_path / f"up-20250101-0000{i:02}-1.log").touch()
        (tmp_path / f"up-20250101-0000{i:02}-1.log.1").touch()

    log = LogFile(tmp_path)
    with log.own_logs(also_stderr=False):
        for i in range(100):
            log.write("local-0", f"line {i} " + "x" * 50)
        logging.getLogger("of.a.library").warning("own.event url=%s", "nats://user:geheim@h")

    assert other.exists()
    assert len(list(tmp_path.glob("up-*.log"))) == display.MAX_FILES
    files = [log.path, log.path.with_name(f"{log.path.name}.1")]
    assert all(0 < path.stat().st_size <= 1000 for path in files)
    lines = log.path.read_text().splitlines()
    assert lines[-2].startswith("[local-0] line 99 ")
    assert lines[-1].startswith("[rollbus] ")
    assert lines[-1].endswith("own.event url=nats://***@h")
    assert not (tmp_path / "up-20250101-000000-1.log.1").exists()


def test_a_log_file_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log file that cannot be written is reported once, and the fleet keeps running."""
    log = LogFile(tmp_path)
    log.path.unlink()
    log.path.symlink_to("/dev/full")
    with log.own_logs(also_stderr=False):
        log.close()
        log.stream = log.path.open("w")
        for _ in range(3):
            log.write("local-0", "line")

    assert capsys.readouterr().err.splitlines() == [
        "the log file cannot be written, logging to it stops: [Errno 28] No space left on device"
    ]


@pytest.mark.slow
def test_a_terminal_shows_states_addresses_and_the_log_file(tmp_path: Path) -> None:
    """On a terminal, `up` shows one line per worker in place, then the addresses, and names the log file."""
    with on_terminal("up", "--engine", "synthetic", "--workers", "2", "--state-dir", str(tmp_path), *ANY_PORTS) as term:
        term.read_until("Ctrl-C stops everything.\r\n")
        term.press_ctrl_c()
        code = term.read_to_end()

    assert code == 0
    lines = term.lines()
    [log] = (tmp_path / "logs").iterdir()
    assert lines[:2] == ["starting NATS and 2 workers; Ctrl-C stops everything", f"logs: {log}"]
    assert "local-0  starting  " in term.text
    shown = [line.split() for line in lines if line.startswith("local-")]
    assert [(name, state) for name, state, _seconds, _unit in shown] == [("local-0", "serving"), ("local-1", "serving")]
    assert lines[4].startswith("rollbus is up: NATS at nats://127.0.0.1:")
    assert lines[-2:] == ["stopping: 2 workers (30 s at most); Ctrl-C again kills", "stopped"]
    assert "worker.serving worker=local-0" in log.read_text()
    assert "worker.serving" not in term.text


@pytest.mark.slow
def test_a_terminal_shows_the_end_of_the_log_of_a_failed_worker(tmp_path: Path) -> None:
    """If a worker fails on a terminal, `up` shows the end of its log and names the log file."""
    wrong = ("--engine-args", '{"speed": 9}')
    with on_terminal("up", "--engine", "synthetic", *wrong, "--state-dir", str(tmp_path), *ANY_PORTS) as term:
        code = term.read_to_end()

    [log] = (tmp_path / "logs").iterdir()
    assert code == 1
    assert f"the log of this run: {log}" in term.lines()
    assert "worker local-0 ended with exit code 2; its last lines:" in term.text
    assert "speed" in term.lines()[-2]
    assert term.lines()[-1].startswith("the log of this run")
    assert "speed" in log.read_text()


@pytest.mark.slow
def test_without_a_terminal_up_writes_no_log_file(tmp_path: Path) -> None:
    """If stderr is not a terminal, `up` writes no log file. It counts the workers that do not serve in time."""
    done = rollbus(
        *("up", "--engine", "synthetic", "--start-timeout", "0.01", "--state-dir", str(tmp_path), *ANY_PORTS)
    )

    assert (done.returncode, done.stdout) == (4, "")
    assert "0 of 1 workers serve after 0.01 s" in done.stderr
    assert list(tmp_path.iterdir()) == []
