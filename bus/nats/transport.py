"""The TCP connection to a NATS server, with nats-py's interface: it sends bytes and receives protocol operations.

nats-py copies each byte five times before a message is complete. The reader here receives bytes into one buffer and
copies messages out of it. A large message gets its own buffer, which the socket fills.

The operations: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

import asyncio
import contextlib
import os
import re
import ssl
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import ParseResult

from ...schemas.errors import RemoteProtocolError
from .library import Transport
from .library import errors as nats_errors

BUFFER_BYTES: Final = 64 * 1024
"""Buffer size for lines and small messages, enough for some frames of tokens. A longer line is rejected; the longest
lines name the servers of a cluster."""
OWN_BUFFER_BYTES: Final = 16 * 1024
"""An incomplete message above this size gets its own buffer."""
MAX_MESSAGE_BYTES: Final = 64 * 1024**2
"""Maximum bytes of a message, the largest `max_payload` of nats-server."""
OVERHEAD_BYTES: Final = 256
"""Approximate memory of an operation in addition to its bytes."""
END: Final = b"\r\n"
_MESSAGES: Final = b"MSG ", b"HMSG "
_USUAL: Final = re.compile(rb"MSG ([!-~]+) (\d{1,9}) (?:([!-~]+) )?(\d{1,7})\r\n")
"""The line before a message without headers of less than 10 MB."""
_WITH_HEADERS: Final = re.compile(rb"HMSG ([!-~]+) (\d{1,9}) (?:([!-~]+) )?(\d{1,7}) (\d{1,7})\r\n")
"""The same for a message with headers."""
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
MAX_UNREAD_BYTES: Final = 4 * 1024**2
"""Received bytes that may wait for their reader. Above this limit, reading from the socket pauses. It covers one credit
window of routed experts and the tokens of a step."""


class SubscriptionMessage(NamedTuple):
    """A message for one subscription."""

    sid: int
    subject: bytes
    reply: bytes
    """Reply subject; empty: none."""
    headers: bytes | None
    payload: bytes | bytearray


_Head = tuple[int, bytes, bytes, int, int]
"""The content of the line before a message: the first three fields of `SubscriptionMessage`, the bytes of its headers,
and the bytes of headers and payload."""

Receive = Callable[[int, bytes, bytes, bytes | None, bytes | bytearray], bool]
"""Handles the fields of a `SubscriptionMessage` immediately, or returns False. It must not raise."""


@dataclass(slots=True)
class _Large:
    """A message with its own buffer."""

    head: _Head
    data: bytearray
    """Headers and payload, without the end."""
    filled: int
    """Number of received bytes."""


class OperationReader:
    """Parses received bytes: fill `buffer`, report the number of bytes to `received`, then call `pop_operations`.

    Args:
        receive: receives each message first. `pop_operations` returns the messages that it does not handle.
    """

    def __init__(self, receive: Receive | None = None) -> None:
        self._receive = receive
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Range of received bytes that were not parsed yet.
        self._start = self._end = 0
        self._head: _Head | None = None
        self._large: _Large | None = None
        # The next bytes are the end of a large message that was already delivered.
        self._is_end_due = False
        self._whole: list[SubscriptionMessage | bytes] = []
        self.unread_bytes = 0
        """Approximate memory of complete operations that were not popped."""

    @property
    def has_whole(self) -> bool:
        """True if a complete operation is available."""
        return bool(self._whole)

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes; never empty."""
        if self._large is not None:
            return memoryview(self._large.data)[self._large.filled :]
        if self._start:
            rest = self._end - self._start
            if rest:
                self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :] if self._end else self._view

    def received(self, num_bytes: int) -> None:
        """Parse `num_bytes` bytes that were written to the beginning of `buffer`.

        Raises:
            RemoteProtocolError: the bytes violate the NATS protocol. No later bytes can be parsed.
        """
        if self._large is not None:
            self._large.filled += num_bytes
            self._deliver_large(self._large)
            return
        self._end += num_bytes
        while self._start < self._end and self._cut():
            pass

    def pop_operations(self) -> Iterator[SubscriptionMessage | bytes]:
        """Return complete operations in order: messages, and the lines of other operations with their end."""
        whole, self._whole, self.unread_bytes = self._whole, [], 0
        return iter(whole)

    def _cut(self) -> bool:
        """Parse the next operation. Return False if it is incomplete.

        This runs once for each message, so it makes no calls that it can avoid.
        """
        buffer, start, end = self._buffer, self._start, self._end
        if self._is_end_due:
            self._is_end_due = False
            return self._cut_end()
        head = self._head
        if head is None and (usual := _USUAL.match(buffer, start, end)) is not None:
            subject, sid_digits, reply, digits = usual.groups(b"")
            head, start = (int(sid_digits), subject, reply, 0, int(digits)), usual.end()
            self._start = start
        elif head is None and (usual := _WITH_HEADERS.match(buffer, start, end)) is not None:
            subject, sid_digits, reply, headers_digits, digits = usual.groups(b"")
            head = (int(sid_digits), subject, reply, int(headers_digits), int(digits))
            if head[3] > head[4]:
                head = _parse(usual[0])  # raises
            self._start = start = usual.end()
        elif head is None:
            line_end = buffer.find(END, start, end)
            if line_end < 0:
                if end - start == BUFFER_BYTES:
                    raise RemoteProtocolError(f"the NATS server sent a line of more than {BUFFER_BYTES} bytes")
                return False
            if not buffer.startswith(_MESSAGES, start, line_end):
                self._start = line_end + 2
                line = bytes(buffer[start : line_end + 2])
                self._whole.append(line)
                self.unread_bytes += len(line) + OVERHEAD_BYTES
                return True
            head = _parse(bytes(buffer[start:line_end]))
            self._start = start = line_end + 2
        sid, subject, reply, headers_bytes, num_bytes = head
        stop = start + num_bytes
        if stop + 2 > end:
            self._head = head
            return num_bytes > OWN_BUFFER_BYTES and self._begin_large(head)
        self._head, self._start = None, stop
        headers = bytes(buffer[start : start + headers_bytes]) if headers_bytes else None
        payload = bytes(buffer[start + headers_bytes : stop])
        if self._receive is None or not self._receive(sid, subject, reply, headers, payload):
            self._keep(SubscriptionMessage(sid, subject, reply, headers, payload))
        if buffer.startswith(END, stop, end):
            self._start = stop + 2
            return True
        return self._cut_end()

    def _begin_large(self, head: _Head) -> bool:
        there, num_bytes = self._end - self._start, head[-1]
        large = _Large(head, bytearray(num_bytes), min(there, num_bytes))
        large.data[: large.filled] = self._view[self._start : self._start + large.filled]
        self._start += large.filled
        return self._deliver_large(large)

    def _deliver_large(self, large: _Large) -> bool:
        """Deliver `large` if it is complete. Otherwise the next bytes belong to it."""
        self._large = large
        if large.filled < len(large.data):
            return False
        self._large = self._head = None
        self._is_end_due = True
        # A payload without headers is delivered uncopied. It cannot be shortened: the socket refers to it until
        # `received` returns.
        sid, subject, reply, headers_bytes, _ = large.head
        headers = bytes(large.data[:headers_bytes]) or None
        payload = large.data[headers_bytes:] if headers_bytes else large.data
        if self._receive is None or not self._receive(sid, subject, reply, headers, payload):
            self._keep(SubscriptionMessage(sid, subject, reply, headers, payload))
        return True

    def _keep(self, message: SubscriptionMessage) -> None:
        self._whole.append(message)
        self.unread_bytes += len(message.headers or b"") + len(message.payload) + OVERHEAD_BYTES

    def _cut_end(self) -> bool:
        if self._end - self._start < len(END):
            self._is_end_due = True
            return False
        if not self._buffer.startswith(END, self._start):
            raise RemoteProtocolError("the NATS server sent a message that does not end where it should")
        self._start += len(END)
        return True


