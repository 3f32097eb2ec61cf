"""How requests get to the workers: through the queue, or straight to the worker of their session. On the bus thread.

Invariant: a request that is open and that no worker has admitted is in one of four places: in the line here, on its way
to the queue, in the queue, or on its way to the worker of its session. What has left the queue without a worker's offer
is an orphan, and is published again.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from bus.client.children import Child, LiveCall, Way
from bus.client.config import ClientConfig
from bus.client.durations import DurationsByModel
from bus.client.fleet_watch import FleetWatch
from bus.client.prefill import Prefill
from bus.client.sessions import Sessions
from bus.connection import Connection, publish
from bus.protocol.states import RequestState
from bus.queue.publisher import PublishResult, QueuePublisher
from bus.queue.streams import Stored
from schemas.errors import BusBroken, ErrorCode, NoWorkers, RequestError, request_error
from schemas.messages import KvHandover, RequestMessage, encode
from schemas.request import Lane

__all__ = ["Arbiter", "Dispatch", "DispatchStats"]

logger = logging.getLogger(__name__)

DIRECT_WAIT_S: Final = 1.0
"""How long the worker of a session may take to answer: a thousand round trips, then anybody may have the request."""
ORPHAN_AGE_S: Final = 10.0
"""How long a request waits before it is looked for in the queue: what nobody has lost needs no looking for."""
ORPHANS_PER_ROUND: Final = 4096
"""Requests looked for in one round: some milliseconds. However many wait, the server is asked once for each lane."""
ROUND_S: Final = 0.5
"""How often what waits is looked at."""
HEADER_BYTES: Final = 512
"""Room below `max_payload` for the headers of a publish."""


@dataclass(slots=True)
class DispatchStats:
    """Counters of what was sent to workers."""

    requests: int = 0
    """Messages published: one for each attempt of each child of each request."""
    direct: int = 0
    """Those of them that went straight to the worker of their session."""
    orphans: int = 0
    """Requests that had left the queue without a worker's offer, and were published again."""


class Arbiter(Protocol):
    """Who decides what becomes of a request that could not be handed over."""

    def fail(self, child: Child, error: RequestError) -> None:
        """End its call with `error`."""

    def refuse(self, child: Child, error: RequestError) -> None:
        """Its attempt was not taken, because of `error`: end the call, or line up the next."""

    def lose(self, child: Child, error: RequestError) -> None:
        """Give up its attempt, and line up the next."""

    def withdraw(self, child: Child, error: RequestError) -> None:
        """Line it up again under another number: nobody took it."""


