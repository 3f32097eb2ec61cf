"""What comes into a worker: requests from the queue, and those that clients hand over directly for a session."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from bus.queue.puller import GIVE_BACK_S, QueuedRequest
from bus.subjects import Subjects
from schemas.errors import EngineDead, ErrorCode, RemoteProtocolError, RequestError, RequestRejected
from schemas.limits import MAX_DELIVERIES
from schemas.messages import (
    KvHandover,
    RequestKey,
    RequestMessage,
    decode_request,
    decode_request_message,
    request_id_of,
)
from schemas.presence import Capabilities
from schemas.request import GenerateRequest
from workers.admission import (
    can_use,
    check_lag,
    check_leg,
    check_reply_to,
    check_request,
    check_row_size,
    wait_for_weights_s,
)
from workers.config import WorkerConfig
from workers.engine_runner import EngineRunner
from workers.held import Instructions, Origin
from workers.life import Life
from workers.links import Links

__all__ = ["Intake", "IntakeStats"]

logger = logging.getLogger(__name__)

MAX_ARRIVALS = 4096
"""Requests that wait for their turn to enter the engine. No more come than it has free slots, and a few; of an engine
with more slots than this, the others go back to the queue until there is room."""
ADMIT_AT_ONCE = 16
"""Requests of a burst that are admitted, some milliseconds long, before what the engine has made may go on its way."""
MAX_INDEX = 2**31 - 1
"""The largest attempt number of the wire."""


@dataclass(slots=True)
class IntakeStats:
    """Counters since the worker was started."""

    taken: int = 0
    """Requests that came."""
    bad: int = 0
    """Of whom nobody knows who asked, or what to call it in an answer."""
    gone: int = 0
    """Of clients that are dead."""
    returned: int = 0
    """Given back to the queue, as this worker takes none now or more came than may wait."""
    too_new: int = 0
    """Given back to the queue, for workers with later weights, or with an adapter that this one lacks."""
    refused: int = 0
    """Direct ones for which there was no free slot."""
    not_serving: int = 0
    """Came or waited here while this worker could not speak: the queue, or the client, gives them to another."""
    poison: int = 0
    """Delivered too often."""
    kv_unused: int = 0
    """Decode legs whose KV is of other weights, or of a connector that the engine has not: it is computed anew."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as it came."""

    client: str
    """As the subject says."""
    data: bytes
    message: QueuedRequest | None = None
    """Of the queue; None for a direct request."""
    is_refused: bool = False
    """There was no free slot for it."""


