"""Pulls requests from a model's queue for a worker: as many as the worker has room for, in the order of the lanes.

Invariant: a request is handed over, or returned (nak) for another worker. If neither happens, because the request or
its pull was lost, the server delivers the request again after `ack_wait_s`.
"""

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from ...schemas.errors import BusBroken, BusClosed, RemoteProtocolError
from ...schemas.request import Lane
from ..logs import RejectionCount
from ..nats.client import Message
from ..nats.connection import Connection, drain, publish, subscribe
from ..nats.jetstream import API
from ..nats.library import Msg, Subscription
from ..protocol.queue.pull_plan import MAX_OVER, PULLED_BYTES, STANDING_S, Pull, PullPlan, PullStatus, decode_status
from ..subjects import LANES, PREFIX, Subjects
from .streams import PROBE_HEADER, QueueLimits, ensure_queue, stream_name

logger = logging.getLogger(__name__)

RECONNECT_POLL_S: Final = 0.25
"""Seconds between checks of a lost connection."""
ENSURE_RETRY_S: Final = 1.0
"""Seconds between attempts to create the queue."""
NAK_DELAY_S: Final = 0.25
"""Seconds until a returned request goes to the next worker. Without this delay, a request would visit all workers when
the whole fleet pauses, and count as poison."""
REDELIVERED: Final = 16
"""Requests to pull after a redelivered one: some of the requests of a lost worker."""
_PROBE: Final = b'{"batch":1,"no_wait":true}'
_SMALL_PROBE: Final = b'{"batch":1,"no_wait":true,"max_bytes":%d}'
_BATCH: Final = b'{"batch":%d,"no_wait":true,"max_bytes":%d}'
_STANDING: Final = b'{"batch":1,"expires":%d}' % int(STANDING_S * 1e9)
_SUBJECT: Final = re.compile(rf"{re.escape(PREFIX)}\.[^.]+\.req\.([^.]+)\.[^.]+\.[^.]+")
"""`rb.v1.<fleet>.req.<client>.<model>.<lane>`."""
_ACK: Final = re.compile(
    r"\$JS\.ACK\.(?:[^.*>\s]+\.[^.*>\s]+\.)?[^.*>\s]+\."
    rf"({'|'.join(LANES)})\.([0-9]{{1,20}})\.[0-9]{{1,20}}\.[0-9]{{1,20}}\.([0-9]{{1,20}})\.([0-9]{{1,20}})"
    r"(?:\.[^.*>\s]+)*"
)
"""`$JS.ACK.<stream>.<consumer>.<num_delivered>.<stream seq>.<consumer seq>.<time>.<num_pending>`. Newer servers put a
domain and an account before the stream, and may add fields at the end."""


@dataclass(slots=True)
class PullerStats:
    """Counters since the start."""

    pulls: int = 0
    handed_over: int = 0
    given_back: int = 0
    """Requests that arrived while paused, or without room."""
    probes: int = 0
    """Messages that test whether the queue stores messages."""
    ensured: int = 0
    """The number of times that the queue was created or checked."""


