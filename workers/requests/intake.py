"""The incoming requests of a worker, from the queue or directly from clients (placed requests)."""

import asyncio
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...bus.logs import RejectionCount
from ...bus.protocol.queue.fairness import MAX_FOLLOWERS, STALLED_S, SlotRequest, SlotTurns, Turn
from ...bus.protocol.queue.placement import PlacementReason
from ...bus.queue.puller import NAK_DELAY_S, QueuedRequest, QueuePuller
from ...bus.subjects import Subjects
from ...schemas.errors import EngineDead, ErrorCode, RemoteProtocolError, RequestError, RequestRejected
from ...schemas.limits import MAX_DELIVERIES
from ...schemas.messages import KvTransfer, Sibling, priority_of
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest, lane_of, request_id_of
from ..config import WorkerConfig
from ..engines.engine import EngineRunner
from ..lifecycle import WorkerLifecycle
from .admission import (
    can_use,
    check_mask_size,
    check_phase,
    check_request,
    check_row_size,
    not_for_kv,
    wait_for_weights_s,
)
from .incoming import IncomingRequest
from .links import WorkerLinks
from .table import Instructions, RequestOrigin

logger = logging.getLogger(__name__)

MAX_ARRIVALS = 4096
"""Maximum requests that wait to enter the engine. Further requests go back to the queue."""
ADMIT_AT_ONCE = 16
"""Requests of a burst that are admitted, in a few milliseconds, before the loop may publish engine steps."""


@dataclass(slots=True)
class IntakeStats:
    """Counters since the worker was started."""

    taken: int = 0
    """Messages received, each with one request or with siblings."""
    bad: int = 0
    """Messages without a usable client or request id to answer."""
    gone: int = 0
    """Requests of dead clients."""
    returned: int = 0
    """Requests returned to the queue because this worker accepts no requests now, or too many requests wait."""
    too_new: int = 0
    """Requests returned to the queue for workers with later weights, or with an adapter that this worker lacks."""
    placed: int = 0
    """Direct requests that were offered to their clients."""
    placed_for: dict[str, int] = field(
        default_factory=lambda: {str(reason): 0 for reason in PlacementReason if reason is not PlacementReason.QUEUED}
    )
    """Direct requests by the reason that their clients named."""
    placements_refused: int = 0
    """Direct requests rejected because no slot became free for them, or because the slot belongs to the queue or to
    another client."""
    not_serving: int = 0
    """Requests received while this worker could not publish. The queue or the client sends them to another worker."""
    poison: int = 0
    """Requests that the queue delivered too often."""
    kv_unused: int = 0
    """Decode phases whose KV came from other weights or an unknown connector. The engine computes this KV again."""


