"""The incoming requests of a worker: those from the queue, and direct ones that clients send for a session."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...bus.queue.puller import NAK_DELAY_S, QueuedRequest
from ...bus.subjects import Subjects
from ...schemas.errors import EngineDead, ErrorCode, RemoteProtocolError, RequestError, RequestRejected
from ...schemas.limits import MAX_DELIVERIES
from ...schemas.messages import (
    KvTransfer,
    RequestKey,
    RequestMessage,
    decode_request,
    decode_request_message,
    request_id_of,
)
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from ..config import WorkerConfig
from ..engines.engine_runner import EngineRunner
from ..lifecycle.lifecycle import WorkerLifecycle
from .admission import (
    can_use,
    check_lag,
    check_mask_size,
    check_phase,
    check_reply_to,
    check_request,
    check_row_size,
    wait_for_weights_s,
)
from .links import WorkerLinks
from .worker_requests import Instructions, RequestOrigin

__all__ = ["IntakeStats", "RequestIntake"]

logger = logging.getLogger(__name__)

MAX_ARRIVALS = 4096
"""Requests that wait to enter the engine: about as many as it has free slots. Above it they go back to the queue."""
ADMIT_AT_ONCE = 16
"""Requests of a burst that are admitted, for some milliseconds, before the engine's steps may be published."""
MAX_INDEX = 2**31 - 1
"""The largest attempt number of the wire."""


@dataclass(slots=True)
class IntakeStats:
    """Counters since the worker was started."""

    taken: int = 0
    """Requests received."""
    bad: int = 0
    """Without a usable client or request id to answer."""
    gone: int = 0
    """Of clients that are dead."""
    returned: int = 0
    """Returned to the queue, because this worker accepts none now or too many wait."""
    too_new: int = 0
    """Returned to the queue, for workers with later weights, or with an adapter that this one lacks."""
    refused: int = 0
    """Direct ones for which there was no free slot."""
    not_serving: int = 0
    """Received while this worker could not publish: the queue, or the client, gives them to another worker."""
    poison: int = 0
    """Delivered too often."""
    kv_unused: int = 0
    """Decode phases with KV of other weights, or of a connector that the engine lacks: it is computed again."""


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """One request that was received and not accepted yet."""

    client: str
    """As the subject says."""
    data: bytes
    message: QueuedRequest | None = None
    """Of the queue; None for a direct request."""
    is_refused: bool = False
    """There was no free slot for it."""


