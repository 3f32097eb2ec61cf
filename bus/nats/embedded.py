"""An embedded NATS server: the real `nats-server` binary, for one machine, tests and demos.

    async with EmbeddedServer() as server:
        async with connected(server.url, name="trainer") as connection: ...

The server listens only on the loopback interface, unless `host` is set. It accepts all connections unless `users` or an
authorization is set.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

from ...schemas.errors import BusBroken, BusClosed
from ...schemas.options import pip_install
from ..auth.credentials import User
from ..auth.permissions import accounts
from ..thread_calls import is_set_within
from . import embedded_guard

_log = logging.getLogger(__name__)

BINARY_VARIABLE: Final = "ROLLBUS_NATS_SERVER"
"""Environment variable that names the nats-server binary."""
DEFAULT_MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
"""Maximum message size, the largest that NATS recommends. Prompts and routed experts of long requests are seldom
split."""
GC_PERCENT: Final = "400"
"""`GOGC` of the server, unless the environment sets it. The heap is small, and Go's default of 100 collects it so often
that routed experts pass a sixth slower."""
DEFAULT_START_TIMEOUT_S: Final = 30.0
"""Seconds for a start. A start takes tens of milliseconds; the recovery of large streams from a slow disk takes
longer."""
LOG_LINES: Final = 200
"""Number of kept lines of the server's log. A start writes 30 lines."""
SHOWN_LINES: Final = 10
"""Number of log lines in an error. The last line gives the reason."""
MAX_LOG_LINE_CHARS: Final = 1000
"""Maximum characters of a kept log line; longer lines are cut."""
_MAX_MEMORY_STORE_BYTES: Final = 1024**3
"""Maximum bytes of streams in memory. The server's default of 75 % of the machine's memory would leave too little for
the engine."""
_END_TIMEOUT_S: Final = 5.0
"""Seconds for a killed process to exit. An exit takes milliseconds unless the machine hangs."""
_ANY_PORT: Final = -1
_LISTENING: Final = re.compile(r"Listening for client connections on .*:(\d+)$")
_READY: Final = "Server is ready"


def find_binary(explicit: Path | None = None) -> Path:
    """Find nats-server: `explicit`, else `$ROLLBUS_NATS_SERVER`, else beside this Python, else on PATH.

    Raises:
        BusBroken: no binary was found, or the binary that one of the first two names is not executable.
    """
    named = {"the binary argument": explicit, f"${BINARY_VARIABLE}": os.environ.get(BINARY_VARIABLE)}
    for source, value in named.items():
        if value:
            path = Path(value).absolute()
            if not (path.is_file() and os.access(path, os.X_OK)):
                raise BusBroken(f"{source} names {path} as the nats-server binary, which is not an executable file")
            return path
    beside = Path(sys.executable).with_name("nats-server")
    found = shutil.which(beside) or shutil.which("nats-server")
    if found is None:
        raise BusBroken(
            f"no nats-server binary found: {pip_install('embedded')}, "
            f"or put nats-server on PATH, or name it in ${BINARY_VARIABLE}"
        )
    return Path(found).absolute()


