"""The rule for the restart of an ended process."""

import asyncio
import errno
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.logs import write_line
from rollbus.bus.protocol.fleet.restarts import STABLE_S
from rollbus.frontend.cli.console import note, progress, waiting, write
from rollbus.frontend.cli.exits import CommandFailed, cause_of
from rollbus.frontend.cli.generate.command import describe
from rollbus.frontend.cli.generate.run import GenerateBar, count_text, pace_text
from rollbus.frontend.cli.local.fleet import core_share
from rollbus.frontend.cli.local.processes import (
    ProcessSpec,
    RestartRule,
    Restarts,
    WorkerDied,
    end_text,
    run_tool,
    run_workers,
)
from rollbus.schemas.errors import EXIT_DUPLICATE_WORKER
from tests.support.processes import becomes_true, is_alive, python_program
from tests.support.waits import SOON_S, until_true

SERVE = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
FAIL = "import os, sys; print(os.getpid(), flush=True); sys.exit(3)"
IGNORE_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"
LEAVE_A_CHILD = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
sys.exit(7)
"""


class LineRecorder:
    """A recorder of the workers' output lines, which signals when it has `count` lines."""

    def __init__(self, count: int) -> None:
        self.lines: list[tuple[str, str]] = []
        self.is_enough = asyncio.Event()
        self._count = count

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        if len(self.lines) >= self._count:
            self.is_enough.set()

    @property
    def pids(self) -> list[int]:
        return [int(line) for _, line in self.lines]


def spec(source: str, name: str = "w") -> ProcessSpec:
    """Return a Python program as a worker process."""
    return ProcessSpec(name, [sys.executable, "-S", "-c", source], dict(os.environ))


async def test_workers_end_with_the_body() -> None:
    """When the body ends, all workers are stopped by SIGTERM. Their output lines arrive with their names."""
    recorder = LineRecorder(2)

    async with run_workers([spec(SERVE, "a"), spec(SERVE, "b")], recorder):
        await recorder.is_enough.wait()
        assert all(map(is_alive, recorder.pids))

    assert {name for name, _ in recorder.lines} == {"a", "b"}
    assert not any(map(is_alive, recorder.pids))


async def test_a_worker_that_does_not_stop_is_killed() -> None:
    """A worker that ignores SIGTERM is killed after the stop timeout."""
    recorder = LineRecorder(1)

    async with run_workers([spec(IGNORE_SIGTERM)], recorder, stop_s=0.05):
        await recorder.is_enough.wait()

    assert not any(map(is_alive, recorder.pids))


async def test_a_dead_worker_ends_the_others_and_is_reported() -> None:
    """If a worker dies, its child processes and the other workers are stopped.

    The error has exit code and last lines.
    """
    recorder = LineRecorder(3)

    with pytest.raises(ExceptionGroup) as caught:
        async with run_workers([spec(SERVE, "a"), spec(LEAVE_A_CHILD, "b")], recorder):
            await asyncio.Event().wait()

    error = cause_of(caught.value)
    assert isinstance(error, WorkerDied)
    child = dict(recorder.lines)["b"]
    assert str(error) == f"worker b ended with exit code 7; its last lines:\n  {child}"
    assert becomes_true(lambda: not any(map(is_alive, recorder.pids)))


RULE = RestartRule(first_delay_s=0.01, max_restarts=2)


async def test_a_dead_worker_is_restarted_a_limited_number_of_times() -> None:
    """Each end of a worker is logged in one line. After the last restart, the other workers continue.

    When the last worker ends, the run fails.
    """
    ends: dict[str, list[str]] = {"a": [], "b": []}
    pids: list[int] = []
    has_ended = asyncio.Event()
    started: asyncio.Queue[int] = asyncio.Queue(3)

    def hear(name: str, line: str) -> None:
        if line.startswith(("ended", "was killed")):
            ends[name].append(line)
            has_ended.set()
            return
        pids.append(int(line))
        if name == "b":
            started.put_nowait(pids[-1])

    async def run() -> None:
        async with run_workers([spec(FAIL, "a"), spec(SERVE, "b")], hear) as workers:
            workers.can_lose_some, workers.rule = True, RULE
            while len(ends["a"]) < 3:
                has_ended.clear()
                await has_ended.wait()
            while True:
                os.kill(await started.get(), signal.SIGKILL)

    with pytest.raises(ExceptionGroup) as caught:
        await run()

    assert str(cause_of(caught.value)).startswith(
        "worker b was killed by SIGKILL (out of memory? `dmesg` shows it); its last lines:"
    )
    assert [line.partition("; its last line")[0] for line in ends["a"]] == [
        "ended with exit code 3; workers left: 1; started again in 0.01 s (1 of 2 restarts in 10 minutes)",
        "ended with exit code 3; workers left: 1; started again in 0.02 s (2 of 2 restarts in 10 minutes)",
        "ended with exit code 3; workers left: 1; not started again (2 of 2 restarts in 10 minutes)",
    ]
    assert len(ends["b"]) == 2
    assert not any(map(is_alive, pids))