class RequestIntake:
    """Checks and accepts requests one by one while the engine has free slots.

    A follower is a request that follows another request of its group to its worker. The worker offers it to its client
    at once. The follower then waits until the engine has a free slot.

    Args:
        execute: executes instructions and wakes the publisher.
        puller: pulls requests of the queue for this intake. It is woken when no request waits here.
    """

    def __init__(
        self,
        config: WorkerConfig,
        lifecycle: WorkerLifecycle,
        links: WorkerLinks,
        engine: EngineRunner,
        execute: Callable[[Instructions], None],
        puller: QueuePuller,
    ) -> None:
        self._subjects = Subjects(config.fleet)
        self._max_held_bytes = config.max_held_bytes
        self._lifecycle = lifecycle
        self._links = links
        self._engine = engine
        self._execute = execute
        self._puller = puller
        puller.on_given_back = lambda message: links.note_returned([message])
        self.stats = IntakeStats()
        self._rejected = RejectionCount()
        # The engine names of the offered followers that are not in the engine yet.
        self._turns: SlotTurns[str] = SlotTurns()
        self._incoming: deque[IncomingRequest] = deque()
        self.num_waiting = 0
        """Number of received requests that are not accepted yet, without followers."""
        # The same number of followers.
        self._num_coming = 0
        self._has_incoming = asyncio.Event()
        # The free slots at the last check, or after the last request that took one.
        self._num_free = 0
        self._is_stopping = False

    def room(self) -> int:
        """Return how many more requests would start immediately: free slots minus waiting followers."""
        free = self._free()
        return free if free <= 0 else max(free - self._num_coming - len(self._turns), 0)

    def _free(self) -> int:
        """Return the number of free slots. A negative number is the number of requests that must wait.

        At most 0 while this worker accepts no requests, stops, or holds too many unacknowledged bytes.
        """
        free = self._engine.num_free - self.num_waiting
        if free <= 0:
            return free
        is_closed = self._is_stopping or not self._lifecycle.may_accept()
        return 0 if is_closed or self._links.outbound.held_bytes > self._max_held_bytes else free

    def queue_room(self) -> int:
        """Return how many more requests to pull. A prefill worker pulls none: clients send its requests directly."""
        free = self._free()
        if free <= 0 or self._is_prefill:
            return min(free, 0)
        free = max(free - self._num_coming, 0)
        num_due = self._turns.num_due(self._puller.lanes_waiting(), free) if self._turns else 0
        if num_due:
            # The followers left slots to the queue, but the last pull returned no request.
            self._has_incoming.set()
        # Followers arrive with pulled requests: more of these would wait here while other workers have free slots.
        return math.ceil((free - num_due) / (1 + self._turns.mean_followers))

    @property
    def _is_prefill(self) -> bool:
        capabilities = self._engine.capabilities
        return capabilities is not None and capabilities.role == "prefill"

    @property
    def num_following(self) -> int:
        """Number of offered followers that wait for a slot."""
        return len(self._turns)

    @property
    def messages(self) -> list[QueuedRequest]:
        """Queue messages of the waiting requests."""
        return [incoming.message for incoming in self._incoming if incoming.message is not None]

    def accept(self, message: QueuedRequest) -> None:
        """Accept a request from the queue, or return it for another worker."""
        self.stats.taken += 1
        if not self._is_stopping and len(self._incoming) < MAX_ARRIVALS:
            # `_admit` returns it if this worker accepts no requests now.
            if (incoming := self._decode(message.client, message.data, message)) is not None:
                self._add(incoming)
        elif self._lifecycle.may_publish():
            self._nak([message])
        else:
            self.stats.not_serving += 1

    def accept_direct(self, client: str, data: bytes) -> None:
        """Accept each sample of a placed request separately. Reject samples that get no slot and may not wait."""
        self.stats.taken += 1
        if not self._lifecycle.may_publish() or len(self._incoming) >= MAX_ARRIVALS:
            # This worker does not answer, so the client puts the request into the queue.
            self.stats.not_serving += 1
        elif (incoming := self._decode(client, data)) is not None:
            for begins, samples in self._admit_placed(incoming).items():
                if begins is None:
                    self._refuse(incoming.with_samples(samples), "this worker has no free slot for a placed request")
                elif samples:
                    self._add(incoming.with_samples(samples, None if begins == "now" else begins))
                    self._puller.take_room(len(samples))

    def _decode(self, client: str, data: bytes, message: QueuedRequest | None = None) -> IncomingRequest | None:
        """Decode a message. If there is no client to answer, remove it from the queue and return None."""
        try:
            return IncomingRequest.decode(client, data, message)
        except RemoteProtocolError as exc:
            self._drop_bad(client, message, exc)
            return None

    def _drop_bad(self, client: str, message: QueuedRequest | None, error: RemoteProtocolError) -> None:
        self.stats.bad += 1
        self._rejected.warn(logger, "request.rejected client=%s so_far=%s error=%s", client, error)
        self._execute(Instructions.acking(message))

    def _admit_placed(self, incoming: IncomingRequest) -> Mapping[Turn | Literal["now"] | None, list[Sibling]]:
        """Return the samples of a direct message by the time of their start. The key None has the rejected samples."""
        waiting = () if self._is_prefill else self._puller.lanes_waiting()
        envelope, now = incoming.envelope, time.monotonic()
        may_wait = envelope.may_wait and envelope.kv is None and self._lifecycle.may_accept() and not self._is_stopping
        group, is_session = incoming.group() if may_wait else (None, False)
        request = SlotRequest(incoming.client, lane_of(priority_of(envelope.request)), group)
        room, capabilities = self.room(), self._engine.capabilities
        slots = 0 if capabilities is None else capabilities.max_num_seqs
        most = max(slots, MAX_FOLLOWERS)
        capacity = most - self._num_coming - len(self._turns)
        found: defaultdict[Turn | Literal["now"] | None, list[Sibling]] = defaultdict(list)
        for sample in incoming.samples:
            num_free, left = room - len(found["now"]), capacity - len(found["queued"]) - len(found["placed"])
            begins = self._turns.admit(request, waiting, num_free=num_free, capacity=left, now=now)
            if begins is None and is_session:
                # The other half of the places is for followers of groups.
                begins = self._turns.keep(request, waiting, capacity=left - most // 2, now=now)
            found[begins].append(sample)
        return found

    def _refuse(self, incoming: IncomingRequest, reason: str) -> None:
        """Reject the samples of a direct message as `queue_full`: their client puts them into the queue."""
        request_id = request_id_of(incoming.envelope.request)
        if request_id is None:
            self._drop_bad(incoming.client, None, RemoteProtocolError("the request has no usable request_id"))
            return
        error = RequestRejected(code=ErrorCode.QUEUE_FULL, message=reason)
        for origin in incoming.origins(request_id):
            if not self._is_settled(origin):
                self.stats.placements_refused += 1
                self._links.reject(origin, error, time.monotonic())
        self._execute(Instructions())

    def _add(self, incoming: IncomingRequest) -> None:
        self._incoming.append(incoming)
        self._count(incoming, 1)
        self._has_incoming.set()

    def _count(self, incoming: IncomingRequest, sign: Literal[1, -1]) -> None:
        """Count the samples of a message that arrived (1) or leaves (-1)."""
        if incoming.turn is None:
            self.num_waiting += sign * len(incoming.samples)
        else:
            self._num_coming += sign * len(incoming.samples)

    def _clear_incoming(self) -> None:
        self._incoming.clear()
        self.num_waiting = self._num_coming = 0

    def _nak(self, messages: list[QueuedRequest]) -> None:
        """Nak requests, so that the queue delivers them to other workers."""
        if not messages:
            return
        self.stats.returned += len(messages)
        self._links.note_returned(messages)
        # Without a delay, workers that pause together would hand requests to each other in a loop.
        delay_s = 0.0 if self._is_stopping else NAK_DELAY_S
        self._execute(Instructions(nak=[(message, delay_s) for message in messages]))

    def nak_incoming(self) -> None:
        """Return requests that have not entered the engine to the queue, and reject direct requests."""
        messages, placed = self.messages, [incoming for incoming in self._incoming if incoming.message is None]
        self._clear_incoming()
        self._nak(messages)
        if not self._lifecycle.may_publish():
            self.stats.not_serving += len(placed)
            return
        for incoming in placed:
            self._refuse(incoming, "this worker accepts no requests now")
        self._refuse_followers(self._turns.pop_all(), "this worker accepts no requests now")

    def refuse_stalled(self) -> None:
        """Reject followers that waited for `STALLED_S` while no follower of their lane got a slot."""
        reason = f"no follower of this lane got a slot on this worker for {STALLED_S:g} s"
        self._refuse_followers(self._turns.pop_stalled(time.monotonic()), reason)

    def _refuse_followers(self, names: list[str], reason: str) -> None:
        """Reject offered followers. Their clients put them into the queue."""
        if names:
            self.stats.placements_refused += len(names)
            self._links.refuse(names, RequestRejected(code=ErrorCode.QUEUE_FULL, message=reason))
            self._execute(Instructions())

    def abort(self, names: Sequence[str]) -> None:
        """Abort requests by their engine names, in the engine or before it."""
        self._turns.remove(names)
        self._engine.abort(names)

    def check_slots(self) -> None:
        """Wake the intake if the number of free slots has changed: waiting followers or the queue may get them."""
        num_free = self._engine.num_free
        if num_free != self._num_free:
            self._num_free = num_free
            if self._turns:
                self._has_incoming.set()
            self._puller.wake()

    def stop(self) -> None:
        """Stop for good: accept no more requests, and return those that have not entered the engine."""
        self._is_stopping = True
        self.nak_incoming()

    def clear(self) -> None:
        """Remove the waiting requests. This worker has lost its lease, so other workers may have them."""
        self.stats.not_serving += len(self._incoming)
        self._clear_incoming()
        self._turns.pop_all()

    async def run(self) -> None:
        """Check requests and submit them to the engine, until cancelled."""
        while True:
            await self._has_incoming.wait()
            self._has_incoming.clear()
            num_admitted = 0
            while self._incoming:
                incoming = self._incoming.popleft()
                self._count(incoming, -1)
                await self._admit(incoming)
                num_admitted += len(incoming.samples)
                if num_admitted >= ADMIT_AT_ONCE:
                    num_admitted = 0
                    await asyncio.sleep(0)
            await self._start_followers()
            self._puller.wake()

    async def _start_followers(self) -> None:
        """Submit waiting followers while there are free slots."""
        while self._turns and (free := self._free()) > 0:
            name = self._turns.pop(self._puller.lanes_waiting(), free, time.monotonic())
            follower = None if name is None else self._links.requests.open(name)
            if follower is None or follower.waiting is None:
                return
            request, follower.waiting = follower.waiting, None
            self._engine.reserve([follower.name])
            self._links.offer_again([follower.name])
            self._execute(Instructions())
            await self._submit(follower.name, request, None)

    async def _admit(self, incoming: IncomingRequest) -> None:
        capabilities, message = self._engine.capabilities, incoming.message
        may_accept = self._lifecycle.may_accept()
        if capabilities is None or not (may_accept or self._lifecycle.may_publish()):
            self.stats.not_serving += 1
            return
        if message is not None and not may_accept:
            self._nak([message])
            return
        try:
            given, request_id = incoming.decode_request(self._links.versions, self._subjects)
        except RemoteProtocolError as exc:
            self._drop_bad(incoming.client, message, exc)
            return
        origins = incoming.origins(request_id)
        samples = [
            (one, origin) for one, origin in zip(incoming.samples, origins, strict=True) if not self._is_settled(origin)
        ]
        if not samples:
            return
        if message is not None and isinstance(given, GenerateRequest):
            wait_s = wait_for_weights_s(given, self._links.versions, message.num_delivered)
            if wait_s > 0:
                self.stats.too_new += 1
                self._links.note_returned([message])
                self._execute(Instructions(nak=[(message, wait_s)]))
                return
        try:
            request = self._check(incoming, given, capabilities)
            check_phase(request, incoming.envelope.kv, capabilities)
        except RequestError as exc:
            for _, origin in samples:
                self._links.reject(origin, exc, time.monotonic())
            self._execute(Instructions())
            return
        await self._offer(incoming, samples, request, capabilities)

    def _is_settled(self, origin: RequestOrigin) -> bool:
        """Return True if the request needs no admission: its client is dead, or this worker already has the request."""
        if self._links.is_client_dead(origin):
            self.stats.gone += 1
            self._execute(Instructions.acking(origin.message))
            return True
        instructions = self._links.add_redelivery(origin)
        if instructions is not None:
            self._execute(instructions)
        return instructions is not None

    async def _offer(
        self,
        incoming: IncomingRequest,
        samples: list[tuple[Sibling, RequestOrigin]],
        request: GenerateRequest,
        capabilities: Capabilities,
    ) -> None:
        """Offer the samples of a message to their client, then submit them to the engine."""
        kv, now = incoming.envelope.kv, time.monotonic()
        if kv is not None and not can_use(kv, request, capabilities, self._links.versions):
            self.stats.kv_unused += 1
            kv = None
        offered: dict[str, GenerateRequest] = {}
        for sample, origin in samples:
            one = incoming.request_of(sample, request)
            name = self._links.offer(origin, one, capabilities, now, kv=kv, gathers=not incoming.envelope.stream)
            offered[name] = one
        message = incoming.message
        if message is None:
            self.stats.placed += len(offered)
            # An unknown reason, from a later release, only counts in the total.
            if incoming.envelope.placed_for in self.stats.placed_for:
                self.stats.placed_for[incoming.envelope.placed_for] += len(offered)
        else:
            led = SlotRequest(incoming.client, message.lane, request.group_id or request.request_id)
            self._turns.count_queued(led, self._puller.lanes_waiting(), now, num_behind=message.num_pending)
        if incoming.turn is not None:
            for name, one in offered.items():
                if (follower := self._links.requests.open(name)) is not None:
                    follower.waiting = one
                    self._turns.add(name, SlotRequest(incoming.client, lane_of(one.priority)), incoming.turn, now)
            return
        # Reserve all names before the first submission: an abort must find each of them.
        self._engine.reserve(offered)
        # The end of these requests must count as a change, also if it is the next one.
        self._num_free = self._engine.num_free
        self._links.offer_again(offered if incoming.envelope.may_wait else ())
        for name, one in offered.items():
            await self._submit(name, one, kv)

    def _check(
        self, incoming: IncomingRequest, request: GenerateRequest | RequestError, capabilities: Capabilities
    ) -> GenerateRequest:
        """Return the request if the worker may offer and submit it.

        Raises:
            RequestError: the request is rejected.
        """
        incoming.check_queued()
        if incoming.is_poison(request):
            self.stats.poison += 1
            raise RequestError(
                code=ErrorCode.POISON_REQUEST,
                message=f"the queue delivered this request {MAX_DELIVERIES} times, "
                "and the client acknowledged none of the offers",
            )
        if isinstance(request, RequestError):
            raise request
        check_request(request, capabilities, self._links.versions)
        check_row_size(request, capabilities, self._links.outbound.max_part_bytes)
        check_mask_size(request, capabilities, self._links.outbound.segment_bytes)
        return request

    async def _submit(self, name: str, request: GenerateRequest, kv: KvTransfer | None) -> None:
        """Submit an offered request to the engine."""
        logger.debug("request.admitted name=%s traceparent=%s", name, request.traceparent)
        if (offered := self._links.requests.open(name)) is not None:
            offered.timeline.add("started")
        try:
            await self._engine.add(name, request, kv)
            return
        except RequestError as exc:
            instructions = self._links.fail([name], not_for_kv(exc, kv))
        except EngineDead as exc:
            # The engine's task raises this error too. That task stops this worker and fails its requests.
            logger.warning("request.submit_failed name=%s error=%s", name, exc)
            return
        except Exception as exc:
            # Boundary of one request: any other error of an engine fails only this request.
            logger.exception("request.failed name=%s", name)
            error = RequestError(code=ErrorCode.ENGINE_ERROR, message=f"{type(exc).__name__}: {exc}")
            instructions = self._links.fail([name], error)
        self._execute(instructions)
