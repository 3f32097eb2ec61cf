"""Worker processes that live no longer than the command that started them.

One that ends by itself may be started again (`restarts`). In the end all are asked to stop, given time,
then killed with all that they started. Should this process be killed,
they see the pipe close that they were given (`--parent-pipe`), and stop by themselves.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from .exits import CommandFailed
from .restarts import RestartRule, Restarts

__all__ = ["STOP_S", "ProcessSpec", "WorkerDied", "Workers", "run_tool", "run_workers"]

STOP_S: Final = 30.0
"""From SIGTERM to SIGKILL: engines take a few seconds to end their own processes."""
LOG_LINES: Final = 20
"""Lines of a process's output that are shown when it fails."""
MAX_LOG_LINE_BYTES: Final = 64 * 1024
"""A longer line is shown in pieces; memory is bounded whatever a process prints."""


class WorkerDied(CommandFailed):
    """A worker ended that nobody had told to."""


@dataclass(slots=True)
class Workers:
    """Workers that run."""

    can_lose_some: bool = False
    """While others are left, one that has ended for good is only reported; else it ends all of them."""
    rule: RestartRule | None = None
    """How one that ends by itself is started again; None: it is not."""
    living: int = 0
    """How many run now."""
    remaining: int = 0
    """How many run or are to be started again."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a process."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]


@asynccontextmanager
async def run_workers(
    specs: Sequence[ProcessSpec],
    on_line: Callable[[str, str], None],
    on_end: Callable[[str, str], None] | None = None,
    *,
    stop_s: float = STOP_S,
) -> AsyncIterator[Workers]:
    """Run workers while the body runs; when it ends, all are stopped.

    So they are when one of them ends by itself. After the body has set `rule`, it is started again instead, and after
    the body has set `can_lose_some`, the others go on where it has ended for good; `on_end` hears of both.

    Args:
        specs: their commands; `--parent-pipe FD` is added to each.
        on_line: hears each line that a worker prints, with the worker's name.
        on_end: hears that a worker ended, and what becomes of it, with its name; None: `on_line` does.
        stop_s: seconds from SIGTERM to SIGKILL.

    Raises:
        ExceptionGroup: of `WorkerDied`, when a worker ends by itself, and of what the body raises.
    """
    workers = Workers(remaining=len(specs))
    watches: dict[asyncio.Task[None], _SupervisedWorker] = {}
    read_end, write_end = os.pipe()
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for spec in specs:
                    worker = _SupervisedWorker(spec, workers, on_line, on_end or on_line, read_end)
                    await worker.start()
                    watches[tasks.create_task(worker.run(), name=f"watch {spec.name}")] = worker
                yield workers
            finally:
                await _stop(watches, stop_s)
    finally:
        os.close(read_end)
        os.close(write_end)


async def run_tool(spec: ProcessSpec) -> None:
    """Run a command to its end.

    Cancellation: kills it.

    Raises:
        CommandFailed: it failed; the message has the last line that it printed.
    """
    tool = await _ChildProcess.start(spec, lambda _name, _line: None)
    exit_code = await tool.wait()
    if exit_code != 0:
        last = tool.tail[-1] if tool.tail else "it said nothing"
        raise CommandFailed(f"{spec.name} failed with exit code {exit_code}: {last}")


class _ChildProcess:
    """A process in a session of its own, and the end of what it printed.

    Ctrl-C on the terminal thus comes to us alone, and we stop the process in order; and it leads a process group, so
    that killing a worker does not leave its engine behind.
    """

    def __init__(self, process: asyncio.subprocess.Process, output: "_Output") -> None:
        self._process = process
        self._output = output

    @classmethod
    async def start(
        cls, spec: ProcessSpec, on_line: Callable[[str, str], None], *arguments: str, pass_fds: Sequence[int] = ()
    ) -> "_ChildProcess":
        output = _Output(lambda line: on_line(spec.name, line))
        with contextlib.ExitStack() as unless_started:
            unless_started.callback(output.close)
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    *arguments,
                    env=spec.env,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output.write_end,
                    stderr=output.write_end,
                    pass_fds=pass_fds,
                    start_new_session=True,
                )
            finally:
                os.close(output.write_end)
            unless_started.pop_all()
        return cls(process, output)

    @property
    def tail(self) -> Sequence[str]:
        """The last lines that it printed."""
        return self._output.tail

    async def wait(self) -> int:
        """Wait for its end, kill what it left behind, and return its exit code.

        Cancellation: kills it.
        """
        try:
            return await self._process.wait()
        finally:
            # Also when it has ended: an engine that outlived its worker is still in the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._output.close()

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()


class _Output:
    """Takes what a process prints, line by line as it comes, and keeps the end of it.

    The pipe is ours rather than asyncio's: for that one, a process has not ended while an orphan of it holds the pipe.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.tail: deque[str] = deque(maxlen=LOG_LINES)
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def close(self) -> None:
        """Take what is left and close our end."""
        while self._read():
            pass
        if self._rest:
            self._add_line(self._rest)
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def _read(self) -> bool:
        """Take what there is; False when there is nothing now, or nothing more ever."""
        try:
            data = os.read(self._read_end, MAX_LOG_LINE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._read_end)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) >= MAX_LOG_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._add_line(line)
        return bool(data)

    def _add_line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._on_line(line)


