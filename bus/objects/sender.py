"""Stores messages of objects; a window bounds the bytes in flight."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from ...schemas.errors import BusBroken, ControlCode, ControlError, RollbusError
from ..nats.connection import publish, subscribe

__all__ = ["WINDOW_BYTES", "Sender", "open_sender"]

PART_BYTES: Final = 512 * 1024
"""Bytes of a chunk, if the server's `max_payload` allows it. Larger chunks are not faster and delay other messages."""
HEADROOM_BYTES: Final = 4096
"""Bytes below `max_payload` for headers that an intermediate server may add."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Published bytes without an ack: enough to keep the server busy, few enough not to delay other messages."""
ACK_TIMEOUT_S: Final = 10.0
"""Seconds for the server to store a chunk; a slow disk or an election takes seconds."""


class Sender:
    """Publishes messages to a stream and keeps several of them in flight."""

    def __init__(self, nats: Client, inbox: str) -> None:
        self.part_bytes = min(PART_BYTES, nats.max_payload - HEADROOM_BYTES)
        self._nats = nats
        self._inbox = inbox
        self._window = max(1, WINDOW_BYTES // self.part_bytes)
        self._unacked = 0
        self._acked = asyncio.Event()
        self._failure: RollbusError | None = None

    async def on_ack(self, message: Msg) -> None:
        """Handle the server's ack of one message."""
        self._unacked -= 1
        self._failure = self._failure or _refusal(message)
        self._acked.set()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish a message once the window has room."""
        await self._wait_until(self._window - 1)
        if self._failure is not None:
            raise self._failure
        self._unacked += 1
        await publish(self._nats, subject, data, reply=self._inbox, headers=headers)

    async def finish(self) -> None:
        """Wait until all messages are stored."""
        await self._wait_until(0)
        if self._failure is not None:
            raise self._failure

    async def settle(self) -> None:
        """Wait until the server has processed all messages. It stores none of them after a later delete."""
        if not isinstance(self._failure, BusBroken):
            await self._wait_until(0)

    async def _wait_until(self, unacked: int) -> None:
        while self._unacked > unacked:
            self._acked.clear()
            try:
                async with asyncio.timeout(ACK_TIMEOUT_S):
                    await self._acked.wait()
            except TimeoutError:
                self._failure = BusBroken(f"JetStream did not store a part within {ACK_TIMEOUT_S:g} s")
                return


@contextlib.asynccontextmanager
async def open_sender(nats: Client) -> AsyncIterator[Sender]:
    """Open a sender for a block. At the end of the block, the server has processed all messages."""
    inbox = nats.new_inbox()
    sender = Sender(nats, inbox)
    subscription = await subscribe(nats, inbox, sender.on_ack)
    try:
        yield sender
    finally:
        await sender.settle()
        with contextlib.suppress(nats_errors.Error):  # the connection is closed
            await subscription.unsubscribe()


def _refusal(message: Msg) -> ControlError | None:
    """Return the reason why the server did not store a message; None: it stored the message."""
    answer: dict[str, Any] = json.loads(message.data) if message.data else {"error": {"description": "no such bucket"}}
    if "error" not in answer:
        return None
    return ControlError(
        ControlCode.STORAGE, f"the bucket rejected the upload: {answer['error'].get('description', '')}"
    )