def _parse(line: bytes) -> _Head:
    """Parse the line before a message: `MSG subject sid [reply] bytes`, or `HMSG subject sid [reply] headers bytes`."""
    try:
        operation, subject, sid, *rest, size = words = line.split()
        headers_bytes = int(rest.pop()) if operation == b"HMSG" else 0
        if len(rest) > 1:
            raise ValueError(f"{len(words)} words")
        num_bytes = int(size)
        if not 0 <= headers_bytes <= num_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(f"{headers_bytes} bytes of headers in {num_bytes}")
        return int(sid), subject, rest[0] if rest else b"", headers_bytes, num_bytes
    except (ValueError, IndexError) as exc:
        raise RemoteProtocolError(f"the NATS server sent {line[:80]!r} before a message: {exc}") from None


def encode_headers(headers: dict[str, str]) -> bytes:
    """Return the headers in the format of a message. Values are stripped, and line breaks become spaces.

    Raises:
        nats.errors.BadHeaderError: a name is not valid.
    """
    lines = ["NATS/1.0\r\n"]
    for name, value in headers.items():
        if _HEADER_NAME.fullmatch(name) is None:
            raise nats_errors.BadHeaderError(name)
        one_line = value.replace("\r", " ").replace("\n", " ").strip()
        lines.append(f"{name}: {one_line}\r\n")
    lines.append("\r\n")
    return "".join(lines).encode()


