"""Runs worker processes that end at the latest when the command that started them ends.

A worker that exits unexpectedly may be started again (`Restarts`). At the end, every worker gets SIGTERM. After a time
limit, the workers and all processes that they started are killed. If this process is killed, a pipe closes that every
worker has (`--parent-pipe`), and each worker then stops by itself.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ....bus.logs import warning_of
from ....bus.nats.connection import connected, publish, subscribe
from ....bus.nats.library import Msg
from ....bus.nats.server import Server
from ....bus.protocol.fleet.restarts import FIRST_DELAY_S, STABLE_S, RestartDelays
from ....bus.subjects import WORKER_CONNECTION, Subjects
from ....bus.thread_calls import is_set_within, wait_at_most
from ....schemas.errors import EXIT_DUPLICATE_WORKER, BusBroken
from ....schemas.messages import encode_json
from ....schemas.options import DEFAULT_LEASE_S
from ....schemas.presence import WorkerPresence, WorkerState
from ..exits import CommandFailed

logger = logging.getLogger(__name__)


FINAL_CODES: Final = frozenset({2, EXIT_DUPLICATE_WORKER})
"""Exit codes after which a restart cannot help: a wrong option, a worker id in use."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """Limits for the number of restarts of a process, and the first delay before them."""

    first_delay_s: float = FIRST_DELAY_S
    max_restarts: int = 5
    """Maximum number of restarts within `STABLE_S`. A process that ends more often needs an operator."""


class Restarts:
    """The restarts of one process. Callers pass the current time, and no method waits."""

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._delays = RestartDelays(rule.first_delay_s)
        self._at: deque[float] = deque(maxlen=rule.max_restarts)

    def __str__(self) -> str:
        """Return the number of restarts and the limit as text."""
        return f"{len(self._at)} of {self._rule.max_restarts} restarts in {STABLE_S / 60:g} minutes"

    @property
    def current(self) -> str:
        """The number of the last restart, as text."""
        return f"restart {len(self._at)} of {self._rule.max_restarts}"

    def delay_s(self, exit_code: int, *, lived_s: float, now: float) -> float | None:
        """Return the seconds until the process is started again, or None if it is not started again.

        Args:
            exit_code: exit code of the process. A negative value is the number of the signal that killed it.
            lived_s: seconds from the start of the process to its end.
            now: time of the end of the process.
        """
        if exit_code != 0:
            while self._at and now - self._at[0] >= STABLE_S:
                self._at.popleft()
            if exit_code in FINAL_CODES or len(self._at) >= self._rule.max_restarts:
                return None
            self._at.append(now)
        return self._delays.next_s(lived_s, was_asked=exit_code == 0)


ANNOUNCE_EVERY_S: Final = 0.2
"""Seconds between two announcements. A client waits half a second for the workers before it gives up a request."""
GIVE_UP_S: Final = 2.0
"""Seconds for the last presence of a worker that is not started again. The server may have ended."""


class StartAnnouncer:
    """Publishes presence of workers whose processes cannot yet: they start, or wait for their restart.

    Requests wait for a worker that is announced. Its process has the announced incarnation and publishes presence as
    soon as it is connected. Then the announcement ends.

    Args:
        tasks: group in which the announcements run.
        server_of: returns the server with the login of a worker, because only a worker may publish its presence.
        model: served name of the model of all workers.
        start_timeout_s: seconds for which requests wait for a process that starts.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        server_of: Callable[[str], Server],
        *,
        fleet: str,
        model: str,
        start_timeout_s: float,
    ) -> None:
        self._tasks = tasks
        self._server_of = server_of
        self._subjects = Subjects(fleet)
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._starts: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """The incarnation of the process that is or will be started, and the task that announces it, by worker."""

    def incarnation(self, worker: str) -> str:
        """Return the first incarnation of the process that is started now, and announce it."""
        if worker not in self._starts:
            self.begin(worker)
        return self._starts[worker][0]

    def begin(self, worker: str, why: str = "", delay_s: float = 0.0) -> None:
        """Announce that a process of the worker is started in `delay_s` seconds, and why."""
        self.end(worker)
        incarnation = uuid.uuid4().hex[:8]
        announcing = self._announce(worker, incarnation, why, time.monotonic() + delay_s)
        self._starts[worker] = incarnation, self._tasks.create_task(announcing, name=f"announce {worker}")

    def on_presence(self, workers: Sequence[WorkerPresence]) -> None:
        """End the announcements of `workers` whose processes publish presence."""
        for presence in workers:
            announced, _ = self._starts.get(presence.worker, (None, None))
            if announced == presence.incarnation and not is_announcement(presence):
                self.end(presence.worker)

    def end(self, *workers: str) -> None:
        """Announce these workers no longer; without arguments: no worker."""
        for worker in workers or [*self._starts]:
            _, announcing = self._starts.pop(worker, (None, None))
            if announcing is not None:
                announcing.cancel()

    async def give_up(self, worker: str, why: str) -> None:
        """Publish that the worker is not started again, so that requests for it fail."""
        self.end(worker)
        incarnation = uuid.uuid4().hex[:8]
        with warning_of((BusBroken, TimeoutError), logger, "worker.announce_failed worker=%s error=%s", worker):
            async with asyncio.timeout(GIVE_UP_S), connected(self._server_of(worker), name="rollbus up") as nats:
                # The first of the two shows clients that the earlier incarnation died, and may have died of a request.
                for state in (WorkerState.STARTING, WorkerState.FAILED):
                    presence = self._presence(worker, incarnation, state, 0.0, why)
                    await publish(nats, self._subjects.presence(worker), encode_json(presence))
                await nats.flush()

    async def _announce(self, worker: str, incarnation: str, why: str, at: float) -> None:
        """Announce a process that is started at `at` on `time.monotonic()`."""
        with warning_of(BusBroken, logger, "worker.announce_failed worker=%s error=%s", worker):
            name, is_asked = f"{WORKER_CONNECTION}{worker}", asyncio.Event()

            async def answer(_ping: Msg) -> None:
                is_asked.set()

            async with connected(self._server_of(worker), name=name) as nats:
                await subscribe(nats, self._subjects.ping, answer)
                while True:
                    is_asked.clear()
                    left_s = at - time.monotonic()
                    reason = f"{why} in {left_s:.0f} s" if left_s > 0 else why or None
                    awaited_s = max(self._start_timeout_s + left_s, 0.0)
                    presence = self._presence(worker, incarnation, WorkerState.STARTING, awaited_s, reason)
                    await publish(nats, self._subjects.presence(worker), encode_json(presence))
                    await wait_at_most(is_asked, ANNOUNCE_EVERY_S)

    def _presence(
        self, worker: str, incarnation: str, state: WorkerState, start_left_s: float, last_error: str | None
    ) -> WorkerPresence:
        return WorkerPresence(
            worker=worker,
            incarnation=incarnation,
            model=self._model,
            state=state,
            weight_version=0,
            in_flight=0,
            free_slots=0,
            uptime_s=0.0,
            lease_s=DEFAULT_LEASE_S,
            start_left_s=start_left_s,
            last_error=last_error,
        )