class _SupervisedWorker:
    """One of several workers: the process that runs now, and those that follow it.

    Args:
        pipe: read end of the pipe that closes when this process ends.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        workers: Workers,
        on_line: Callable[[str, str], None],
        on_end: Callable[[str, str], None],
        pipe: int,
    ) -> None:
        self._spec = spec
        self._workers = workers
        self._on_line = on_line
        self._on_end = on_end
        self._pipe = pipe
        self._restarts: Restarts | None = None
        self._is_stopping = asyncio.Event()
        self._process: _ChildProcess | None = None
        self._started_at = 0.0

    async def start(self) -> None:
        """Start its process."""
        self._started_at = time.monotonic()
        arguments = ("--parent-pipe", str(self._pipe))
        self._process = await _ChildProcess.start(self._spec, self._on_line, *arguments, pass_fds=(self._pipe,))
        self._workers.living += 1

    def stop(self) -> None:
        """Ask it to end, and start it no more."""
        self._is_stopping.set()
        if self._process is not None:
            self._process.terminate()

    async def run(self) -> None:
        """Wait for the end of its process, and start another where the rule allows it, until it has ended for good.

        Raises:
            WorkerDied: it ended, and with it the last worker, or it must not.
        """
        while self._process is not None:
            process = self._process
            exit_code = await process.wait()
            self._process = None
            self._workers.living -= 1
            if self._is_stopping.is_set():
                return
            delay_s = self._delay_s(exit_code)
            if delay_s is None:
                self._give_up(exit_code, process.tail)
                return
            self._report(exit_code, f"started again in {delay_s:g} s ({self._restarts}){_last(process.tail)}")
            if await self._is_stopped_within(delay_s):
                return
            await self.start()
            if self._is_stopping.is_set():
                self.stop()

    def _delay_s(self, exit_code: int) -> float | None:
        if self._workers.rule is None:
            return None
        if self._restarts is None:
            self._restarts = Restarts(self._workers.rule)
        now = time.monotonic()
        return self._restarts.delay_s(exit_code, lived_s=now - self._started_at, now=now)

    async def _is_stopped_within(self, delay_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._is_stopping.wait()
        return self._is_stopping.is_set()

    def _give_up(self, exit_code: int, tail: Sequence[str]) -> None:
        self._workers.remaining -= 1
        if self._workers.can_lose_some and self._workers.remaining:
            why = "not started again" + (f" ({self._restarts})" if self._restarts else "")
            self._report(exit_code, f"{why}{_last(tail)}")
            return
        last = "".join(f"\n  {line}" for line in tail)
        raise WorkerDied(f"worker {self._spec.name} ended with exit code {exit_code}; its last lines:{last or ' none'}")

    def _report(self, exit_code: int, more: str) -> None:
        left = self._workers.living
        self._on_end(self._spec.name, f"ended with exit code {exit_code}; workers left: {left}; {more}")


def _last(tail: Sequence[str]) -> str:
    return f"; its last line: {tail[-1]}" if tail else ""


async def _stop(workers: Mapping[asyncio.Task[None], _SupervisedWorker], stop_s: float) -> None:
    """Ask all workers to end, wait for them together, and kill those that are late."""
    for worker in workers.values():
        worker.stop()
    if workers:
        _, late = await asyncio.wait(workers, timeout=stop_s)
        for watch in late:
            watch.cancel()
