"""The bus thread's end of a request: each sample's stream, and where its current attempt is.

A request of n samples is n requests to the fleet, its children; they end together when one of them fails.
"""

import asyncio
import enum
import time

from bus.client.calls import Call, Ending
from bus.client.generation import Sample
from bus.protocol.states import REQUEST, RequestEvent, RequestState
from bus.protocol.stream import Stream
from schemas.chunk import Chunk
from schemas.errors import ErrorCode, RequestError, RequestFailed
from schemas.messages import KvHandover, RequestKey, encode
from schemas.request import GenerateRequest, Lane, lane_of

__all__ = ["Child", "LiveCall", "Way"]


class LiveCall:
    """A call while it is open.

    Args:
        call: the caller's end.
        serial: no other call of this client has it.
        attempt: number of the first attempt: above 0 when what is left of an earlier call of the same id may turn up.
    """

    def __init__(self, call: Call, *, serial: int, attempt: int) -> None:
        self.call = call
        self.serial = serial
        self.request_id = call.request.request_id
        self.model = call.model
        self.first_attempt = attempt
        self.children = [
            Child(self, request, payload, index=index, attempt=attempt)
            for index, (request, payload) in enumerate(zip(call.children, call.payloads, strict=True))
        ]
        self.target_version: int | None = None
        """Of the weights that the model's workers were to have when it was submitted; None until that is known, and
        where nobody asks."""
        self.has_ended = False
        """All children have their terminal chunk, or the call has failed as a whole."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends the call at its deadline."""

    @property
    def lacks_target(self) -> bool:
        """It cannot be sent yet: nobody has said from where its `max_weight_lag` counts."""
        return self.target_version is None and self.call.request.max_weight_lag is not None

    @property
    def next_attempt(self) -> int:
        """A number that no attempt of any child has."""
        return max(child.stream.attempt for child in self.children) + 1

    def finish(self, error: RequestError | None = None) -> None:
        """Tell the caller that it is over; without effect the second time."""
        if self.has_ended:
            return
        self.has_ended = True
        if self.timer is not None:
            self.timer.cancel()
        self.call.finish(Ending([child.sample() for child in self.children], error))

    def forget(self) -> None:
        """Let go of the children, which have all ended.

        They name this call, and so would keep the result that it holds, however large, until the garbage collector
        looks at everything there is.
        """
        self.children.clear()

    def failure(self, code: ErrorCode, message: str) -> RequestFailed:
        """An error of this call."""
        return RequestFailed(code=code, message=message, request_id=self.request_id)


class Way(enum.Enum):
    """How the current attempt of a child is served."""

    OPEN = enum.auto()
    """Not decided yet."""
    ALONE = enum.auto()
    """By one worker."""
    PREFILL = enum.auto()
    """By two, and it is at the first of them, or on its way there."""
    DECODE = enum.auto()
    """By two, and the first has done its part."""


