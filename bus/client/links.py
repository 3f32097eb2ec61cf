"""A client's links to the workers: frames come in, acknowledgements, credit and aborts go out. On the bus thread.

Invariant: what a frame brings is with its call before the frame is acknowledged, and credit is granted for what has
arrived, not for what callers have read: one that does not read holds up no other.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from nats.aio.msg import Msg

from bus.connection import Connection, publish
from bus.protocol.link_receiver import LinkReceiver, Verdict
from bus.subjects import Subjects
from schemas.errors import BusBroken, RemoteProtocolError
from schemas.messages import WIRE_VERSION, Frame, LinkMessage, RequestKey, decode_frame, encode

__all__ = ["ClientLinks", "LinkStats"]

logger = logging.getLogger(__name__)

ACK_DELAY_S: Final = 0.02
"""How long a frame may wait for others to be acknowledged with it: some engine steps."""
TOTAL_WINDOW_BYTES: Final = 32 * 1024**2
"""What all workers together may have under way: half of what a subscription holds before it drops messages."""
MAX_WINDOW_BYTES: Final = 1024**2
"""For one worker: a few milliseconds of routing, and tokens wait behind what is under way."""
MIN_WINDOW_BYTES: Final = 64 * 1024
"""However many workers there are: a step's tokens of hundreds of requests fit."""
MAX_KEYS_PER_MESSAGE: Final = 256
"""Aborts in one message: 40 KiB with the longest ids, below any server's `max_payload`."""
MAX_ABORTS: Final = 65_536
"""For one worker, until it is written to: more requests than any client has there. What it is not told to stop it is
told when more comes of that."""
MAX_SILENCE_S: Final = 10.0
"""How long a worker that announces nothing is still written to: two leases."""
MAX_LINKS: Final = 16_384
"""Workers that are followed; far above any fleet. The one that was silent longest is forgotten, and asked anew."""


@dataclass(slots=True)
class LinkStats:
    """Counters of what came over the links, and of what was dropped or asked for again."""

    frames: int = 0
    """Messages that decoded, heartbeats included."""
    duplicate_frames: int = 0
    """Taken before."""
    missing_frames: int = 0
    """Dropped because one before them was missing; all of them were asked for again."""
    stale_frames: int = 0
    """Of a link, or a life of either side, that is over."""
    resends_asked: int = 0
    """Link messages that asked for what was missing."""
    bad_messages: int = 0
    """Frames that did not decode."""


class Reader(Protocol):
    """Who reads the links."""

    def take(self, worker: str, frame: Frame) -> None:
        """Take a worker's next frame."""

    def lose_at(self, worker: str, reason: str) -> None:
        """What the worker had of this client is lost."""


@dataclass(slots=True)
class _Link:
    receiver: LinkReceiver
    heard_at: float