def parse_headers(block: bytes) -> dict[str, str]:
    """Parse the headers of a message. `Status` and `Description` are the words of a status line of the server."""
    first, *lines = block.decode(errors="replace").removesuffix("\r\n\r\n").split("\r\n")
    headers = {}
    if first != "NATS/1.0":
        status, _, description = first.removeprefix("NATS/1.0").strip().partition(" ")
        headers = {name: word for name, word in (("Status", status), ("Description", description)) if word}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


class NoNats(nats_errors.ProtocolError):
    """The server violated the NATS protocol. The message describes the violation; nats-py's own error does not."""

    def __str__(self) -> str:
        return str(self.args[0])


class NoTls(OSError):
    """TLS is required, and this connection has no TLS. No byte was sent over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The result of a TLS handshake about the server."""

    protocol: str
    """`TLSv1.3`, for example."""
    certificate: dict[str, Any]
    """Decoded by `ssl.SSLSocket.getpeercert`; empty if the certificate was not verified."""
    der: bytes
    """The same certificate as the server sent it."""


class NatsTransport(Transport):
    """The transport of one NATS client. A write into a lost connection raises OSError and writes nothing.

    asyncio discards the bytes of such a write, uvloop raises a RuntimeError, and nats-py handles neither.

    Args:
        requires_tls: raise `NoTls` for each write before the TLS handshake has succeeded. The check is here because
            nats-py sends all bytes through this class: credentials, subscriptions after a reconnect, and the unsent
            bytes when it closes while it connects.
        receive: receives each message first, as in `OperationReader`.
    """

    def __init__(self, *, requires_tls: bool = False, receive: Receive | None = None) -> None:
        self.requires_tls = requires_tls
        self._receive = receive
        _made.add(self)
        self._protocol: _NatsProtocol | None = None

    def __bool__(self) -> bool:
        # nats-py replaces a transport that is false by its own.
        return True

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        """Open a connection. Ignore `buffer_size`. Raise TimeoutError after `connect_timeout` seconds."""
        loop = asyncio.get_running_loop()
        if uri.hostname is None or uri.port is None:
            raise OSError(f"{uri.netloc} is no address with a port")
        async with asyncio.timeout(connect_timeout):
            _, self._protocol = await loop.create_connection(self._make_protocol, uri.hostname, uri.port)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        """Upgrade the open connection to TLS, with the server name in `uri`."""
        loop = asyncio.get_running_loop()
        name = uri if isinstance(uri, str) else uri.hostname
        protocol, plain = self._make_protocol(), self._open()
        with contextlib.ExitStack() as unless_secure:
            # From the start of the handshake, TLS owns the transport and does not notify the plain protocol.
            unless_secure.callback(plain.connection_lost, None)
            unless_secure.callback(plain.transport.abort)
            async with asyncio.timeout(connect_timeout):
                transport = await loop.start_tls(plain.transport, protocol, ssl_context, server_hostname=name)
            if transport is None:
                raise ConnectionResetError("the connection to NATS was lost during the TLS handshake")
            unless_secure.pop_all()
        protocol.transport = transport
        protocol.is_secure = True
        self._protocol = protocol

    @property
    def is_secure(self) -> bool:
        """True if the TLS handshake of the current connection has succeeded."""
        return self._protocol is not None and self._protocol.is_secure

    @property
    def has_received(self) -> bool:
        """True if the server has sent a byte over the current connection, apart from messages of TLS itself."""
        return self._protocol is not None and self._protocol.has_received

    def peer(self) -> Peer | None:
        """Return the TLS version and the server's certificate; None: the connection has no TLS."""
        if self._protocol is None or not self._protocol.is_secure:
            return None
        tls = self._protocol.transport.get_extra_info("ssl_object")
        der = tls.getpeercert(binary_form=True) or b""
        return Peer(protocol=tls.version() or "", certificate=tls.getpeercert() or {}, der=der)

    def write(self, payload: bytes) -> None:
        """Send `payload`. Raise OSError if the connection is lost, and NoTls if it requires TLS and has none."""
        self._writable().transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        """Send several payloads in order, with the errors of `write`."""
        self._writable().transport.writelines(payload)

    @property
    def is_writable(self) -> bool:
        """True if few bytes are unsent."""
        return self._protocol is not None and self._protocol.is_writable

    async def drain(self) -> None:
        """Wait until few bytes are unsent. Raise OSError if the connection was lost."""
        await self._open().drained()

    async def operations(self) -> Iterator[SubscriptionMessage | bytes]:
        """Wait for the server's next operation, and return all operations received so far.

        Raises:
            nats.errors.UnexpectedEOF: the server closed the connection.
            NoNats: the server violated the protocol.
            OSError: the connection was lost.
        """
        return await self._require_protocol().operations()

    async def readline(self) -> bytes:
        """Wait for the server's next line and return it with its end. Return an empty line after the end of input.

        nats-py calls this at the start of a connection, before messages arrive.
        """
        return await self._require_protocol().readline()

    async def read(self, buffer_size: int) -> bytes:
        """Raise NotImplementedError: the client reads operations, not bytes."""
        raise NotImplementedError

    def at_eof(self) -> bool:
        """Return True if the connection is lost or was never opened."""
        return self._protocol is None or self._protocol.is_lost

    def close(self) -> None:
        """Close after all bytes are sent."""
        # If asyncio's TLS transport is closed twice, it loses its connection, and `abort` has no effect.
        if self._protocol is not None and not self._protocol.transport.is_closing():
            self._protocol.transport.close()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""
        if self._protocol is not None:
            await self._protocol.gone.wait()

    def abort(self) -> None:
        """Close immediately and drop unsent bytes. Do nothing if there is no connection."""
        if self._protocol is not None and not self._protocol.gone.is_set():
            self._protocol.transport.abort()

    def leave_to_parent(self, nowhere: int) -> None:
        """Replace the parent's socket by the file `nowhere` in a process that was just forked.

        The child then cannot send over the parent's connection, and the parent can close it.
        """
        if self._protocol is not None and not self._protocol.gone.is_set():
            os.dup2(nowhere, self._protocol.transport.get_extra_info("socket").fileno(), inheritable=False)

    def _make_protocol(self) -> "_NatsProtocol":
        return _NatsProtocol(self._receive)

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
            raise NoTls("TLS is required and not active: nothing is sent without it")
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
    """One connection, from its start until it is lost."""

    transport: Any
    """Transport of asyncio or uvloop. They have no common base class with all methods used here."""

    def __init__(self, receive: Receive | None) -> None:
        self._reader = OperationReader(receive)
        # Lines from the start of the connection that were not read yet.
        self._lines: list[bytes] = []
        # Set when data can be read, or when the connection is lost.
        self._arrived = asyncio.Event()
        self._is_reading_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.gone = asyncio.Event()
        self._failure: Exception | None = None
        self.is_lost = False
        self.is_secure = False
        self.has_received = False

    # Methods for asyncio.

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
        if self._reader.has_whole:
            self._arrived.set()

    def eof_received(self) -> None:
        self._mark_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._mark_lost(exc)
        self.gone.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Methods for `NatsTransport`.

    @property
    def is_writable(self) -> bool:
        return self._writable.is_set() and not self.is_lost

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

    def _mark_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._failure = self._failure or exc
        self._writable.set()
        self._arrived.set()