def is_announcement(presence: WorkerPresence) -> bool:
    """Return True if not the worker's own process has published this presence: the process adds its id."""
    return presence.pid is None


STOP_S: Final = 30.0
"""Seconds from SIGTERM to SIGKILL. An engine takes a few seconds to end its own processes."""
LOG_LINES: Final = 20
"""Number of output lines that are shown when a process fails."""
MAX_LOG_LINE_BYTES: Final = 64 * 1024
"""Maximum bytes of a line of output. A longer line is shown in pieces, so that memory is bounded."""


class WorkerDied(CommandFailed):
    """A worker exited although this command did not stop it."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Name, command line and environment of a process to start."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]


class _ChildProcess:
    """A process in its own session, which reads its output line by line and stores the last lines.

    Because of the session, Ctrl-C on the terminal reaches only this process, which then stops the child in order. The
    child leads a process group, so that a kill of a worker also kills its engine.

    The pipe of the output does not belong to asyncio. With a pipe of asyncio, a process would not count as ended while
    another process that it started still has the pipe open.
    """

    _process: asyncio.subprocess.Process | None = None
    """The process, which `start` starts. None: the machine had no room for it, and it counts as ended."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self.started_at = time.monotonic()
        self.tail: deque[str] = deque(maxlen=LOG_LINES)
        """The last lines that the process printed."""
        self._on_line = on_line
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    @classmethod
    async def start(
        cls, spec: ProcessSpec, on_line: Callable[[str, str], None], *arguments: str, pass_fds: Sequence[int] = ()
    ) -> "_ChildProcess":
        self = cls(partial(on_line, spec.name))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *spec.command,
                *arguments,
                env=spec.env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._write_end,
                stderr=self._write_end,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as exc:
            # Memory or process ids may be free again at the next start. Its end must not end the other processes.
            self._add_line(f"it cannot be started: {exc}".encode())
        except BaseException:
            self._close()
            raise
        finally:
            os.close(self._write_end)
        return self

    async def wait(self) -> int:
        """Wait for the end of the process, kill the rest of its process group, and return its exit code.

        Cancellation: kills the process.
        """
        if (process := self._process) is None:
            self._close()
            return 1
        try:
            return await process.wait()
        finally:
            # Kill the group even after the process has ended: an engine that outlived its worker is still in the group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            self._close()

    def terminate(self) -> None:
        """Send SIGTERM to the process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.terminate()

    def _close(self) -> None:
        """Read the remaining output and close the read end of the pipe."""
        while self._read():
            pass
        if self._rest:
            self._add_line(self._rest)
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def _read(self) -> bool:
        """Read the available output. Return False if there is no output now, or the pipe has ended."""
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


@dataclass(slots=True)
class Workers:
    """The workers of one command: their rules, counts and processes."""

    on_line: Callable[[str, str], None]
    on_end: Callable[[str, str], None]
    announcer: StartAnnouncer | None
    """Announces workers whose processes start. None: the processes announce themselves."""
    pipe: int
    """Read end of the pipe that closes when this process ends."""
    remaining: int
    """Number of workers that run or will be started again."""
    can_lose_some: bool = False
    """True if a worker that ended and is not restarted is only reported while other workers remain. Otherwise its end
    stops all workers."""
    rule: RestartRule | None = None
    """Rule for restarts of workers that exit unexpectedly. None: no restarts."""
    running: dict[str, _ChildProcess] = field(default_factory=dict)
    is_stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def living(self) -> int:
        """Number of running workers."""
        return len(self.running)

    async def start(self, spec: ProcessSpec) -> _ChildProcess:
        """Start a process of a worker."""
        arguments = ["--parent-pipe", str(self.pipe)]
        if self.announcer is not None:
            arguments += ["--incarnation", self.announcer.incarnation(spec.name)]
        process = await _ChildProcess.start(spec, self.on_line, *arguments, pass_fds=(self.pipe,))
        self.running[spec.name] = process
        if self.is_stopping.is_set():
            process.terminate()
        return process

    def stop(self) -> None:
        """Send SIGTERM to all workers, and start none again."""
        self.is_stopping.set()
        for process in self.running.values():
            process.terminate()

    async def watch(self, spec: ProcessSpec, process: _ChildProcess) -> None:
        """Wait for the end of a worker's process and start it again, as long as the rule allows this.

        Raises:
            WorkerDied: the worker ended and is not started again, and it was the last worker or `can_lose_some` is not
                set.
        """
        restarts: Restarts | None = None
        while True:
            exit_code = await process.wait()
            del self.running[spec.name]
            if self.is_stopping.is_set():
                return
            delay_s, now, end = None, time.monotonic(), end_text(exit_code)
            if self.rule is not None:
                restarts = restarts or Restarts(self.rule)
                delay_s = restarts.delay_s(exit_code, lived_s=now - process.started_at, now=now)
            limit = f" ({restarts})" if restarts else ""
            # The last line of a killed process is not the cause.
            last = f"; its last line: {process.tail[-1]}" if process.tail and exit_code >= 0 else ""
            if restarts is None or delay_s is None:
                await self._give_up(spec.name, exit_code, limit)
                if not (self.can_lose_some and self.remaining):
                    tail = "".join(f"\n  {line}" for line in process.tail)
                    raise WorkerDied(f"worker {spec.name} {end}; its last lines:{tail or ' none'}")
                self.on_end(spec.name, f"{end}; workers left: {self.living}; not started again{limit}{last}")
                return
            if self.announcer is not None:
                self.announcer.begin(spec.name, f"{end}; {restarts.current}", delay_s)
            again = f"started again in {delay_s:g} s{limit}"
            self.on_end(spec.name, f"{end}; workers left: {self.living}; {again}{last}")
            if await is_set_within(self.is_stopping, delay_s):
                return
            process = await self.start(spec)

    async def _give_up(self, worker: str, exit_code: int, limit: str) -> None:
        self.remaining -= 1
        if self.announcer is not None and exit_code == EXIT_DUPLICATE_WORKER:
            # Another live process publishes presence under this id.
            self.announcer.end(worker)
        elif self.announcer is not None:
            await self.announcer.give_up(worker, f"{end_text(exit_code)}{limit}")


@asynccontextmanager
async def run_workers(
    specs: Sequence[ProcessSpec],
    on_line: Callable[[str, str], None],
    on_end: Callable[[str, str], None] | None = None,
    *,
    announcer: StartAnnouncer | None = None,
    stop_s: float = STOP_S,
) -> AsyncIterator[Workers]:
    """Run workers while the body runs. Stop all workers when the body ends.

    If a worker exits unexpectedly, all workers are stopped too. The body can change this. After it has set `rule`, the
    worker is started again. After it has set `can_lose_some`, the other workers continue without a worker that is not
    started again. `on_end` is called in both cases.

    Args:
        specs: commands of the workers. `--parent-pipe FD` is added to each command.
        on_line: called with the name of the worker and each line that it prints.
        on_end: called with the name of a worker that ended, and a text that states whether it is started again.
            None: `on_line` is called instead.
        announcer: announces workers whose processes start. `--incarnation ID` is added to each command.
        stop_s: seconds from SIGTERM to SIGKILL.

    Raises:
        ExceptionGroup: contains the errors of the body, and `WorkerDied` if a worker exited unexpectedly.
    """
    watches: list[asyncio.Task[None]] = []
    read_end, write_end = os.pipe()
    workers = Workers(on_line, on_end or on_line, announcer, read_end, remaining=len(specs))
    try:
        async with asyncio.TaskGroup() as tasks:
            try:
                for spec in specs:
                    process = await workers.start(spec)
                    watches.append(tasks.create_task(workers.watch(spec, process), name=f"watch {spec.name}"))
                yield workers
            finally:
                workers.stop()
                if watches:
                    _, late = await asyncio.wait(watches, timeout=stop_s)
                    for watch in late:
                        watch.cancel()
    finally:
        os.close(read_end)
        os.close(write_end)


async def run_tool(spec: ProcessSpec) -> None:
    """Run a command to its end.

    Cancellation: kills the command.

    Raises:
        CommandFailed: the command failed. The message has the last line that it printed.
    """
    tool = await _ChildProcess.start(spec, lambda _name, _line: None)
    exit_code = await tool.wait()
    if exit_code != 0:
        last = tool.tail[-1] if tool.tail else "it printed nothing"
        raise CommandFailed(f"{spec.name} {end_text(exit_code)}: {last}")


def end_text(exit_code: int) -> str:
    """Return how a process ended. A negative exit code is the number of the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    text = f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    # The kernel kills without a word in the log of the process.
    return f"{text} (out of memory? `dmesg` shows it)" if -exit_code == signal.SIGKILL else text