class Child:
    """One sample of a request: its stream, and where its current attempt is."""

    def __init__(self, live: LiveCall, request: GenerateRequest, payload: bytes, *, index: int, attempt: int) -> None:
        self.live = live
        self.index = index
        self.stream = Stream(request, child=index, attempt=attempt, keep=not live.call.streams)
        self.state = RequestState.PUBLISHING
        self.is_sent = False
        """The current attempt was handed to NATS."""
        self.direct_to: str | None = None
        """The worker that the current attempt was handed to, alone and not through the queue."""
        self.way = Way.OPEN
        """How the current attempt is served."""
        self.prefill_worker: str | None = None
        """Who is to serve the prefill leg; None unless it is one."""
        self.prefill_until: float | None = None
        """How long the current attempt may wait for a prefill worker, however many refuse it; None: it never did."""
        self.has_failed_handover = False
        """The KV of an earlier attempt did not get across."""
        self.worker: str | None = None
        """Who admitted the current attempt; None before."""
        self.incarnation: str | None = None
        """Which life of that worker."""
        self.workers: list[str] = []
        """Who admitted its attempts, in order."""
        self.last_error: RequestError | None = None
        """Why the attempt before this one was given up; None for the first."""
        self.engine_deaths = 0
        """Attempts that ended with the death of their engine."""
        self.seq: int | None = None
        """Of the current attempt in its queue; None until that has confirmed it, and for a direct try."""
        self.since = time.monotonic()
        """When it entered its state, or when it was last seen in the queue."""
        self.wanted_since: float | None = None
        """When it was first handed to NATS after a worker last had it; None while one has it, and before."""
        self._request = request
        self._payload: bytes | None = payload

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Child {self.live.request_id}/{self.stream.attempt}/{self.index} {self.state} worker={self.worker}>"

    @property
    def key(self) -> RequestKey:
        """Of the current attempt, on the wire."""
        return RequestKey(self.live.request_id, self.stream.attempt, self.index)

    @property
    def token(self) -> str:
        """Of the current attempt: no other of this client has it, in whichever call."""
        return f"{self.live.serial}.{self.stream.attempt}.{self.index}"

    @property
    def is_open(self) -> bool:
        """More is to come."""
        return self.state is not RequestState.ENDED

    @property
    def is_first_attempt(self) -> bool:
        """No worker and no queue has had it yet."""
        return not self.stream.has_begun

    @property
    def lane(self) -> Lane:
        """The lane of the current attempt."""
        return lane_of(self.live.call.request.priority) if self.is_first_attempt else "resume"

    @property
    def kv(self) -> KvHandover | None:
        """What the current attempt asks for or brings; None where it is none of two legs, or the first kept no KV."""
        if self.way is Way.PREFILL:
            return KvHandover()
        return self.stream.handover if self.way is Way.DECODE else None

    def sample(self) -> Sample:
        """What came of it; the bus thread must not touch the stream any more."""
        return Sample(self.index, self.stream, tuple(self.workers))

    def payload(self) -> bytes:
        """What the current attempt asks for, encoded."""
        if self._payload is None:
            self._payload = encode(self._request)
        return self._payload

    def go_alone(self) -> None:
        """Have one worker serve the current attempt."""
        self.way = Way.ALONE

    def go_prefill(self, worker: str, connector: str | None) -> None:
        """Have `worker`, of this KV connector, serve the prefill leg of the current attempt."""
        self.way, self.prefill_worker = Way.PREFILL, worker
        self._request, self._payload = self.stream.cut(connector), None

    def next_leg(self) -> None:
        """Go on after the prefill leg, which has ended."""
        self._move(RequestEvent.PREFILLED)
        self._begin(Way.DECODE)
        self._request = self.stream.next_leg()

    def sent(self, direct_to: str | None) -> None:
        """The current attempt is being handed to NATS, for one worker alone or for the queue."""
        self.is_sent = True
        if self.wanted_since is None:
            self.wanted_since = time.monotonic()
        self.direct_to = direct_to
        self._payload = None
        if self.state is RequestState.WAITING:
            self._move(RequestEvent.PUBLISHED)

    def unsent(self) -> None:
        """NATS did not take it."""
        self.is_sent = False

    def stored(self, seq: int) -> None:
        """Its queue has confirmed that it holds the current attempt."""
        self.seq = seq
        self._move(RequestEvent.STORED)

    def admit(self, worker: str, incarnation: str) -> bool:
        """Note who serves the current attempt; False if another does already."""
        if self.worker is None:
            self._move(RequestEvent.ADMITTED)
            self.worker, self.incarnation = worker, incarnation
            self.workers.append(worker)
        return self.worker == worker and self.incarnation == incarnation

    def released(self) -> None:
        """Its worker has ended the current attempt by itself."""
        self.worker = self.incarnation = None

    def give_up(self, error: RequestError) -> Chunk | None:
        """End the current attempt because of `error`; returns the terminal chunk if all there will be is there."""
        self._lose(error)
        self._begin(Way.OPEN)
        self.prefill_until = None
        more = self.stream.next_attempt()
        if isinstance(more, Chunk):
            return more
        self._request = more
        return None

    def withdraw(self, error: RequestError) -> None:
        """Give the current attempt another number, because nobody took it: it does not count as an attempt."""
        self._lose(error)
        self._begin(Way.OPEN if self.way is Way.PREFILL else self.way)
        self._request = self.stream.withdraw()

    def _lose(self, error: RequestError) -> None:
        self._move(RequestEvent.LOST)
        self.last_error = error
        self.has_failed_handover |= error.code is ErrorCode.KV_TRANSFER_FAILED

    def _begin(self, way: Way) -> None:
        """Nothing was sent yet of what is current now."""
        self.released()
        self.way = way
        self.seq = self.direct_to = self.prefill_worker = None
        self.is_sent = False
        self._payload = None

    def finish(self) -> None:
        """Nothing more is to come; without effect the second time."""
        if self.is_open:
            self._move(RequestEvent.FINISHED)

    def _move(self, event: RequestEvent) -> None:
        self.state = REQUEST.next(self.state, event)
        self.since = time.monotonic()
