import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rollbus.frontend.cli.exits import CommandFailed, cause_of
from rollbus.frontend.cli.local.fleet import core_share
from rollbus.frontend.cli.local.processes import ProcessSpec, RestartRule, WorkerDied, end_text, run_tool, run_workers
from tests.support.patience import SOON_S
from tests.support.processes import becomes_true, is_alive, python_program
from tests.support.waits import until_true

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