async def test_a_worker_that_waits_for_its_restart_is_stopped() -> None:
    """If the body ends while a worker waits for its restart, the worker is not restarted, and nothing waits for it."""
    ended = asyncio.Event()

    async with asyncio.timeout(SOON_S), run_workers([spec(FAIL, "a")], lambda _name, line: ended.set()) as workers:
        workers.can_lose_some, workers.rule = True, RestartRule(first_delay_s=3600)
        await ended.wait()
        await until_true(lambda: not workers.living)

    assert workers.living == 0


async def test_a_restart_without_memory_counts_as_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the machine has no memory for counts as one that ended. The other workers continue."""
    real, reports, results = asyncio.create_subprocess_exec, list[str](), deque([None, None, OSError(12, "no memory")])

    async def start(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        if (error := results.popleft() if results else None) is not None:
            raise error
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    async with run_workers([spec(FAIL, "a"), spec(SERVE, "b")], lambda _name, line: reports.append(line)) as workers:
        workers.can_lose_some, workers.rule = True, RULE
        await until_true(lambda: workers.remaining == 1)
        assert workers.living == 1
    assert "it cannot be started: [Errno 12] no memory" in reports


async def test_an_error_of_the_body_stops_the_workers() -> None:
    """If the body raises an error, all workers are stopped."""
    recorder = LineRecorder(1)

    async def run() -> None:
        async with run_workers([spec(SERVE)], recorder):
            await recorder.is_enough.wait()
            raise CommandFailed("enough")

    with pytest.raises(ExceptionGroup) as caught:
        await run()

    assert str(cause_of(caught.value)) == "enough"
    assert not any(map(is_alive, recorder.pids))


@pytest.mark.proves("P29")
def test_workers_detect_the_death_of_their_parent(tmp_path: Path) -> None:
    """If the parent is killed, each worker reads the end of its pipe, for any number of workers."""
    worker = "import os, sys; open(f'pid-{os.getpid()}', 'w'); os.read(int(sys.argv[-1]), 1)"
    parent = f"""
        import asyncio, os, sys
        from rollbus.frontend.cli.local.processes import ProcessSpec, run_workers

        async def main():
            specs = [ProcessSpec(name, [sys.executable, "-S", "-c", {worker!r}], dict(os.environ)) for name in "ab"]
            os.chdir({str(tmp_path)!r})
            async with run_workers(specs, print):
                await asyncio.Event().wait()

        asyncio.run(main())
    """
    with python_program(parent):
        assert becomes_true(lambda: len(list(tmp_path.iterdir())) == 2)
        pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.iterdir()]
        assert all(map(is_alive, pids))

    assert becomes_true(lambda: not any(map(is_alive, pids)))


async def test_the_error_of_a_failed_tool_has_its_last_line() -> None:
    """If a tool fails, the error has its exit code and its last line. A successful tool prints nothing."""
    await run_tool(spec("print('fine')"))

    with pytest.raises(CommandFailed, match=r"^w ended with exit code 3: the reason$"):
        await run_tool(spec("import sys; print('more'); print('the reason'); sys.exit(3)"))


async def test_a_line_without_an_end_does_not_fill_memory() -> None:
    """An endless line of a worker arrives in pieces, which bounds the memory."""
    recorder = LineRecorder(4)
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"

    async with run_workers([spec(endless)], recorder, stop_s=1):
        await recorder.is_enough.wait()

    assert max(len(line) for _, line in recorder.lines) <= 2 * 65536


@pytest.mark.parametrize(
    ("num_workers", "cores", "expected"),
    [
        (1, [0, 1, 2, 3], [""]),
        (2, [0, 1], ["0", "1"]),
        (2, [2, 3, 5, 7, 9], ["2,3", "5,7,9"]),
        (3, [0, 1], ["", "", ""]),
    ],
)
def test_workers_share_the_cores(num_workers: int, cores: list[int], expected: list[str]) -> None:
    """Workers of one machine get separate cores if there are enough. A single worker may use all cores."""
    assert [core_share(index, num_workers, cores) for index in range(num_workers)] == expected


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL (out of memory? `dmesg` shows it)"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
    ],
)
def test_a_signal_that_killed_a_process_is_named(exit_code: int, text: str) -> None:
    """The end of a process names the exit code or the signal. SIGKILL comes with its usual cause."""
    assert end_text(exit_code) == text


# The rule for the restart of an ended process.


RESTARTS_RULE = RestartRule()


def test_the_delay_doubles_with_each_of_five_restarts() -> None:
    """The delays before five restarts are 1, 2, 4, 8 and 16 s.

    After the sixth end within ten minutes, no restart follows.
    """
    restarts = Restarts(RESTARTS_RULE)
    assert [restarts.delay_s(1, lived_s=1, now=now) for now in range(6)] == [1, 2, 4, 8, 16, None]
    assert str(restarts) == "5 of 5 restarts in 10 minutes"


def test_the_delay_between_restarts_is_bounded() -> None:
    """A process that ends every three minutes is restarted forever, after at most a minute."""
    restarts = Restarts(RESTARTS_RULE)
    delays = [restarts.delay_s(-9, lived_s=180, now=180 * count) for count in range(20)]
    assert delays[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert delays[-1] == 60


def test_ten_minutes_of_runtime_reset_the_delay() -> None:
    """After ten minutes of runtime, the delay starts at its first value again."""
    restarts = Restarts(RESTARTS_RULE)
    for now in range(3):
        restarts.delay_s(1, lived_s=1, now=now)
    assert restarts.delay_s(1, lived_s=600, now=700) == 1


def test_a_requested_exit_is_no_failure() -> None:
    """A process that exits with 0 is started again at once each time, and does not count as a failure."""
    restarts = Restarts(RESTARTS_RULE)
    assert {restarts.delay_s(0, lived_s=1, now=now) for now in range(20)} == {1}
    assert restarts.delay_s(1, lived_s=1, now=20) == 1


def test_a_misconfigured_process_is_not_restarted() -> None:
    """There is no restart if the process had a wrong option, or has the name of another process."""
    for exit_code in (2, EXIT_DUPLICATE_WORKER):
        assert Restarts(RESTARTS_RULE).delay_s(exit_code, lived_s=1000, now=0) is None


@given(st.lists(st.floats(0, 400), max_size=60))
def test_at_most_five_restarts_occur_in_ten_minutes(gaps: list[float]) -> None:
    """At most five restarts occur in any ten minutes."""
    restarts, now, at = Restarts(RESTARTS_RULE), 0.0, []
    for gap in gaps:
        now += gap
        if restarts.delay_s(1, lived_s=gap, now=now) is not None:
            at.append(now)
    assert all(late - early >= STABLE_S for early, late in zip(at, at[5:], strict=False))


def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    """If the reader closes the pipe, like `head`, the remaining output is discarded and the exit code stays."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        write("to nobody", out=out)
        write("again", out=out)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_note_that_cannot_be_written_is_no_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk or a closed terminal does not end a fleet whose notes go there."""
    with monkeypatch.context() as full:
        full.setattr(sys, "stderr", Mock(write=Mock(side_effect=OSError(number, "full"))))
        full.setattr(os, "write", Mock(side_effect=OSError(number, "full")))
        note("a line")
        write_line("a line")


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress displays write nothing to logs and pipes."""
    with progress("working", 2) as advance, waiting("waiting") as show, GenerateBar(is_shown=True) as bar:
        advance()
        show("still waiting")
        bar.show("connecting")
        bar.start_count(2, 0, open_tokens=lambda: 0, reason=lambda: "")

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize(
    ("total", "ended", "rate", "seconds", "text"),
    [
        (9000, 1000, 0, 7.0, "1,000/9,000  7 s"),
        (9000, 1000, 77, 7.0, "1,000/9,000  77 tokens/s"),
        (9000, 2000, 12_345.6, 10.0, "2,000/9,000  12,346 tokens/s  1:10 left"),
        (9000, 1001, 0.5, 2.0, "1,001/9,000  0 tokens/s  4:26:38 left"),
        (9000, 9000, 2000, 8.0, "9,000/9,000  2,000 tokens/s"),
        (None, 2000, 5, 8.0, "2,000  5 tokens/s"),
    ],
)
def test_earlier_runs_do_not_count_for_the_time_left(
    total: int | None, ended: int, rate: float, seconds: float, text: str
) -> None:
    """The 1,000 prompts of earlier runs count as done, but not for the time left. Tokens count before a prompt ends."""
    assert pace_text(total, ended, before=1000, rate=rate, seconds=seconds) == text