class Dispatch:
    """The line of requests that are to be published, and those that wait for a worker's offer.

    Args:
        nats: connected.
        watch: of the fleet.
        arbiter: decides about what failed.
    """

    def __init__(self, nats: Connection, config: ClientConfig, watch: FleetWatch, arbiter: Arbiter) -> None:
        self._nats = nats
        self._subjects = config.subjects
        self._client, self._incarnation = config.client, config.incarnation
        self._watch = watch
        self._arbiter = arbiter
        self._worker_grace_s = config.worker_grace_s
        self._publisher = QueuePublisher(nats, config.subjects, self._client, self._take_result)
        self._sessions = Sessions()
        self.prefill = Prefill(watch, config.prefill_min_tokens, self.look_again)
        # All of these are bounded by the requests in flight.
        self._line: deque[Child] = deque()
        self._line_wanted = asyncio.Event()
        # As many wait for the server's answer as may: the line moves on with the next one that is there.
        self._is_held_up = False
        self._unadmitted: dict[Child, None] = {}
        self._published: dict[str, Child] = {}
        # In the queue, the one longest not looked for first.
        self._queued: dict[Child, None] = {}
        # Since when nobody serves a model for which something waits.
        self._unserved: dict[str, float] = {}
        self.stats = DispatchStats()
        self.queue_waits = DurationsByModel()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Dispatch line={len(self._line)} unadmitted={len(self._unadmitted)} queued={len(self._queued)}>"

    @property
    def republished(self) -> int:
        """Publishes that were repeated for want of an answer."""
        return self._publisher.stats.repeats

    async def start(self) -> None:
        """Listen for the queue's answers.

        Raises:
            BusClosed: the connection is closed.
        """
        await self._publisher.start()

    def add(self, child: Child) -> None:
        """Publish the current attempt of `child` as soon as that is possible."""
        self._unadmitted[child] = None
        self._note_target(child.live)
        self._line.append(child)
        self._line_wanted.set()

    def _note_target(self, live: LiveCall) -> None:
        """Say from where `max_weight_lag` counts; nothing else asks."""
        if live.target_version is None and live.call.request.max_weight_lag is not None:
            live.target_version = self._watch.target_version(live.model)

    def admitted(self, child: Child) -> None:
        """A worker has it."""
        if child.wanted_since is not None:
            self.queue_waits.add(child.live.model, time.monotonic() - child.wanted_since)
            child.wanted_since = None
        self._forget(child)
        request = child.live.call.request
        # A prefill worker that a session goes to is found without being remembered.
        if request.session_id is not None and child.worker is not None and child.way is not Way.PREFILL:
            self._sessions.served(child.live.model, request.session_id, child.worker)

    def remove(self, child: Child, refusal: RequestError | None = None) -> None:
        """Expect nothing any more of the attempt that is under way; whatever answers to it is told to stop.

        Args:
            refusal: why nobody took it; None: it was taken, or nobody wants it any more.
        """
        self._forget(child)
        self.prefill.release(child, refusal)

    def _forget(self, child: Child) -> None:
        self._unadmitted.pop(child, None)
        self._queued.pop(child, None)
        if self._published.pop(child.token, None) is not None:
            self._publisher.forget(child.token)
            self._go_on()

    def _go_on(self) -> None:
        """There is room for another request to wait for the server's answer."""
        if self._is_held_up:
            self._is_held_up = False
            self._line_wanted.set()

    def hindrance(self, child: Child) -> str:
        """What keeps it from being admitted, to follow a colon; empty where nothing is known of that."""
        model, wanted, lora = child.live.model, child.live.call.request.min_weight_version, child.live.call.request.lora
        if lora is not None and all(lora not in (info.name for info in p.loras) for p in self._watch.serving(model)):
            return f"it waits for a worker with the adapter {lora!r}{self._watch.snapshot.others(model)}"
        newest = max((worker.weight_version for worker in self._watch.serving(model)), default=None)
        if wanted is None or (newest is not None and newest >= wanted):
            return ""
        have = "none is there that serves" if newest is None else f"the newest that serves has {newest}"
        return f"it waits for a worker with weight version {wanted}; {have}{self._watch.snapshot.others(model)}"

    def look_again(self) -> None:
        """What waits in a line may have become possible."""
        if self._line or self.prefill.num_waiting:
            self._line_wanted.set()

    def begin_anew(self) -> None:
        """The connection is back, or this process: who was not heard meanwhile is not missing."""
        self._unserved.clear()
        self.look_again()

    async def publish_again(self) -> None:
        """Repeat what the queue does not answer, until cancelled."""
        await self._publisher.run()

    async def run(self) -> None:
        """Publish what comes into the line, until cancelled."""
        while True:
            await self._line_wanted.wait()
            self._line_wanted.clear()
            if self._nats.is_connected:
                self._line.extend(self.prefill.decided())
            await self._publish_line()

    async def _publish_line(self) -> None:
        """Try each that stands in the line once; while nothing does, no name here keeps the last one's result."""
        for _ in range(len(self._line)):
            if self._publisher.is_full:
                self._is_held_up = True
                return
            child = self._line.popleft()
            if not await self._publish(child):
                self._line.append(child)

    async def _publish(self, child: Child) -> bool:
        """Publish its current attempt; False if that must wait."""
        if child.is_sent or not child.is_open:
            return True
        if not self._nats.is_connected:
            return False
        if child.state is RequestState.WAITING and not self._watch.snapshot.is_served(child.live.model):
            return False
        self._note_target(child.live)
        if child.is_first_attempt and child.live.lacks_target:
            return False
        allowed = self._nats.max_payload - HEADER_BYTES
        if self.prefill.takes(child, allowed):
            return True
        data = self._message(child, child.kv)
        if len(data) > allowed and child.way is Way.DECODE:
            # The KV is computed anew: slower than to fetch it, and better than to fail.
            data = self._message(child, None)
        if len(data) > allowed:
            message = f"{len(data)} bytes are over the {allowed} that the server's max_payload leaves"
            self._arbiter.fail(child, request_error(ErrorCode.TOO_LARGE, message, request_id=child.live.request_id))
            return True
        try:
            await self._send(child, data)
        except BusBroken as exc:
            logger.warning("request.waits error=%s", exc)
            child.unsent()
            return False
        return True

    def _message(self, child: Child, kv: KvHandover | None) -> bytes:
        return encode(
            RequestMessage(
                client=self._client,
                incarnation=self._incarnation,
                attempt=child.stream.attempt,
                child=child.index,
                target_version=child.live.target_version if child.is_first_attempt else None,
                kv=kv,
                stream=child.live.call.streams,
                request=msgspec.Raw(child.payload()),
            )
        )

    async def _send(self, child: Child, data: bytes) -> None:
        worker = child.prefill_worker or self._direct_worker(child)
        child.sent(worker)
        self.stats.requests += 1
        if worker is not None:
            self.stats.direct += child.way is not Way.PREFILL
            message = f"worker {worker}, to which it was handed, did not answer within {DIRECT_WAIT_S:g} s"
            self._withdraw_in(DIRECT_WAIT_S, child, child.live.failure(ErrorCode.WORKER_LOST, message))
            await publish(self._nats, self._subjects.direct(self._client, worker), data)
            return
        token = child.token
        self._published[token] = child
        await self._publisher.publish(
            token=token,
            model=child.live.model,
            lane=child.lane,
            data=data,
            msg_id=f"{self._client}.{self._incarnation}.{token}",
            ttl_s=max(child.live.call.deadline_s - time.monotonic(), 0),
        )

    def _direct_worker(self, child: Child) -> str | None:
        """The worker that this attempt should go to directly; None: anybody may take it."""
        live, request = child.live, child.live.call.request
        session_id, wanted = request.session_id, request.min_weight_version or 0
        if child.stream.attempt != live.first_attempt or (session_id is None and not wanted):
            return None
        serving = self._watch.serving(live.model)
        able = [worker for worker in serving if worker.weight_version >= wanted]
        if session_id is None and len(able) == len(serving):
            return None
        # Where some workers are too old, the queue would hand it to one of them as likely as not.
        chosen = self._sessions.choose(live.model, session_id or live.request_id, able)
        return None if chosen is None or chosen.free_slots == 0 else chosen.worker

    def _withdraw_in(self, delay_s: float, child: Child, error: RequestError) -> None:
        """Have another attempt published then, unless this one has been stored or admitted."""
        token = child.token

        def withdraw() -> None:
            if child.state is RequestState.PUBLISHING and child.token == token:
                self._arbiter.withdraw(child, error)

        asyncio.get_running_loop().call_later(delay_s, withdraw)

    def _take_result(self, token: str, result: PublishResult) -> None:
        self._go_on()
        child = self._published.pop(token, None)
        if child is None:
            return
        if result.ok:
            child.stored(result.seq)
            self._queued[child] = None
            return
        code = result.code or ErrorCode.UNKNOWN
        error = request_error(code, result.message, request_id=child.live.request_id)
        is_served = self._watch.snapshot.is_served(child.live.model)
        if code is ErrorCode.NO_WORKERS and (is_served or not child.is_first_attempt):
            # The queue was deleted; workers that are there, or come within the grace time, make it again.
            self._withdraw_in(ROUND_S, child, error)
        else:
            self._arbiter.refuse(child, error)

    async def look_after(self) -> None:
        """Look for what waits too long, until cancelled."""
        while True:
            await asyncio.sleep(ROUND_S)
            self.look_again()
            if self._nats.is_connected:
                self._fail_unserved()
                await self._find_orphans()

    def _fail_unserved(self) -> None:
        """Fail what waits for a model that nobody has served for too long."""
        now = time.monotonic()
        waiting = {child.live.model for child in self._unadmitted}
        unserved = {model for model in waiting if not self._watch.snapshot.is_served(model)}
        self._unserved = {model: self._unserved.get(model, now) for model in unserved}
        lost = {model for model, since in self._unserved.items() if now - since >= self._worker_grace_s}
        for child in [child for child in self._unadmitted if lost and child.live.model in lost]:
            others = self._watch.snapshot.others(child.live.model)
            message = f"nobody has served {child.live.model} for {self._worker_grace_s:g} s{others}"
            nobody = NoWorkers(message=message, request_id=child.live.request_id)
            self._arbiter.fail(child, child.last_error if child.workers and child.last_error else nobody)

    async def _find_orphans(self) -> None:
        """Publish again what has left the queue unnoticed."""
        # By model and lane, of this round: what has waited for long was stored before the first of them is asked.
        stored: dict[tuple[str, Lane], Stored] = {}
        waited_since = time.monotonic() - ORPHAN_AGE_S
        num_looked_for = 0
        while num_looked_for < ORPHANS_PER_ROUND:
            child = next(iter(self._queued), None)
            if child is None or child.seq is None or child.since > waited_since:
                return
            lane = child.live.model, child.lane
            if lane not in stored:
                try:
                    stored[lane] = await self._publisher.stored(*lane)
                except BusBroken as exc:
                    logger.warning("queue.not_searched error=%s", exc)
                    return
                # It may have been admitted meanwhile.
                continue
            num_looked_for += 1
            del self._queued[child]
            self._queued[child] = None
            child.since = time.monotonic()
            if not stored[lane].may_hold(child.seq):
                self.stats.orphans += 1
                message = "it left the queue, and no worker has offered to run it"
                self._arbiter.lose(child, child.live.failure(ErrorCode.WORKER_LOST, message))