class RequestIntake:
    """Checks and accepts requests one after another, as far as the engine has free slots.

    Args:
        execute: executes instructions, and has sent what there is to send.
        on_free_slots: called when no request waits here: there may be room for more.
    """

    def __init__(
        self,
        config: WorkerConfig,
        lifecycle: WorkerLifecycle,
        links: WorkerLinks,
        engine: EngineRunner,
        execute: Callable[[Instructions], None],
        on_free_slots: Callable[[], None],
    ) -> None:
        self._subjects = Subjects(config.fleet)
        self._max_held_bytes = config.max_held_bytes
        self._lifecycle = lifecycle
        self._links = links
        self._engine = engine
        self._execute = execute
        self._on_free_slots = on_free_slots
        self._incoming: deque[IncomingRequest] = deque()
        self._has_incoming = asyncio.Event()
        self._is_stopping = False
        self.stats = IntakeStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<RequestIntake waiting={len(self._incoming)} room={self.room()} {self.stats}>"

    def room(self) -> int:
        """Return how many more requests would start at once; below 0, by the number of those that must wait.

        At most 0 while this worker accepts none, stops, or holds too much that clients have not acknowledged.
        """
        free = self._engine.num_free - len(self._incoming)
        if free <= 0:
            return free
        is_closed = self._is_stopping or not self._lifecycle.may_accept()
        return 0 if is_closed or self._links.outbound.held_bytes > self._max_held_bytes else free

    def queue_room(self) -> int:
        """Return how many more requests to pull; a prefill worker pulls none, as clients send them directly."""
        capabilities = self._engine.capabilities
        is_prefill = capabilities is not None and capabilities.role == "prefill"
        return min(self.room(), 0) if is_prefill else self.room()

    @property
    def num_waiting(self) -> int:
        """Number of requests that were received and not accepted yet."""
        return len(self._incoming)

    @property
    def messages(self) -> list[QueuedRequest]:
        """Queue messages of the requests that wait here."""
        return [incoming.message for incoming in self._incoming if incoming.message is not None]

    def accept(self, message: QueuedRequest) -> None:
        """Accept a request from the queue; if that is not possible, another worker gets it."""
        self.stats.taken += 1
        if not self._lifecycle.may_publish():
            self.stats.not_serving += 1
        elif self._is_stopping or len(self._incoming) >= MAX_ARRIVALS or not self._lifecycle.may_accept():
            self._nak([message])
        else:
            self._add(IncomingRequest(message.client, message.data, message))

    def accept_direct(self, client: str, data: bytes) -> None:
        """Accept a direct request; without a free slot, or while none is accepted, it is refused."""
        self.stats.taken += 1
        if not self._lifecycle.may_publish() or len(self._incoming) >= MAX_ARRIVALS:
            # Unanswered, the client puts it into the queue.
            self.stats.not_serving += 1
            return
        self._add(IncomingRequest(client, data, is_refused=self.room() <= 0))

    def _add(self, incoming: IncomingRequest) -> None:
        self._incoming.append(incoming)
        self._has_incoming.set()

    def _nak(self, messages: list[QueuedRequest]) -> None:
        """Return requests to the queue."""
        self.stats.returned += len(messages)
        # Without a delay, workers that all pause at once would pass requests round.
        delay_s = 0.0 if self._is_stopping else NAK_DELAY_S
        self._execute(Instructions(nak=[(message, delay_s) for message in messages]))

    def nak_incoming(self) -> None:
        """Return what has not entered the engine to the queue, and refuse direct requests."""
        messages = self.messages
        self._incoming = deque(replace(item, is_refused=True) for item in self._incoming if item.message is None)
        self._nak(messages)

    def stop(self) -> None:
        """Accept nothing more, for good, and return what has not entered the engine."""
        self._is_stopping = True
        self.nak_incoming()

    def clear(self) -> None:
        """Remove what waits: this worker has lost its lease, and other workers may have it already."""
        self.stats.not_serving += len(self._incoming)
        self._incoming.clear()

    async def run(self) -> None:
        """Check requests and submit them to the engine, until cancelled."""
        while True:
            await self._has_incoming.wait()
            self._has_incoming.clear()
            num_admitted = 0
            while self._incoming:
                await self._admit(self._incoming.popleft())
                num_admitted += 1
                if num_admitted % ADMIT_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._on_free_slots()

    async def _admit(self, incoming: IncomingRequest) -> None:
        capabilities = self._engine.capabilities
        if capabilities is None or not self._lifecycle.may_publish():
            self.stats.not_serving += 1
            return
        if incoming.message is not None and not self._lifecycle.may_accept():
            self._nak([incoming.message])
            return
        try:
            origin, given, envelope = self._decode(incoming)
            kv = envelope.kv
        except RemoteProtocolError as exc:
            self.stats.bad += 1
            logger.warning("request.bad client=%s error=%s", incoming.client, exc)
            self._execute(_ack(incoming.message))
            return
        if self._links.is_client_dead(origin):
            self.stats.gone += 1
            self._execute(_ack(incoming.message))
            return
        instructions = self._links.add_redelivery(origin)
        if instructions is not None:
            self._execute(instructions)
            return
        if incoming.message is not None and not incoming.is_refused and isinstance(given, GenerateRequest):
            wait_s = wait_for_weights_s(given, self._links.versions, incoming.message.num_delivered)
            if wait_s > 0:
                self.stats.too_new += 1
                self._execute(Instructions(nak=[(incoming.message, wait_s)]))
                return
        now = time.monotonic()
        try:
            request = self._check(incoming, given, capabilities)
            check_phase(request, kv, capabilities)
        except RequestError as exc:
            self._links.reject(origin, exc, now)
            self._execute(Instructions())
            return
        if kv is not None and not can_use(kv, request, capabilities, self._links.versions):
            self.stats.kv_unused += 1
            kv = None
        name = self._links.offer(origin, request, capabilities, now, kv=kv, gathers=not envelope.stream)
        self._execute(Instructions())
        await self._submit(name, request, kv)

    def _decode(
        self, incoming: IncomingRequest
    ) -> tuple[RequestOrigin, GenerateRequest | RequestError, RequestMessage]:
        """Decode origin, request and envelope; an error in place of an invalid request.

        Raises:
            RemoteProtocolError: the message names no request or client to answer.
        """
        envelope = decode_request_message(incoming.data)
        if envelope.client != incoming.client:
            raise RemoteProtocolError(f"client {incoming.client} signed as {envelope.client}")
        attempt = envelope.attempt
        if envelope.reply_to is not None:
            if incoming.message is None:
                raise RemoteProtocolError("a direct request with reply_to")
            check_reply_to(envelope.reply_to, self._subjects.plain(incoming.client))
            attempt = min(attempt + incoming.message.num_delivered - 1, MAX_INDEX)
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
        origin = RequestOrigin(incoming.client, envelope.incarnation, key, incoming.message, envelope.reply_to)
        return origin, request, envelope

    def _check(
        self, incoming: IncomingRequest, request: GenerateRequest | RequestError, capabilities: Capabilities
    ) -> GenerateRequest:
        """Return the request if it may be offered and submitted.

        Raises:
            RequestError: it is refused.
        """
        if incoming.is_refused:
            self.stats.refused += 1
            raise RequestRejected(code=ErrorCode.QUEUE_FULL, message="this worker has no free slot")
        if _is_poison(incoming.message, request):
            self.stats.poison += 1
            raise RequestError(
                code=ErrorCode.POISON_REQUEST,
                message=f"{MAX_DELIVERIES} workers were given it, and no client confirmed what one of them said",
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
        instructions = Instructions()
        try:
            await self._engine.add(name, request, kv)
        except RequestError as exc:
            instructions = self._links.fail([name], _not_for_kv(exc, kv))
        except EngineDead as exc:
            # The engine's own task sees this error too, stops this worker and fails its requests.
            logger.warning("request.not_submitted name=%s error=%s", name, exc)
        except Exception as exc:
            # Boundary of one request: any other error of an engine fails this request, and the others go on.
            logger.exception("request.failed name=%s", name)
            error = RequestError(code=ErrorCode.ENGINE_ERROR, message=f"{type(exc).__name__}: {exc}")
            instructions = self._links.fail([name], error)
        self._execute(instructions)


def _is_poison(message: QueuedRequest | None, request: GenerateRequest | RequestError) -> bool:
    """Return True if it was delivered too often; waits for weights or an adapter may take any number of deliveries."""
    if message is None or message.num_delivered <= MAX_DELIVERIES:
        return False
    # An invalid request never reaches an engine, however often it is delivered.
    return isinstance(request, GenerateRequest) and request.min_weight_version is None and request.lora is None


def _not_for_kv(error: RequestError, kv: KvTransfer | None) -> RequestError:
    """Return why an engine refused a request; if KV came with it, a retry without KV can succeed."""
    if kv is None or kv.is_prefill:
        return error
    return RequestError(
        code=ErrorCode.KV_TRANSFER_FAILED, message=f"the engine refused it with its KV: {error.message}"
    )


def _ack(message: QueuedRequest | None) -> Instructions:
    """Return the instruction to remove a message that no client waits for from the queue."""
    return Instructions(ack=[] if message is None else [message])