def test_a_run_that_stops_early_reports_its_progress() -> None:
    """A run that stops early reports the number of finished prompts, and the number of failures if there are any."""
    assert count_text(290, 0, 1260) == "290 of 1,260 done; the same command continues"
    assert count_text(1290, 2, 2260) == "1,290 of 2,260 done, 2 failed; the same command continues"


def test_a_run_is_summed_up_in_one_line() -> None:
    """The summary mentions only counts that are not zero."""
    report = {
        "prompts": 5,
        "resumed": 0,
        "done": 5,
        "failed": 0,
        "first_error": None,
        "retryable": 0,
        "models": ["m"],
        "tokens": 80,
        "seconds": 0.5,
        "seconds_to": {"50": 0.2, "90": 0.3, "99": 0.4, "100": 0.4},
        "output": "o",
        "npz": None,
    }

    assert describe(report) == (
        "5 of 5 prompts done; model m; 80 tokens in 0.5 s; "
        "requests complete: 50 % after 0.2 s, 90 % after 0.3 s, 99 % after 0.4 s, 100 % after 0.4 s: o"
    )
    failed = {"resumed": 2, "done": 2, "failed": 2, "first_error": "line 4: \x1b[2J", "retryable": 1, "seconds_to": {}}
    assert describe({**report, **failed, "models": ["m", "n"], "npz": "o.npz"}) == (
        "2 of 5 prompts done, 2 were done in earlier runs, 2 failed (the first, line 4: \\x1b[2J), "
        "run again to retry 1 of them; models m, n; 80 tokens in 0.5 s: o, o.npz"
    )
