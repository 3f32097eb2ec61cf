"""Parses the bytes that a NATS server sends into operations of the NATS protocol.

nats-py copies each byte five times before a message is complete. The reader here receives bytes into one buffer and
copies messages out of it. A large message gets its own buffer, which the socket fills.

The operations: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...schemas.errors import RemoteProtocolError

__all__ = ["BUFFER_BYTES", "OperationReader", "SubscriptionMessage"]

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


class SubscriptionMessage(NamedTuple):
    """A message for one subscription."""

    sid: int
    subject: bytes
    reply: bytes
    """Reply subject; empty: none."""
    headers: bytes | None
    payload: bytes | bytearray


class _Head(NamedTuple):
    """The content of the line before a message."""

    sid: int
    subject: bytes
    reply: bytes
    headers_bytes: int
    num_bytes: int
    """Bytes of headers and payload."""


@dataclass(slots=True)
class _Large:
    """A message with its own buffer."""

    head: _Head
    data: bytearray
    """Headers and payload, without the end."""
    filled: int
    """Number of received bytes."""


class OperationReader:
    """Parses received bytes: fill `buffer`, report the number of bytes to `received`, then call `pop_operations`."""

    def __init__(self) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # Range of received bytes that were not parsed yet.
        self._start = self._end = 0
        self._head: _Head | None = None
        self._large: _Large | None = None
        # The next bytes are the end of a message that was already delivered.
        self._is_end_due = False
        self._whole: list[SubscriptionMessage | bytes] = []
        self.unread_bytes = 0
        """Approximate memory of complete operations that were not popped."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<OperationReader whole={len(self._whole)} unread_bytes={self.unread_bytes}>"

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
            self._view[:rest] = self._view[self._start : self._end]
            self._start, self._end = 0, rest
        return self._view[self._end :]

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
        while self._cut():
            pass

    def pop_operations(self) -> Iterator[SubscriptionMessage | bytes]:
        """Return complete operations in order: messages, and the lines of other operations with their end."""
        whole, self._whole, self.unread_bytes = self._whole, [], 0
        return iter(whole)

    def _cut(self) -> bool:
        """Parse the next operation. Return False if it is incomplete."""
        if self._is_end_due:
            return self._cut_end()
        return self._cut_line() if self._head is None else self._cut_message(self._head)

    def _cut_line(self) -> bool:
        end = self._buffer.find(END, self._start, self._end)
        if end < 0:
            if self._end - self._start == BUFFER_BYTES:
                raise RemoteProtocolError(f"the NATS server sent a line of more than {BUFFER_BYTES} bytes")
            return False
        line = bytes(self._view[self._start : end + len(END)])
        self._start = end + len(END)
        if line.startswith((b"MSG ", b"HMSG ")):
            self._head = _parse(line)
        else:
            self._whole.append(line)
            self.unread_bytes += len(line) + OVERHEAD_BYTES
        return True

    def _cut_message(self, head: _Head) -> bool:
        there = self._end - self._start
        if there >= head.num_bytes + len(END):
            begin, self._start = self._start, self._start + head.num_bytes
            payload = bytes(self._view[begin + head.headers_bytes : self._start])
            self._deliver(head, self._view[begin : begin + head.headers_bytes], payload)
            return True
        if head.num_bytes <= OWN_BUFFER_BYTES:
            return False
        large = _Large(head, bytearray(head.num_bytes), min(there, head.num_bytes))
        large.data[: large.filled] = self._view[self._start : self._start + large.filled]
        self._start += large.filled
        return self._deliver_large(large)

    def _deliver_large(self, large: _Large) -> bool:
        """Deliver `large` if it is complete. Otherwise the next bytes belong to it."""
        self._large = large
        if large.filled < len(large.data):
            return False
        self._large = None
        # A payload without headers is delivered uncopied. It cannot be shortened: the socket refers to it until
        # `received` returns.
        headers_bytes = large.head.headers_bytes
        payload = large.data[headers_bytes:] if headers_bytes else large.data
        self._deliver(large.head, memoryview(large.data)[:headers_bytes], payload)
        return True

    def _deliver(self, head: _Head, headers: memoryview, payload: bytes | bytearray) -> None:
        self._head, self._is_end_due = None, True
        self._whole.append(SubscriptionMessage(head.sid, head.subject, head.reply, bytes(headers) or None, payload))
        self.unread_bytes += head.num_bytes + OVERHEAD_BYTES

    def _cut_end(self) -> bool:
        if self._end - self._start < len(END):
            return False
        if not self._buffer.startswith(END, self._start):
            raise RemoteProtocolError("the NATS server sent a message that does not end where it should")
        self._start += len(END)
        self._is_end_due = False
        return True


def _parse(line: bytes) -> _Head:
    """Parse the line before a message: `MSG subject sid [reply] bytes`, or `HMSG subject sid [reply] headers bytes`."""
    operation, *words = line.split()
    has_headers = operation == b"HMSG"
    try:
        subject, sid, *reply, size = words
        headers_bytes = int(reply.pop()) if has_headers else 0
        if len(reply) > 1:
            raise ValueError(f"{len(words)} words")
        head = _Head(int(sid), subject, reply[0] if reply else b"", headers_bytes, int(size))
        if not 0 <= head.headers_bytes <= head.num_bytes <= MAX_MESSAGE_BYTES:
            raise ValueError(f"{head.headers_bytes} bytes of headers in {head.num_bytes}")
    except (ValueError, IndexError) as exc:
        raise RemoteProtocolError(f"the NATS server sent {line[:80]!r} before a message: {exc}") from None
    return head
