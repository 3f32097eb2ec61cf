"""TLS: a server that goes away, comes back, or stops answering, in the handshake and after it."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.connection import Connection, close_connection, open_connection
from bus.server import Server, Tls
from schemas.errors import BusBroken
from tests.support.certificates import certificate
from tests.support.invariants import until
from tests.support.loops import on_both_loops, run_on

INFO = {"server_id": "x", "version": "2.10", "max_payload": 2**20, "headers": True, "proto": 1, "tls_required": True}
ENDS_WITHIN_S = 15.0
"""Far more than it takes; half of what a TLS connection waits for the other side's goodbye."""

pytestmark = pytest.mark.slow


class TlsServer:
    """As much of a NATS server as a connection needs that is opened, each client served by a thread."""

    def __init__(self, folder: Path, *, shakes_hands: bool = True, answers: bool = True) -> None:
        cert, key = certificate(folder)
        self.tls = Tls(ca=str(cert))
        self.shakes_hands, self.answers = shakes_hands, answers
        self.port = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)
        self._sockets: list[socket.socket] = []
        self._over = threading.Event()

    @property
    def server(self) -> Server:
        """For connections."""
        return Server(f"nats://127.0.0.1:{self.port}", tls=self.tls)

    @contextlib.contextmanager
    def running(self) -> Iterator["TlsServer"]:
        """Listen, at the end nowhere and to nobody any more."""
        self.listen()
        try:
            yield self
        finally:
            self._over.set()
            self.go_away()

    def listen(self) -> None:
        """Take connections, at the port of before."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._sockets.append(listener)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def go_away(self) -> None:
        """Take none, and drop all that there are."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listener.accept()
                self._sockets.append(one)
                threading.Thread(target=self._serve, args=(one,), daemon=True).start()

    def _serve(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            one.sendall(b"INFO " + json.dumps(INFO).encode() + b"\r\n")
            if not self.shakes_hands:
                self._over.wait()
                return
            with self._context.wrap_socket(one, server_side=True) as safe, safe.makefile("rb") as lines:
                self._sockets.append(safe)
                for line in lines:
                    if not line.startswith(b"PING"):
                        continue
                    safe.sendall(b"PONG\r\n")
                    if not self.answers:
                        self._over.wait()


async def opened(server: TlsServer) -> Connection:
    """A connection to it."""
    return await open_connection(server.server, name="test")


async def reconnects(server: TlsServer) -> None:
    """Lose the server, and find it again."""
    connection = await opened(server)
    server.go_away()

    async def is_connected() -> bool:
        return connection.is_connected

    await until(is_connected, False)
    # Some attempts are refused.
    await asyncio.sleep(0.6)
    server.listen()
    await until(is_connected, True)
    assert connection.counters().reconnects == 1
    await close_connection(connection)


@on_both_loops
def test_a_connection_is_opened_again(tmp_path: Path, loop: str) -> None:
    """When the server is back."""
    with TlsServer(tmp_path).running() as server:
        run_on(loop, reconnects(server))


async def gives_up(server: TlsServer) -> None:
    """Try to connect."""
    async with asyncio.timeout(ENDS_WITHIN_S):
        with pytest.raises(BusBroken, match="within 1 s"):
            await open_connection(server.server, name="test", timeout_s=1)


@on_both_loops
def test_a_handshake_that_never_ends_is_given_up(tmp_path: Path, loop: str) -> None:
    """At the time limit."""
    with TlsServer(tmp_path, shakes_hands=False).running() as server:
        run_on(loop, gives_up(server))


async def closes_in_a_handshake(server: TlsServer) -> None:
    """Lose the server, and close before it has shaken hands again."""
    connection = await opened(server)
    server.shakes_hands = False
    server.go_away()
    server.listen()
    # It is in the middle of the handshake of its next connection.
    await asyncio.sleep(1)
    async with asyncio.timeout(ENDS_WITHIN_S):
        await close_connection(connection, timeout_s=0.5)


@on_both_loops
def test_closing_in_the_middle_of_a_handshake(tmp_path: Path, loop: str) -> None:
    """Nothing is waited for."""
    with TlsServer(tmp_path).running() as server:
        run_on(loop, closes_in_a_handshake(server))


async def closes_unanswered(server: TlsServer) -> None:
    """Connect and close."""
    connection = await opened(server)
    async with asyncio.timeout(ENDS_WITHIN_S):
        await close_connection(connection, timeout_s=0.5)


@on_both_loops
def test_a_server_that_says_no_goodbye_is_not_waited_for(tmp_path: Path, loop: str) -> None:
    """TLS would, for half a minute."""
    with TlsServer(tmp_path, answers=False).running() as server:
        run_on(loop, closes_unanswered(server))
