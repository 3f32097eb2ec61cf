"""The output of `up` for a user: the worker states, the log file, and what `up` waits for at the end."""

import logging
from pathlib import Path

import pytest

from rollbus.frontend.cli.local import display
from rollbus.frontend.cli.local.display import FleetDisplay, LogFile, WorkerBoard
from rollbus.schemas.presence import WorkerPresence, WorkerState
from tests.cli.support import on_terminal, rollbus

ANY_PORTS = ("--nats", "nats://127.0.0.1:0", "--http", "127.0.0.1:0")


def presence(worker: str, state: WorkerState, *, uptime_s: float = 0.0, in_flight: int = 0) -> WorkerPresence:
    """Return the presence of a worker."""
    return WorkerPresence(
        worker=worker,
        incarnation="i",
        model="m",
        state=state,
        weight_version=0,
        in_flight=in_flight,
        free_slots=1,
        uptime_s=uptime_s,
        lease_s=5.0,
    )


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
    assert "local-0  starting  0 s" in term.text
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