class QueuedRequest:
    """One request from the queue, to be acked once. Without an ack it goes to another worker after `ack_wait_s`.

    While the connection is down its methods do nothing: a late message could affect the delivery to another worker.
    """

    __slots__ = ("_nats", "_reply", "client", "data", "lane", "num_delivered", "num_pending", "published_at", "subject")

    def __init__(self, nats: Connection, message: Msg) -> None:
        """Take over a message that the queue has delivered.

        Raises:
            RemoteProtocolError: the queue has not delivered it.
        """
        origin, ack = _SUBJECT.fullmatch(message.subject), _ACK.fullmatch(message.reply)
        if origin is None or ack is None:
            # It is forged. The worker would send an ack to any subject, and the acks of others go in one piece with it.
            raise RemoteProtocolError(f"{message.subject!r}: a request whose reply subject is {message.reply!r}")
        lane, num_delivered, stored_at, num_pending = ack.groups()
        self._nats = nats
        self._reply = message.reply
        self.subject = message.subject
        self.client = origin[1]
        """The client that published it. NATS permissions enforce this name."""
        self.lane = cast(Lane, lane)
        self.data = message.data
        self.num_delivered = int(num_delivered)
        """1 on the first delivery."""
        self.published_at = int(stored_at) / 1e9
        """The time at which the queue stored it: Unix time in seconds, by the server's clock."""
        self.num_pending = int(num_pending)
        """Requests that waited in the lane behind it, without redelivered ones."""

    def __repr__(self) -> str:
        """Return one line without content."""
        return f"<QueuedRequest {self.subject} bytes={len(self.data)} num_delivered={self.num_delivered}>"

    async def ack(self) -> None:
        """Remove it from the queue."""
        await self._publish_ack(b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Return it to the queue, which delivers it again after `delay_s`."""
        await self._publish_ack(
            b"-NAK %b" % json.dumps({"delay": int(delay_s * 1e9)}).encode() if delay_s > 0 else b"-NAK"
        )

    async def in_progress(self) -> None:
        """Extend the time in which the queue waits for an ack by `ack_wait_s`."""
        await self._publish_ack(b"+WPI")

    async def _publish_ack(self, what: bytes) -> None:
        if self._nats.is_connected:
            await publish(self._nats, self._reply, what)

    @staticmethod
    async def ack_all(requests: "Sequence[QueuedRequest]") -> None:
        """Remove several requests of one connection from the queue. Their acks are sent in one piece."""
        *others, last = requests
        if last._nats.is_connected:
            last._nats.publish_with_next([request._reply for request in others], b"+ACK")
            await last.ack()


class QueuePuller:
    """Pulls the requests for one model.

    Args:
        room: returns how many more requests the worker could accept now, and counts handed-over requests immediately;
            negative if the worker has more than it has room for.
        on_request: called with each request; must not block. At most `MAX_OVER` are handed over beyond `room`.
        limits: the limits of the queue, if the puller must create it.
    """

    def __init__(
        self,
        nats: Connection,
        subjects: Subjects,
        model: str,
        *,
        room: Callable[[], int],
        on_request: Callable[[QueuedRequest], None],
        limits: QueueLimits | None = None,
    ) -> None:
        self._nats = nats
        self._subjects = subjects
        self._model = model
        self._room = room
        self._on_request = on_request
        self._limits = limits
        self._pull_subjects = {
            lane: f"{API}.CONSUMER.MSG.NEXT.{stream_name(subjects, model, lane)}.{lane}" for lane in LANES
        }
        self._plan = PullPlan(LANES, nats.max_payload)
        self._is_ensured = False
        self.was_ensured = asyncio.Event()
        """Set when the queue was found or created for the first time."""
        self._ensured_at = -math.inf
        self._is_paused = False
        # Room at the last step, less the requests since then.
        self._left = 0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._woken = asyncio.Event()
        self._reconnects = 0
        # Acks and naks of messages that were not handed over, at most those of one turn of the event loop.
        self._answers: list[Callable[[], Awaitable[None]]] = []
        self.stats = PullerStats()
        self.rejected = RejectionCount()
        """Messages in the inbox that neither the queue has delivered nor the server has sent."""
        self.on_given_back: Callable[[QueuedRequest], None] = lambda _request: None
        """Called with each request that is returned immediately; must not block."""

    def take_room(self, count: int) -> None:
        """Note that the worker has accepted `count` other requests."""
        self._left -= count

    def lanes_waiting(self) -> tuple[Lane, ...] | None:
        """Return the lanes in which requests wait, as of the last pulls; None: not known."""
        return self._plan.lanes_waiting(time.monotonic())

    def wake(self) -> None:
        """Wake the puller: there may be room now, or the connection is back."""
        self._woken.set()

    def pause(self) -> None:
        """Hand over no more requests. Return those that still arrive, and withdraw the open pulls."""
        self._is_paused = True
        self.wake()

    def resume(self) -> None:
        """Pull again."""
        self._is_paused = False
        self.wake()

    async def run(self) -> None:
        """Create the queue if it is missing and pull, until cancelled.

        This survives lost connections, restarted servers and deleted streams.

        Raises:
            BusBroken: the connection was lost permanently.
            BusClosed: the connection was closed locally.
        """
        try:
            while True:
                self._woken.clear()
                try:
                    wait_s = await self._step()
                except BusBroken:
                    if self._nats.lost is not None:
                        raise
                    wait_s = RECONNECT_POLL_S
                timer = None if wait_s is None else asyncio.get_running_loop().call_later(wait_s, self._woken.set)
                await self._woken.wait()
                if timer is not None:
                    timer.cancel()
        finally:
            self._is_paused = True
            await self._withdraw()

    async def _step(self) -> float | None:
        """Execute one step. Return the seconds until the next step; None: wait until woken."""
        if self._nats.is_closed:
            raise self._nats.lost or BusClosed("the connection to NATS is closed")
        await self._publish_answers()
        if not self._nats.is_connected:
            return RECONNECT_POLL_S
        if self._reconnects != self._nats.stats["reconnects"]:
            self._reconnects, self._plan.is_batched = self._nats.stats["reconnects"], False
            await self._withdraw()  # a server that was not restarted may still have the pulls
        if self._is_paused:
            await self._withdraw()
            return None
        if not self._is_ensured:
            wait_s = self._ensured_at + ENSURE_RETRY_S - time.monotonic()
            if wait_s > 0:  # it existed just now
                return wait_s
            if not await self._ensure():
                return ENSURE_RETRY_S
        if self._subscription is None:
            # A connection keeps its account. A resume of a large fleet must not ask the server once for each worker.
            self._plan.is_batched = self._plan.is_batched or await self._nats.is_in_only_account()
            self._inbox = self._nats.new_inbox()
            self._subscription = await subscribe(self._nats, f"{self._inbox}.*", self._receive)
        now = time.monotonic()
        self._left = room = self._room()
        for pull in self._plan.next_pulls(room, now):
            await self._publish(pull)
        next_at = self._plan.next_at(now)
        return None if next_at is None else next_at - now

    async def _ensure(self) -> bool:
        try:
            await ensure_queue(self._nats, self._subjects, self._model, self._limits)
        except BusBroken as error:
            logger.warning("queue.ensure_failed model=%s error=%s", self._model, error)
            return False
        self._is_ensured = True
        self.was_ensured.set()
        self._ensured_at = time.monotonic()
        self.stats.ensured += 1
        logger.info("queue.ensured fleet=%s model=%s", self._subjects.fleet, self._model)
        return True

    async def _publish(self, pull: Pull) -> None:
        payload, count = _STANDING if pull.is_standing else _PROBE, pull.num_pulls
        if self._plan.is_batched and count > 1:
            # The few pulls of large requests have no limit of bytes, because one request may have more.
            payload, count = _BATCH % (count, PULLED_BYTES if pull.max_bytes else -1), 1
        elif pull.max_bytes is not None:
            payload = _SMALL_PROBE % pull.max_bytes
        for _ in range(count):
            self.stats.pulls += 1
            await publish(self._nats, self._pull_subjects[pull.lane], payload, reply=f"{self._inbox}.{pull.number}")

    async def _withdraw(self) -> None:
        """End all pulls: the server drops pulls whose inbox has no subscription."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            if self._nats.is_connected:
                await drain(self._nats, subscription)
            elif not self._nats.is_closed:
                await subscription.unsubscribe()
        await self._publish_answers()
        self._plan.reset()

    async def _publish_answers(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            await answer()

    def _receive(self, message: Message) -> None:
        """Handle a request, or the end of a pull."""
        self._woken.set()
        try:
            if message.reply:
                self._receive_request(message)
            else:
                self._receive_status(message)
        except RemoteProtocolError as exc:
            self.rejected.warn(logger, "queue.message_rejected model=%s so_far=%s error=%s", self._model, exc)

    def _receive_request(self, message: Message) -> None:
        request = QueuedRequest(self._nats, message)
        # A redelivered request usually comes with others, which are not in `num_pending`.
        again = REDELIVERED if request.num_delivered > 1 else 0
        self._plan.count_message(request.lane, waiting=max(request.num_pending, again))
        if message.has_header(PROBE_HEADER):
            self.stats.probes += 1
            self._answers.append(request.ack)
            return
        self._left -= 1
        # The worker is asked only if more requests have come since the last step than it had room for then.
        if self._is_paused or (self._left < 0 and self._room() <= -MAX_OVER):
            self.stats.given_back += 1
            self.on_given_back(request)
            self._answers.append(partial(request.nak, NAK_DELAY_S))
            return
        self.stats.handed_over += 1
        self._on_request(request)

    def _receive_status(self, message: Message) -> None:
        number = message.subject.rpartition(".")[2]
        if not number.isdecimal():
            raise RemoteProtocolError(f"the end of a pull on {message.subject!r}; allowed: a number at its end")
        headers = message.headers or {}
        answer = decode_status(headers.get("Status", ""), headers.get("Description", ""))
        if answer is PullStatus.MISSING:
            self._is_ensured = False
        elif answer is PullStatus.REFUSED:
            logger.warning("queue.pull_rejected model=%s status=%s", self._model, headers)
        self._plan.end_pull(int(number), answer, time.monotonic())
