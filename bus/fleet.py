"""The fleet as a client sees it: who lives, what they serve."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from nats.aio.msg import Msg

from bus.connection import Connection, publish
from bus.protocol.fleet_view import FleetView, Gone
from bus.subjects import Subjects
from schemas.errors import InvalidRequest, NoWorkers, RemoteProtocolError
from schemas.messages import decode_presence
from schemas.presence import WorkerPresence

__all__ = ["Fleet", "FleetState"]

logger = logging.getLogger(__name__)

PING_WAIT_S = 0.5
"""How long after a ping a live worker may take to answer: a thousand times the round trip on a loopback."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    workers: tuple[WorkerPresence, ...]
    """Live workers by id; empty when there are none."""


class Fleet:
    """Follows the announcements of workers. Made by `bus.connect`; `on_gone` hears of each worker that ends."""

    def __init__(self, nats: Connection, subjects: Subjects, on_gone: Callable[[Gone], None]) -> None:
        self._nats = nats
        self._subjects = subjects
        self._on_gone = on_gone
        self._view = FleetView()
        self._changed = asyncio.Event()
        self._pinged_at = -PING_WAIT_S
        self.bad_messages = 0
        """Announcements that did not decode."""

    def __repr__(self) -> str:
        """One line with each worker and its state."""
        return f"<Fleet {self._subjects.fleet} {self._view!r}>"

    async def state(self) -> FleetState:
        """Ask all workers for their state and return what was heard within half a second.

        Raises:
            BusBroken: the connection to NATS is gone.
        """
        await self._ping()
        await self._wait(lambda: False, PING_WAIT_S)
        return FleetState(fleet=self._subjects.fleet, workers=self._view.workers())

    async def wait_for_workers(self, count: int = 1, *, model: str | None = None, timeout_s: float = 300.0) -> None:
        """Wait until at least `count` workers serve `model` (or any).

        Raises:
            NoWorkers: fewer did within `timeout_s` seconds; the message says what they were doing.
        """
        await self._ping()
        if not await self._wait(lambda: len(self._view.serving(model)) >= count, timeout_s):
            raise NoWorkers(
                message=f"{len(self._view.serving(model))} of {count} workers came up within {timeout_s:g} s"
                + self._others(model)
            )

    async def resolve_model(self, model: str | None) -> str:
        """The model that a request for `model` goes to; None means the fleet's only one.

        Raises:
            NoWorkers: no worker serves it.
            InvalidRequest: no model was named and the fleet serves several, or only others.
        """
        if not self._view.serving(model):
            await self._ping()
            await self._wait(lambda: bool(self._view.serving(model)), self._pinged_at + PING_WAIT_S - time.monotonic())
        served = sorted({presence.model for presence in self._view.serving()})
        if model is None and len(served) > 1:
            raise InvalidRequest(field="model", problem="is missing", allowed=f"one of {', '.join(served)}")
        if model is None and served:
            return served[0]
        if model is not None and model in served:
            return model
        if model is not None and served and not self._view.workers(model):
            raise InvalidRequest(field="model", problem=f"is {model!r}", allowed=f"one of {', '.join(served)}")
        raise NoWorkers(message=f"no live worker serves {model or 'any model'}" + self._others(model))

    def is_served(self, model: str) -> bool:
        """Some live worker takes requests for `model`."""
        return bool(self._view.serving(model))

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until a worker comes, goes or changes its state, at most `timeout_s` seconds."""
        self._changed.clear()
        await self._wait(self._changed.is_set, timeout_s)

    def _others(self, model: str | None) -> str:
        others = [p for p in self._view.workers(model) if p not in self._view.serving(model)]
        return f" ({', '.join(f'{p.worker} is {p.state}' for p in others)})" if others else ""

    async def receive(self, message: Msg) -> None:
        """Take a worker's announcement."""
        try:
            presence = decode_presence(message.data)
            if message.subject != self._subjects.presence(presence.worker):
                raise RemoteProtocolError(f"worker {presence.worker} announced on {message.subject}")
        except RemoteProtocolError as exc:
            self.bad_messages += 1
            logger.warning("presence.bad subject=%s error=%s", message.subject, exc)
            return
        gone = self._view.update(presence, time.monotonic())
        if gone is not None:
            self._on_gone(gone)
        self._changed.set()

    def expire(self) -> None:
        """Drop workers whose lease has run out."""
        for gone in self._view.expire(time.monotonic()):
            logger.warning("worker.gone worker=%s reason=%s", gone.worker, gone.reason)
            self._on_gone(gone)
            self._changed.set()

    async def listen_anew(self) -> None:
        """Start leases anew, where we could not hear for a while, and ask who is there."""
        self._view.renew_all(time.monotonic())
        self._pinged_at = -PING_WAIT_S
        await self._ping()

    async def _ping(self) -> None:
        # One ping serves every caller that waits for its answers.
        if time.monotonic() - self._pinged_at >= PING_WAIT_S:
            self._pinged_at = time.monotonic()
            await publish(self._nats, self._subjects.ping, b"")

    async def _wait(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                while not is_met():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return is_met()
        return True