class Intake:
    """Takes requests in one after another, as far as the engine has free slots.

    Args:
        carry_out: does what an event calls for, and has sent what there is to send.
        on_room: called when all that came is in the engine or was answered: there may be room for more.
    """

    def __init__(
        self,
        config: WorkerConfig,
        life: Life,
        links: Links,
        engine: EngineRunner,
        carry_out: Callable[[Instructions], None],
        on_room: Callable[[], None],
    ) -> None:
        self._subjects = Subjects(config.fleet)
        self._max_held_bytes = config.max_held_bytes
        self._life = life
        self._links = links
        self._engine = engine
        self._carry_out = carry_out
        self._on_room = on_room
        self._arrivals: deque[Arrival] = deque()
        self._arrived = asyncio.Event()
        self._is_stopping = False
        self.stats = IntakeStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Intake waiting={len(self._arrivals)} room={self.room()} {self.stats}>"

    def room(self) -> int:
        """How many more requests would start at once; below 0 by those that came beyond that.

        Not above 0 while this worker takes none, stops, or holds too much that clients have not taken.
        """
        free = self._engine.num_free - len(self._arrivals)
        if free <= 0:
            return free
        is_closed = self._is_stopping or not self._life.may_take()
        return 0 if is_closed or self._links.routes.held_bytes > self._max_held_bytes else free

    def queue_room(self) -> int:
        """How many more requests to take from the queue; a prefill worker takes none, as clients hand them over."""
        capabilities = self._engine.capabilities
        is_prefill = capabilities is not None and capabilities.role == "prefill"
        return min(self.room(), 0) if is_prefill else self.room()

    @property
    def num_waiting(self) -> int:
        """Requests that have come and not entered the engine."""
        return len(self._arrivals)

    @property
    def messages(self) -> list[QueuedRequest]:
        """Of requests from the queue that wait here."""
        return [arrival.message for arrival in self._arrivals if arrival.message is not None]

    def take(self, message: QueuedRequest) -> None:
        """Take a request from the queue; where that is not possible another worker gets it."""
        self.stats.taken += 1
        if not self._life.may_speak():
            self.stats.not_serving += 1
        elif self._is_stopping or len(self._arrivals) >= MAX_ARRIVALS or not self._life.may_take():
            self._return([message])
        else:
            self._arrive(Arrival(message.client, message.data, message))

    def take_direct(self, client: str, data: bytes) -> None:
        """Take a request that a client hands over by itself; without a free slot, or while none is taken, refuse it."""
        self.stats.taken += 1
        if not self._life.may_speak() or len(self._arrivals) >= MAX_ARRIVALS:
            # Unanswered, the client puts it into the queue.
            self.stats.not_serving += 1
            return
        self._arrive(Arrival(client, data, is_refused=self.room() <= 0))

    def _arrive(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._arrived.set()

    def _return(self, messages: list[QueuedRequest]) -> None:
        """Give requests back to the queue."""
        self.stats.returned += len(messages)
        # A worker that stops is one; where all pause at once, they would otherwise pass requests round.
        delay_s = 0.0 if self._is_stopping else GIVE_BACK_S
        self._carry_out(Instructions(nak=[(message, delay_s) for message in messages]))

    def give_back(self) -> None:
        """Give back to the queue what has not entered the engine, and refuse what was handed over."""
        messages = self.messages
        self._arrivals = deque(replace(item, is_refused=True) for item in self._arrivals if item.message is None)
        self._return(messages)

    def stop(self) -> None:
        """Take nothing more, for good, and give back what has not entered the engine."""
        self._is_stopping = True
        self.give_back()

    def drop(self) -> None:
        """Forget what waits: this worker has lost its lease, and others may have it already."""
        self.stats.not_serving += len(self._arrivals)
        self._arrivals.clear()

    async def run(self) -> None:
        """Hand requests to the engine, until cancelled."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            num_admitted = 0
            while self._arrivals:
                await self._admit(self._arrivals.popleft())
                num_admitted += 1
                if num_admitted % ADMIT_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._on_room()

    async def _admit(self, arrival: Arrival) -> None:
        capabilities = self._engine.capabilities
        if capabilities is None or not self._life.may_speak():
            self.stats.not_serving += 1
            return
        if arrival.message is not None and not self._life.may_take():
            self._return([arrival.message])
            return
        try:
            origin, given, envelope = self._read(arrival)
            kv = envelope.kv
        except RemoteProtocolError as exc:
            self.stats.bad += 1
            logger.warning("request.bad client=%s error=%s", arrival.client, exc)
            self._carry_out(_ack(arrival.message))
            return
        if self._links.is_gone(origin):
            self.stats.gone += 1
            self._carry_out(_ack(arrival.message))
            return
        todo = self._links.repeated(origin)
        if todo is not None:
            self._carry_out(todo)
            return
        if arrival.message is not None and not arrival.is_refused and isinstance(given, GenerateRequest):
            wait_s = wait_for_weights_s(given, self._links.versions, arrival.message.num_delivered)
            if wait_s > 0:
                self.stats.too_new += 1
                self._carry_out(Instructions(nak=[(arrival.message, wait_s)]))
                return
        now = time.monotonic()
        try:
            request = self._checked(arrival, given, capabilities)
            check_leg(request, kv, capabilities)
        except RequestError as exc:
            self._links.reject(origin, exc, now)
            self._carry_out(Instructions())
            return
        if kv is not None and not can_use(kv, request, capabilities, self._links.versions):
            self.stats.kv_unused += 1
            kv = None
        name = self._links.offer(origin, request, capabilities, now, kv=kv, gathers=not envelope.stream)
        self._carry_out(Instructions())
        await self._submit(name, request, kv)

    def _read(self, arrival: Arrival) -> tuple[Origin, GenerateRequest | RequestError, RequestMessage]:
        """Who asks for what, and what came with it; an error in place of a request that is wrong.

        Raises:
            RemoteProtocolError: there is nobody to be told what is wrong.
        """
        envelope = decode_request_message(arrival.data)
        if envelope.client != arrival.client:
            raise RemoteProtocolError(f"client {arrival.client} signed as {envelope.client}")
        attempt = envelope.attempt
        if envelope.reply_to is not None:
            if arrival.message is None:
                raise RemoteProtocolError("a direct request with reply_to")
            check_reply_to(envelope.reply_to, self._subjects.plain(arrival.client))
            attempt = min(attempt + arrival.message.num_delivered - 1, MAX_INDEX)
        request: GenerateRequest | RequestError
        try:
            request = decode_request(envelope.request)
            request_id: str | None = request.request_id
            versions, submitted_target = self._links.versions, envelope.target_version
            check_lag(request, attempt=envelope.attempt, submitted_target=submitted_target, versions=versions)
        except RequestError as exc:
            request, request_id = exc, request_id_of(envelope.request)
        except RemoteProtocolError as exc:
            request = RequestRejected(code=ErrorCode.INVALID_REQUEST, message=str(exc))
            request_id = request_id_of(envelope.request)
        if request_id is None:
            raise RemoteProtocolError(f"without a usable request_id: {request}")
        key = RequestKey(request_id, attempt, envelope.child)
        origin = Origin(arrival.client, envelope.incarnation, key, arrival.message, envelope.reply_to)
        return origin, request, envelope

    def _checked(
        self, arrival: Arrival, request: GenerateRequest | RequestError, capabilities: Capabilities
    ) -> GenerateRequest:
        """The request, which may be offered and submitted.

        Raises:
            RequestError: it is refused.
        """
        if arrival.is_refused:
            self.stats.refused += 1
            raise RequestRejected(code=ErrorCode.QUEUE_FULL, message="this worker has no free slot")
        if _is_poison(arrival.message, request):
            self.stats.poison += 1
            raise RequestError(
                code=ErrorCode.POISON_REQUEST,
                message=f"{MAX_DELIVERIES} workers were given it, and no client confirmed what one of them said",
            )
        if isinstance(request, RequestError):
            raise request
        check_request(request, capabilities, self._links.versions)
        check_row_size(request, capabilities, self._links.routes.max_part_bytes)
        return request

    async def _submit(self, name: str, request: GenerateRequest, kv: KvHandover | None) -> None:
        """Hand a request that was offered to the engine."""
        logger.debug("request.admitted name=%s traceparent=%s", name, request.traceparent)
        try:
            await self._engine.add(name, request, kv)
        except RequestError as exc:
            self._links.fail(name, _not_for_kv(exc, kv))
        except EngineDead as exc:
            # The engine's own task hears of it too and ends this worker; what is open fails there.
            logger.warning("request.not_submitted name=%s error=%s", name, exc)
        except Exception as exc:
            # The boundary of one request: whatever an engine trips over, the other requests go on.
            logger.exception("request.failed name=%s", name)
            self._links.fail(name, RequestError(code=ErrorCode.ENGINE_ERROR, message=f"{type(exc).__name__}: {exc}"))
        self._carry_out(Instructions())


def _is_poison(message: QueuedRequest | None, request: GenerateRequest | RequestError) -> bool:
    """Delivered too often, other than by waiting for weights or an adapter, which may take any number of deliveries."""
    if message is None or message.num_delivered <= MAX_DELIVERIES:
        return False
    # What is refused at once meets no engine, however often it comes.
    return isinstance(request, GenerateRequest) and request.min_weight_version is None and request.lora is None


def _not_for_kv(error: RequestError, kv: KvHandover | None) -> RequestError:
    """Why an engine refused a request; where KV came with it, it may take the request without."""
    if kv is None or kv.is_prefill:
        return error
    return RequestError(
        code=ErrorCode.KV_TRANSFER_FAILED, message=f"the engine refused it with its KV: {error.message}"
    )


def _ack(message: QueuedRequest | None) -> Instructions:
    """Take a message out of the queue that nobody waits for."""
    return Instructions(ack=[] if message is None else [message])