class ClientLinks:
    """One link for each worker that has something for this client.

    Args:
        nats: connected.
        identity: this client's name in subjects, and which life of it this is.
        reader: takes what the frames bring.
    """

    def __init__(self, nats: Connection, subjects: Subjects, identity: tuple[str, str], reader: Reader) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client, self._incarnation = identity
        self._reader = reader
        # The one not heard for longest first.
        self._links: dict[str, _Link] = {}
        # Requests to be stopped, by worker: those in flight, and whatever a worker offers that nobody wants.
        self._aborts: dict[str, dict[RequestKey, None]] = {}
        # Workers to be written to now, and soon. These and the aborts are sets that keep their order.
        self._due: dict[str, None] = {}
        self._soon: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wanted = asyncio.Event()
        self.stats = LinkStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<ClientLinks {self._client} links={len(self._links)}>"

    async def receive(self, message: Msg) -> None:
        """Take a frame."""
        worker = message.subject.rpartition(".")[2]
        try:
            frame = decode_frame(message.data)
        except RemoteProtocolError as exc:
            self.stats.bad_messages += 1
            logger.warning("frame.bad worker=%s error=%s", worker, exc)
            return
        self.stats.frames += 1
        now = time.monotonic()
        # Put behind all others.
        link = self._links.pop(worker, None) or _Link(LinkReceiver(self._incarnation), now)
        self._links[worker] = link
        link.heard_at = now
        receiver = link.receiver
        if receiver.begins_anew(frame):
            self._reader.lose_at(worker, f"worker {worker} began a new link")
        verdict = receiver.receive(frame, len(message.data), now)
        if verdict is Verdict.TAKEN:
            self._reader.take(worker, frame)
        else:
            self._count(verdict)
        if receiver.is_ack_due(self._window):
            self._hasten(worker)
        elif receiver.has_unacked:
            self._hasten_soon(worker)
        if len(self._links) > MAX_LINKS:
            self._drop(next(iter(self._links)))

    def _count(self, verdict: Verdict) -> None:
        self.stats.duplicate_frames += verdict is Verdict.DUPLICATE
        self.stats.missing_frames += verdict is Verdict.GAP
        self.stats.stale_frames += verdict is Verdict.STALE

    @property
    def _window(self) -> int:
        """Bytes that a worker may have under way."""
        return max(min(TOTAL_WINDOW_BYTES // max(len(self._links), 1), MAX_WINDOW_BYTES), MIN_WINDOW_BYTES)

    def abort(self, worker: str, key: RequestKey) -> None:
        """Have `worker` stop a request."""
        aborts = self._aborts.setdefault(worker, {})
        if len(aborts) < MAX_ABORTS:
            aborts[key] = None
        self._hasten(worker)

    def repeat(self) -> None:
        """Tell every worker how far its link has come: what was said before may be lost."""
        for worker in self._links:
            self._hasten(worker)

    def prune(self, announced: Callable[[str], object]) -> None:
        """Forget workers that are gone: those without an announcement (None), and not heard for a while either."""
        silent_since = time.monotonic() - MAX_SILENCE_S
        for worker, link in list(self._links.items()):
            if link.heard_at > silent_since:
                break
            if announced(worker) is None:
                self._drop(worker)

    def _drop(self, worker: str) -> None:
        self._links.pop(worker, None)
        self._aborts.pop(worker, None)
        self._due.pop(worker, None)
        self._soon.pop(worker, None)

    def _hasten(self, worker: str) -> None:
        self._due[worker] = None
        self._wanted.set()

    def _hasten_soon(self, worker: str) -> None:
        self._soon[worker] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self._hasten_all)

    def _hasten_all(self) -> None:
        self._timer = None
        self._due.update(self._soon)
        self._soon.clear()
        self._wanted.set()

    async def run(self) -> None:
        """Write to workers as it becomes due, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.flush()

    async def flush(self) -> None:
        """Write to all workers to whom something is due."""
        due, self._due = self._due, {}
        for worker in due:
            self._soon.pop(worker, None)
            try:
                await self._write(worker)
            except BusBroken as exc:
                # Acknowledgements are repeated. Who was not told to stop is, when more comes of the request.
                logger.warning("link.lost worker=%s error=%s", worker, exc)

    async def _write(self, worker: str) -> None:
        aborts = list(self._aborts.pop(worker, {}))
        for first in range(0, max(len(aborts), 1), MAX_KEYS_PER_MESSAGE):
            message = self._message(worker, aborts[first : first + MAX_KEYS_PER_MESSAGE])
            await publish(self._nats, self._subjects.link(self._client, worker), encode(message))

    def _message(self, worker: str, abort: list[RequestKey]) -> LinkMessage:
        link = self._links.get(worker)
        if link is None:
            return LinkMessage(WIRE_VERSION, abort, client_incarnation=self._incarnation)
        message = link.receiver.message(window=self._window, now=time.monotonic(), abort=abort)
        self.stats.resends_asked += message.resend
        return message
