"""Stores messages of objects: many are on their way at any time, within a window."""

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
"""Of a part, where the server's `max_payload` allows it: larger ones move no faster, and hold up others."""
HEADROOM_BYTES: Final = 4096
"""Below `max_payload`, for headers that a server in between may add."""
WINDOW_BYTES: Final = 4 * 1024 * 1024
"""Published and not acknowledged yet: enough to keep the server busy, little enough not to hold up other messages."""
ACK_TIMEOUT_S: Final = 10.0
"""For the server to store a part: seconds on a slow disk or in an election."""


class Sender:
    """Publishes messages to a stream, of which some are unacknowledged at any time."""

    def __init__(self, nats: Client, inbox: str) -> None:
        self.part_bytes = min(PART_BYTES, nats.max_payload - HEADROOM_BYTES)
        self._nats = nats
        self._inbox = inbox
        self._window = max(1, WINDOW_BYTES // self.part_bytes)
        self._unacked = 0
        self._acked = asyncio.Event()
        self._failure: RollbusError | None = None

    async def on_ack(self, message: Msg) -> None:
        """Take the server's word on one message."""
        self._unacked -= 1
        self._failure = self._failure or _refusal(message)
        self._acked.set()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish a message, when there is room in the window."""
        await self._wait_until(self._window - 1)
        if self._failure is not None:
            raise self._failure
        self._unacked += 1
        await publish(self._nats, subject, data, reply=self._inbox, headers=headers)

    async def finish(self) -> None:
        """Wait until all are stored."""
        await self._wait_until(0)
        if self._failure is not None:
            raise self._failure

    async def settle(self) -> None:
        """Wait until the server has dealt with all: what is deleted then is not stored afterwards."""
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
    """Let messages be stored for a block; at its end the server has dealt with all of them."""
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
    """Return why the server did not store a message; None: it did."""
    answer: dict[str, Any] = json.loads(message.data) if message.data else {"error": {"description": "no such bucket"}}
    if "error" not in answer:
        return None
    return ControlError(ControlCode.STORAGE, f"the bucket takes no more: {answer['error'].get('description', '')}")