def server_config(*, listen: str, store_dir: str, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> str:
    """Return a nats-server configuration with JetStream as JSON, which nats-server can read."""
    return json.dumps(
        {
            "listen": listen,
            "max_payload": max_payload_bytes,
            "jetstream": {"store_dir": store_dir, "max_memory_store": _MAX_MEMORY_STORE_BYTES},
        },
        ensure_ascii=False,  # the configuration language has no \u escapes
        indent=2,
    )


class EmbeddedServer:
    """A context manager that runs nats-server with JetStream as a child process.

    The server and its temporary folder are removed after an exception, after cancellation, and when this process is
    killed, because a guard process detects the kill (see `embedded_guard`). One exception: a kill in the milliseconds
    around a start or stop, while no server runs, leaves the temporary folder. Ctrl-C on the terminal does not reach the
    server, so all parts can shut down in order. The class works on asyncio and uvloop and in any thread. Use one object
    from one event loop.

    Args:
        binary: the nats-server to run; see `find_binary` for the default.
        port: a fixed port, or -1: the server chooses a free port and keeps it across restarts.
        store_dir: folder of JetStream's streams. It is created if absent and not removed at the end. Default: a
            temporary folder that is removed at the end.
        max_payload_bytes: maximum bytes of a message.
        start_timeout_s: seconds from the start of the process until it must be ready.
        users: users that may connect; None: every program may connect and has all permissions.
        host: address to listen at. With another address than loopback, `extra` must have an authorization.
        extra: further settings of nats-server.

    Raises on entering:
        BusBroken: no binary was found, or the server exited or was not ready in time. The message ends with its log.
    """

    def __init__(  # noqa: PLR0913 - settings of one server
        self,
        *,
        binary: Path | None = None,
        port: int = _ANY_PORT,
        store_dir: Path | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        users: Iterable[User] | None = None,
        host: str = "127.0.0.1",
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self._host = host
        self._extra = dict(extra or {})
        self._binary = binary
        self._port = port
        self._store_dir = store_dir
        self._max_payload_bytes = max_payload_bytes
        self._start_timeout_s = start_timeout_s
        self._accounts = None if users is None else accounts(users)
        self._log_lines: deque[str] = deque(maxlen=LOG_LINES)
        self._folder: Path | None = None
        self._process: _ServerProcess | None = None

    def __repr__(self) -> str:
        state = f"pid={self.pid} url={self.url}" if self.is_running else "not running"
        return f"<EmbeddedServer {state}>"

    @property
    def is_running(self) -> bool:
        """True if the server has started and not ended."""
        return self._process is not None and not self._process.ended.is_set()

    @property
    def url(self) -> str:
        """URL for clients. It stays the same across restarts.

        Raises:
            BusClosed: the server was never started.
        """
        if self._port == _ANY_PORT:
            raise BusClosed("the embedded nats-server has not been started")
        return f"nats://{self._host}:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of nats-server itself.

        Raises:
            BusClosed: the server is not running.
        """
        if self._process is None or not self.is_running:
            raise BusClosed("the embedded nats-server is not running")
        return self._process.server_pid

    def log_tail(self) -> str:
        """Return the last lines of the server's log, the newest last, across restarts."""
        return "\n".join(self._log_lines)

    async def __aenter__(self) -> Self:
        """Start the server; it accepts connections on return."""
        self._folder = Path(tempfile.mkdtemp(prefix="rollbus-nats-"))
        try:
            await self._start(self._folder)
        finally:
            if not self.is_running:
                shutil.rmtree(self._folder, ignore_errors=True)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Stop the server and remove the temporary folder."""
        try:
            await self.stop()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    async def stop(self) -> None:
        """Terminate the server, or kill it after `GRACE_S` seconds. Do nothing if it is not running.

        Cancellation: kills the server immediately.
        """
        await self._end(embedded_guard.TERMINATE)

    async def kill(self) -> None:
        """Kill the server as a crash would. Do nothing if it is not running."""
        await self._end(embedded_guard.KILL)

    async def restart(self) -> None:
        """Stop the server in order if it runs, then start it on the same port and store.

        Raises:
            BusClosed: the context was left or never entered.
            BusBroken: the server did not start.
        """
        if self._folder is None:
            raise BusClosed("the embedded nats-server is closed")
        await self.stop()
        await self._start(self._folder)

    async def wait(self) -> None:
        """Wait until the server has ended for any reason. Return immediately if it is not running."""
        if self._process is not None:
            await self._process.ended.wait()

    async def _start(self, folder: Path) -> None:
        """Run the server and wait until it is ready."""
        config = folder / "nats-server.conf"
        store_dir = (self._store_dir or folder / "store").absolute()
        listen = f"{self._host}:{self._port}"
        text = server_config(listen=listen, store_dir=str(store_dir), max_payload_bytes=self._max_payload_bytes)
        extra = self._extra if self._accounts is None else {**self._extra, "accounts": self._accounts}
        if extra:
            text = json.dumps({**json.loads(text), **extra}, ensure_ascii=False, indent=2)
        config.write_text(text)
        process = _ServerProcess([str(find_binary(self._binary)), "-c", str(config)], folder, self._log_lines)
        problem = "exited immediately"
        try:
            if not await is_set_within(process.settled, self._start_timeout_s):
                problem = f"was not ready within {self._start_timeout_s} s"
        finally:
            if not process.is_ready:
                process.end_now()
        if not process.is_ready:
            raise BusBroken(
                f"nats-server {problem}; its log ends with:\n" + "\n".join([*self._log_lines][-SHOWN_LINES:])
            )
        self._process = process
        self._port = process.port
        _log.info("nats_server.started url=%s pid=%s", self.url, self.pid)

    async def _end(self, order: bytes) -> None:
        """Order the guard to end the server, and wait until both have exited."""
        process = self._process
        if process is None or process.ended.is_set():
            return
        process.send(order)
        try:
            await is_set_within(process.ended, embedded_guard.GRACE_S + _END_TIMEOUT_S)
        finally:
            process.end_now()
        _log.info("nats_server.stopped url=%s", self.url)


class _ServerProcess:
    """One run of the server under its guard; reads the server's log.

    The class uses `Popen` and a reader callback instead of asyncio's subprocess. It needs no await between the start of
    the process and its assignment, no task and no child watcher. An event loop that closes does not kill the guard,
    which still has to clean up.
    """

    def __init__(self, command: list[str], folder: Path, log_lines: deque[str]) -> None:
        self.settled = asyncio.Event()
        """Set when the server is ready, or has exited without being ready."""
        self.ended = asyncio.Event()
        self.is_ready = False
        self.server_pid = 0
        self.port = 0
        self._is_ordered_to_end = False
        self._log_lines = log_lines
        self._partial_line = b""
        self._loop = asyncio.get_running_loop()
        guard = [sys.executable, "-I", "-S", embedded_guard.__file__, str(os.getpid()), str(folder)]
        orders_read, self._orders = os.pipe()
        self._log_fd, log_write = os.pipe()
        os.set_blocking(self._log_fd, False)
        try:
            self._guard = subprocess.Popen(
                guard + command,
                stdin=orders_read,
                stdout=subprocess.DEVNULL,
                stderr=log_write,
                start_new_session=True,
                env={"GOGC": GC_PERCENT, **os.environ},
            )
        except OSError as error:
            os.close(self._orders)
            os.close(self._log_fd)
            raise BusBroken(f"cannot start the guard of nats-server: {error}") from error
        finally:
            os.close(orders_read)
            os.close(log_write)
        self._loop.add_reader(self._log_fd, self._read_log)

    def send(self, order: bytes) -> None:
        """Send `order` to the guard: terminate or kill the server."""
        self._is_ordered_to_end = True
        with contextlib.suppress(BrokenPipeError):  # the guard has exited, and the server with it
            os.write(self._orders, order)

    def end_now(self) -> None:
        """Kill the server and block for milliseconds until server and guard have exited. Safe to repeat."""
        if self.ended.is_set():
            return
        self.send(embedded_guard.KILL)
        try:
            self._guard.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _log.error("nats_server.guard_hangs pid=%s", self._guard.pid)
            self._guard.kill()
        self._read_log()
        self._finish()

    def _read_log(self) -> None:
        """Read the available part of the log. The end of the log means that guard and server have exited."""
        try:
            data = os.read(self._log_fd, 65536)
        except BlockingIOError:
            return
        *lines, partial = (self._partial_line + data).split(b"\n")
        self._partial_line = partial[:MAX_LOG_LINE_CHARS]
        for line in lines:
            self._handle_line(line.decode(errors="replace")[:MAX_LOG_LINE_CHARS])
        if not data:
            self._finish()

    def _handle_line(self, line: str) -> None:
        """Keep one log line, and read the process id, the port or the readiness from it."""
        if line.startswith(embedded_guard.PID_LINE):
            self.server_pid = int(line.removeprefix(embedded_guard.PID_LINE))
            return
        self._log_lines.append(line)
        if self.is_ready:
            return
        if listening := _LISTENING.search(line):
            self.port = int(listening[1])
        elif line.endswith(_READY):
            self.is_ready = True
            self.settled.set()

    def _finish(self) -> None:
        """Release all resources after the processes have exited."""
        if self.ended.is_set():
            return
        self._loop.remove_reader(self._log_fd)
        os.close(self._log_fd)
        os.close(self._orders)
        exit_code = self._guard.wait()
        if self.is_ready and not self._is_ordered_to_end:
            _log.error("nats_server.died exit_code=%s last_line=%s", exit_code, self._log_lines[-1])
        self.ended.set()
        self.settled.set()
