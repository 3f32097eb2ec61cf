"""Worker processes that live no longer than the command that started them.

In order: they are asked to stop, given time, then killed with all that they started. Should this process be killed,
they see the pipe close that they were given (`--parent-pipe`), and stop by themselves.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from frontend.cli.exits import CommandFailed

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
    """While others live, one that ends by itself is only reported; else it ends all of them."""
    living: int = 0
    """How many run now."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start a process."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]


@asynccontextmanager
async def run_workers(
    specs: Sequence[ProcessSpec], on_line: Callable[[str, str], None], *, stop_s: float = STOP_S
) -> AsyncIterator[Workers]:
    """Run workers while the body runs; when it ends, all are stopped.

    So they are when one of them ends by itself, unless the body has set `can_lose_some` and another lives: then
    `on_line` hears of it.

    Args:
        specs: their commands; `--parent-pipe FD` is added to each.
        on_line: hears each line that a worker prints, with the worker's name.
        stop_s: seconds from SIGTERM to SIGKILL.

    Raises:
        ExceptionGroup: of `WorkerDied`, when a worker ends by itself, and of what the body raises.
    """
    workers = Workers()
    watches: dict[asyncio.Task[None], _Process] = {}
    read_end, write_end = os.pipe()
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for spec in specs:
                    worker = await _Process.start(spec, on_line, "--parent-pipe", str(read_end), pass_fds=(read_end,))
                    workers.living += 1
                    watch = _watch(spec.name, worker, workers, on_line)
                    watches[tasks.create_task(watch, name=f"watch {spec.name}")] = worker
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
    tool = await _Process.start(spec, lambda _name, _line: None)
    exit_code = await tool.wait()
    if exit_code != 0:
        last = tool.tail[-1] if tool.tail else "it said nothing"
        raise CommandFailed(f"{spec.name} failed with exit code {exit_code}: {last}")


class _Process:
    """A process in a session of its own, and the end of what it printed.

    Ctrl-C on the terminal thus comes to us alone, and we stop the process in order; and it leads a process group, so
    that killing a worker does not leave its engine behind.
    """

    def __init__(self, process: asyncio.subprocess.Process, output: "_Output") -> None:
        self.is_stopping = False
        self._process = process
        self._output = output

    @classmethod
    async def start(
        cls, spec: ProcessSpec, on_line: Callable[[str, str], None], *arguments: str, pass_fds: Sequence[int] = ()
    ) -> "_Process":
        output = _Output(lambda line: on_line(spec.name, line))
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
        except BaseException:
            output.close()
            raise
        finally:
            os.close(output.write_end)
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
        self.is_stopping = True
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
            self._take(self._rest)
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
            self._take(line)
        return bool(data)

    def _take(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        self._on_line(line)


async def _watch(name: str, worker: _Process, workers: Workers, on_line: Callable[[str, str], None]) -> None:
    exit_code = await worker.wait()
    workers.living -= 1
    if worker.is_stopping:
        return
    what = f"ended with exit code {exit_code}"
    if workers.can_lose_some and workers.living:
        on_line(name, f"{what}; workers left: {workers.living}")
        return
    last = "".join(f"\n  {line}" for line in worker.tail)
    raise WorkerDied(f"worker {name} {what}; its last lines:{last or ' none'}")


async def _stop(watches: Mapping[asyncio.Task[None], _Process], stop_s: float) -> None:
    """Ask all workers to end, wait for them together, and kill those that are late."""
    for worker in watches.values():
        worker.terminate()
    if watches:
        _, late = await asyncio.wait(watches, timeout=stop_s)
        for watch in late:
            watch.cancel()
