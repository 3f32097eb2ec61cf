"""The TCP connection to a NATS server, with nats-py's interface: it sends bytes and receives protocol operations."""

import asyncio
import contextlib
import os
import ssl
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import ParseResult

from nats import errors as nats_errors
from nats.aio.transport import Transport

from ...schemas.errors import RemoteProtocolError
from .operations import OperationReader, SubscriptionMessage

__all__ = ["NatsTransport", "NoNats", "NoTls", "Peer"]

MAX_UNREAD_BYTES: Final = 4 * 1024**2
"""Received and not handed on, before the socket is left alone for a while: what a window of routing and a step's tokens
take together."""


class NoNats(nats_errors.ProtocolError):
    """The server sent what is none of its protocol; says what, which nats-py's own error does not."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoTls(OSError):
    """TLS is required, and this connection has none; no byte was sent over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The result of a TLS handshake about the server."""

    protocol: str
    """`TLSv1.3`, for example."""
    certificate: dict[str, Any]
    """As `ssl.SSLSocket.getpeercert` decodes it; empty where nothing has verified it."""
    der: bytes
    """The same certificate as the server sent it."""


class NatsTransport(Transport):
    """Writing into a connection that is lost is an OSError, and nothing counts as written.

    asyncio lets such bytes vanish, uvloop raises a RuntimeError, and nats-py expects neither.

    Args:
        requires_tls: refuse, by `NoTls`, to write anything to a server before the TLS handshake has succeeded. It is
            decided here because all that nats-py sends comes this way: credentials, subscriptions after a reconnect,
            and what waits to be sent when it closes in the middle of connecting.
    """

    def __init__(self, *, requires_tls: bool = False) -> None:
        self.requires_tls = requires_tls
        _made.add(self)
        self._protocol: _NatsProtocol | None = None

    def __bool__(self) -> bool:
        # nats-py would replace one that is false by its own.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        """Open a connection. `buffer_size` is nats-py's own. TimeoutError: after `connect_timeout` seconds."""
        loop = asyncio.get_running_loop()
        if uri.hostname is None or uri.port is None:
            raise OSError(f"{uri.netloc} is no address with a port")
        async with asyncio.timeout(connect_timeout):
            _, self._protocol = await loop.create_connection(_NatsProtocol, uri.hostname, uri.port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        """Go on in TLS with the server of this name, over the connection that is there."""
        loop = asyncio.get_running_loop()
        name = uri if isinstance(uri, str) else uri.hostname
        protocol, plain = _NatsProtocol(), self._open()
        with contextlib.ExitStack() as unless_secure:
            # Since the handshake began its transport is TLS's, which tells it nothing.
            unless_secure.callback(plain.connection_lost, None)
            unless_secure.callback(plain.transport.abort)
            async with asyncio.timeout(connect_timeout):
                transport = await loop.start_tls(plain.transport, protocol, ssl_context, server_hostname=name)
            if transport is None:
                raise ConnectionResetError("the connection to NATS was lost on the way to TLS")
            unless_secure.pop_all()
        protocol.transport = transport
        protocol.is_secure = True
        self._protocol = protocol

    @property
    def is_secure(self) -> bool:
        """True if the TLS handshake of the present connection has succeeded."""
        return self._protocol is not None and self._protocol.is_secure

    @property
    def has_received(self) -> bool:
        """True if the server has sent anything over the present connection, apart from TLS's own messages."""
        return self._protocol is not None and self._protocol.has_received

    def peer(self) -> Peer | None:
        """Return what TLS says about the server; None: the connection has no TLS."""
        if self._protocol is None or not self._protocol.is_secure:
            return None
        tls = self._protocol.transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) or b""
        return Peer(protocol=tls.version() or "", certificate=tls.getpeercert() or {}, der=der)

    def write(self, payload: bytes) -> None:
        """Hand `payload` to the operating system. OSError: the connection is lost; NoTls: it may not be used."""
        self._writable().transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Likewise, for several in order."""
        self._writable().transport.writelines(payload)

    async def drain(self) -> None:
        """Wait until what is unsent has become little. OSError: the connection was lost."""
        await self._open().drained()

    async def operations(self) -> Iterator[SubscriptionMessage | bytes]:
        """Wait for what the server sends next, and return all of it that is here.

        Raises:
            nats.errors.UnexpectedEOF: the server closed the connection.
            NoNats: it sent something that is none.
            OSError: the connection was lost.
        """
        return await self._require_protocol().operations()

    async def readline(self) -> bytes:
        """Wait for the server's next line, with its end; empty when there will be none, as nats-py expects it.

        For the start of a connection, when no messages come.
        """
        return await self._require_protocol().readline()

    async def read(self, buffer_size: int) -> bytes:
        """Not used: what comes is read by operation."""
        raise NotImplementedError

    def at_eof(self) -> bool:
        """Nothing will come any more."""
        return self._protocol is None or self._protocol.is_lost

    def close(self) -> None:
        """Close once all is sent."""
        # asyncio's TLS, closed twice, forgets what it closes: no abort would end it any more.
        if self._protocol is not None and not self._protocol.transport.is_closing():
            self._protocol.transport.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        if self._protocol is not None:
            await self._protocol.closed()

    def abort(self) -> None:
        """Drop the connection with all that is unsent; does nothing if there is none."""
        if self._protocol is not None and not self._protocol.is_gone:
            self._protocol.transport.abort()

    def leave_to_parent(self, nowhere: int) -> None:
        """Let go of the parent's connection in a process that was just forked: its socket becomes the file `nowhere`.

        So nothing can be sent here over the parent's connection, and the parent can close it.
        """
        if self._protocol is not None and not self._protocol.is_gone:
            os.dup2(nowhere, self._protocol.transport.get_extra_info("socket").fileno(), inheritable=False)

    def _require_protocol(self) -> "_NatsProtocol":
        if self._protocol is None:
            raise ConnectionResetError("there is no connection to NATS")
        return self._protocol

    def _open(self) -> "_NatsProtocol":
        protocol = self._require_protocol()
        if protocol.transport.is_closing():
            raise ConnectionResetError("the connection to NATS is lost")
        return protocol

    def _writable(self) -> "_NatsProtocol":
        protocol = self._open()
        if self.requires_tls and not protocol.is_secure:
            raise NoTls("TLS is required and was not begun: nothing is sent without it")
        return protocol


_made: weakref.WeakSet[NatsTransport] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    transports = list(_made)
    if transports:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for transport in transports:
            transport.leave_to_parent(nowhere)
        os.close(nowhere)


os.register_at_fork(after_in_child=_leave_all_to_parent)


class _NatsProtocol(asyncio.BufferedProtocol):
    """One connection, from when it is open until it is lost."""

    transport: Any
    """asyncio's or uvloop's, which have no common base that says all of this."""

    def __init__(self) -> None:
        self._reader = OperationReader()
        # Of the start, and not read by anybody yet.
        self._lines: list[bytes] = []
        # Set when there is something to read, or the end.
        self._arrived = asyncio.Event()
        self._is_reading_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone = asyncio.Event()
        self._failure: Exception | None = None
        self.is_lost = False
        self.is_secure = False
        self.has_received = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.has_received = True
        if self._failure is not None:
            return
        try:
            self._reader.received(nbytes)
        except RemoteProtocolError as exc:
            self._mark_lost(NoNats(str(exc)))
            self.transport.abort()
            return
        if self._reader.unread_bytes > MAX_UNREAD_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()
        self._arrived.set()

    def eof_received(self) -> None:
        self._mark_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_lost(exc)
        self._gone.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What the wire calls.

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    async def operations(self) -> Iterator[SubscriptionMessage | bytes]:
        lines, self._lines = self._lines, []
        return iter(lines) if lines else await self._arriving()

    async def readline(self) -> bytes:
        while not self._lines:
            try:
                self._lines += [line for line in await self._arriving() if isinstance(line, bytes)]
            except nats_errors.UnexpectedEOF:
                return b""
        return self._lines.pop(0)

    async def _arriving(self) -> Iterator[SubscriptionMessage | bytes]:
        while not self._reader.has_whole:
            if self._failure is not None:
                raise self._failure
            if self.is_lost:
                raise nats_errors.UnexpectedEOF
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_reading_paused and not self.transport.is_closing():
            self._is_reading_paused = False
            self.transport.resume_reading()
        return self._reader.pop_operations()

    async def drained(self) -> None:
        await self._writable.wait()
        if self.is_lost:
            raise ConnectionResetError("the connection to NATS is lost")

    async def closed(self) -> None:
        await self._gone.wait()

    def _mark_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._failure = self._failure or exc
        self._writable.set()
        self._arrived.set()
