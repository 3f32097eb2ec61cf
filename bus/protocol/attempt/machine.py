"""The attempts of one child request, one after another, until one terminal chunk or one error.

`AttemptMachine` does no I/O. It handles events with their times, by the transitions of `REQUEST`. It returns
instructions, which the client executes in order.

Invariants: one attempt is current, and at most one worker has it. Any other worker that offers it receives an abort.
The request ends once. Each open state has a deadline: its own, or that of the call.
"""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec.structs import force_setattr

from ....schemas.chunk import Chunk
from ....schemas.errors import ErrorCode, RemoteProtocolError, RequestError, RequestFailed, request_error
from ....schemas.limits import MAX_ATTEMPTS
from ....schemas.messages import KvTransfer, RequestKey, encode
from ....schemas.request import Lane, lane_of
from ..queue.prefill_queue import PrefillFallback
from ..states import StateMachine
from ..stream.response_stream import ResponseStream
from . import events as on
from .events import Event, Instruction

PASSED_ON: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.WEIGHTS_TOO_OLD})
"""Errors with which a worker rejects a direct request that another worker may accept."""
HAND_OVER_S: Final = 1.0
"""Seconds that a worker has to answer a direct request: about a thousand round trips. Then any worker may run it."""
QUEUE_MISSING_S: Final = 0.5
"""Seconds until a worker has created a deleted queue again: it does so within its next pull."""
PREFILL_WAIT_S: Final = 2.0
"""Seconds that a request waits for a prefill worker: about the time in which a decode worker computes a long prompt."""
DECODE_BYTES: Final = 1024
"""The bytes that a decode phase adds to the message of the whole request, besides its KV parameters."""
MAX_UNREADABLE_WORKERS: Final = 2
"""The number of workers with undecodable frames at which the request fails. A single worker may itself be broken."""
NOTHING: Final[Sequence[Instruction]] = ()
_CLEARED: Final = (on.ClearSuspicion(),)
_COMPLETED: Final = (on.Retract(), on.Complete())
NO_WORKER: Final[frozenset[str]] = frozenset()


class RequestState(enum.StrEnum):
    """The state of the current attempt of a child request at its client."""

    WAITING = "waiting"
    """The current attempt is not published: no worker of the model is present, or the request waits for the worker of
    its group."""
    AWAITING_PREFILL = "awaiting_prefill"
    """The request waits, for 2 s at most, for room at a prefill worker."""
    READY = "ready"
    """The whole request, or its decode phase, is about to go to the queue."""
    HELD = "held"
    """The request may have killed an engine, and the client first tries another suspect until it has a token or has
    ended."""
    PREFILL_HANDED_OVER = "prefill_handed_over"
    """The client has sent the prefill phase to one worker, which has one second to send an offer."""
    HANDED_OVER = "handed_over"
    """The client has sent the request to one worker, which has one second to send an offer."""
    PUBLISHING = "publishing"
    """The client sends the request to the queue until the queue confirms."""
    QUEUE_MISSING = "queue_missing"
    """The queue does not exist, although workers of the model are present. The client publishes again after 0.5 s."""
    QUEUED = "queued"
    """The queue stores the request for a worker, even if the server restarts."""
    PREFILLING = "prefilling"
    """A prefill worker has the prefill phase: it sent an offer, and the client accepted. The first token ends the
    phase."""
    RUNNING = "running"
    """A worker sent an offer, and the client accepted. Both own the request."""
    ENDED = "ended"
    """The request has its terminal chunk or an error. The client counts later chunks and offers and answers with an
    abort."""


class RequestEvent(enum.StrEnum):
    """An event that changes the state of a child request."""

    PREFILL_WANTED = "prefill_wanted"
    """The request should go to a prefill worker first."""
    PREFILL_FOUND = "prefill_found"
    """A prefill worker has room, and the client sends it the prefill phase."""
    PREFILL_SKIPPED = "prefill_skipped"
    """No prefill worker can accept the request in time."""
    HANDED_OVER = "handed_over"
    """The client sends the request directly to the worker of its placement."""
    PUBLISHED = "published"
    """The client sends the request to the queue."""
    UNPUBLISHED = "unpublished"
    """The NATS connection did not accept the message."""
    STORED = "stored"
    """The queue confirmed that it stores the request."""
    UNSTORED = "unstored"
    """The queue does not exist, although workers are present."""
    WITHDRAWN = "withdrawn"
    """No worker accepted the request. The client publishes it again under the next attempt number. This does not count
    as an attempt."""
    ADMITTED = "admitted"
    """A worker offers to run the request."""
    PREFILLED = "prefilled"
    """The prefill phase has ended, and a decode worker continues."""
    LOST = "lost"
    """The worker, its frames or the queue message are lost. The next attempt begins."""
    SUSPECTED = "suspected"
    """The engine died before the request had a token. The client holds the next attempt."""
    RELEASED = "released"
    """The request is the next suspect that the client tries, or the client learned that its engine did not die."""
    FINISHED = "finished"
    """The request completed or failed, or its caller aborted it."""


UNPUBLISHED: Final = frozenset({RequestState.WAITING, RequestState.READY})
"""The client publishes the request as soon as it can."""


HANDED_TO_ONE: Final = frozenset({RequestState.PREFILL_HANDED_OVER, RequestState.HANDED_OVER})
"""The client has sent the request to one worker and waits for the answer."""


TIMED: Final = HANDED_TO_ONE | {RequestState.QUEUE_MISSING}
"""The state ends after a time, for which the machine returns `WakeAt`."""


OUT: Final = HANDED_TO_ONE | {
    RequestState.PUBLISHING,
    RequestState.QUEUE_MISSING,
    RequestState.QUEUED,
    RequestState.PREFILLING,
    RequestState.RUNNING,
}
"""The current attempt was published, so a worker may have it."""


UNADMITTED: Final = OUT - {RequestState.PREFILL_HANDED_OVER, RequestState.PREFILLING, RequestState.RUNNING}
"""The whole request, or its decode phase, was published, and no worker has offered to run it."""


OPEN: Final = frozenset(RequestState) - {RequestState.ENDED}
"""The request has not ended."""


REQUEST = StateMachine(
    "request",
    RequestState.WAITING,
    frozenset({RequestState.ENDED}),
    {
        (RequestState.WAITING, RequestEvent.PREFILL_WANTED): RequestState.AWAITING_PREFILL,
        (RequestState.WAITING, RequestEvent.HANDED_OVER): RequestState.HANDED_OVER,
        (RequestState.WAITING, RequestEvent.PUBLISHED): RequestState.PUBLISHING,
        (RequestState.AWAITING_PREFILL, RequestEvent.PREFILL_FOUND): RequestState.PREFILL_HANDED_OVER,
        (RequestState.AWAITING_PREFILL, RequestEvent.PREFILL_SKIPPED): RequestState.READY,
        (RequestState.READY, RequestEvent.HANDED_OVER): RequestState.HANDED_OVER,
        (RequestState.READY, RequestEvent.PUBLISHED): RequestState.PUBLISHING,
        (RequestState.HELD, RequestEvent.RELEASED): RequestState.WAITING,
        (RequestState.PREFILL_HANDED_OVER, RequestEvent.WITHDRAWN): RequestState.WAITING,
        (RequestState.PREFILL_HANDED_OVER, RequestEvent.ADMITTED): RequestState.PREFILLING,
        (RequestState.HANDED_OVER, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.RUNNING, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.HANDED_OVER, RequestEvent.UNPUBLISHED): RequestState.READY,
        (RequestState.PUBLISHING, RequestEvent.UNPUBLISHED): RequestState.READY,
        (RequestState.PUBLISHING, RequestEvent.STORED): RequestState.QUEUED,
        (RequestState.PUBLISHING, RequestEvent.UNSTORED): RequestState.QUEUE_MISSING,
        (RequestState.QUEUE_MISSING, RequestEvent.WITHDRAWN): RequestState.READY,
        # The only worker that offered is one that the client avoids.
        (RequestState.PUBLISHING, RequestEvent.WITHDRAWN): RequestState.READY,
        (RequestState.QUEUED, RequestEvent.WITHDRAWN): RequestState.READY,
        # A worker may offer before the queue confirms the request.
        **{(state, RequestEvent.ADMITTED): RequestState.RUNNING for state in sorted(UNADMITTED)},
        (RequestState.PREFILLING, RequestEvent.PREFILLED): RequestState.READY,
        **{(state, RequestEvent.LOST): RequestState.WAITING for state in sorted(OUT)},
        **{(state, RequestEvent.SUSPECTED): RequestState.HELD for state in sorted(OUT)},
        **{(state, RequestEvent.FINISHED): RequestState.ENDED for state in sorted(OPEN)},
    },
)


class AttemptMachine:
    """One child request across its attempts.

    Args:
        stream: the combined output of its attempts; no attempt was published yet.
        payload: the encoded request of the first attempt.
        now: the time of submission.
        deadline: the latest end of its call.
    """

    worker: str | None = None
    """The worker that has the current attempt, prefill phase or decode phase; None before an offer."""
    incarnation: str | None = None
    """The incarnation of that worker."""
    handed_to: str | None = None
    """The one worker to which the request was sent, in the states of `HANDED_TO_ONE`."""
    has_token = False
    """True if the worker that has the current attempt or phase has generated a token of it."""
    deaths_alone = 0
    """The number of engines that died while this was the client's only request there."""
    num_moves = 0
    """The number of workers that it left because they sent no token."""
    is_placed = False
    """True if its worker received it directly, not from the queue."""
    state = REQUEST.initial
    workers: tuple[str, ...] = ()
    """The workers that had its attempts, in order."""
    _last_error: RequestError | None = None
    _unreadable_at = NO_WORKER
    _has_failed_handover = False
    # The time of the first publication of the current attempt since a worker last had it.
    _unadmitted_since: float | None = None
    # The deadline of the state, and that of the prefill queue, to which workers without room send the attempt back.
    _state_deadline = _prefill_deadline = math.inf

    def __init__(self, stream: ResponseStream, payload: bytes, *, now: float, deadline: float) -> None:
        self.stream = stream
        self.since = now
        """The time at which it entered its state."""
        self.heard_at = now
        """The time of the last offer or chunk of its worker."""
        # The number of the first attempt, and of the current one when it began.
        self._first_attempt = self._began_as = stream.attempt
        self._request = stream.asked
        self._payload: bytes | None = payload
        self._call_deadline = deadline

    @property
    def key(self) -> RequestKey:
        """The key of the current attempt in messages."""
        return RequestKey(self.stream.request_id, self.stream.attempt, self.stream.child)

    @property
    def engine(self) -> tuple[str, str]:
        """Worker and incarnation that have the current attempt; empty before an offer."""
        return self.worker or "", self.incarnation or ""

    @property
    def is_open(self) -> bool:
        """True if the request has not ended."""
        return self.state is not RequestState.ENDED

    @property
    def is_first_attempt(self) -> bool:
        """True if no worker and no queue has had it before the current attempt."""
        return not self.stream.has_begun

    @property
    def num_refusals(self) -> int:
        """The number of times that the current attempt was withdrawn because no worker accepted it."""
        return self.stream.attempt - self._began_as

    def awaits_prefill(self, possible: on.PublishingPossible) -> bool:
        """Return True if the request would wait for a prefill worker under these conditions."""
        return self._is_for_prefill(possible) and self._find_fallback(possible) is None

    @property
    def was_published(self) -> bool:
        """True if frames of an attempt may still arrive."""
        is_out = self._unadmitted_since is not None
        return is_out or bool(self.workers) or self.stream.attempt > self._first_attempt

    @property
    def lane(self) -> Lane:
        """The lane of the current attempt."""
        return lane_of(self.stream.asked.priority) if self.is_first_attempt else "resume"

    @property
    def deadline(self) -> float:
        """The end of the current state, if no other event comes before."""
        return min(self._state_deadline, self._call_deadline)

    @property
    def last_error(self) -> RequestError | None:
        """The reason why the attempt before this one was lost; None if no worker has had the request yet."""
        return self._last_error if self.workers else None

    def payload(self) -> bytes:
        """Return the encoded request of the current attempt."""
        if self._payload is None:
            self._payload = encode(self._request)
        return self._payload

    def drop_payload(self) -> None:
        """Keep the encoded request no longer. `payload` encodes it again for a further message."""
        self._payload = None

    def add(self, chunk: Chunk, now: float) -> tuple[Sequence[Chunk], Sequence[Instruction]]:
        """Handle a chunk of the worker that has the current attempt, or of a worker that rejects it.

        Chunks are the most frequent events, so they have a method of their own.

        Returns:
            The chunks for the caller, and the instructions to execute after their delivery.
        """
        end, has_new = chunk.end, bool(chunk.token_ids_data)
        if end is not None and end.error is not None:
            return (), self._handle_rejection(end.error.exception(chunk.request_id), now)
        # A worker may write any id into a chunk. Permissions bind only the subject, which names the worker.
        force_setattr(chunk, "worker_id", self.worker)
        stream, self.heard_at = self.stream, now
        try:
            delivered = stream.add(chunk)
        except RemoteProtocolError as exc:
            message = f"worker {self.worker}: {exc}"
            return (), self._fail(self._make_error(ErrorCode.PROTOCOL_ERROR, message), now)
        if end is None:
            if self.has_token or not has_new:
                return delivered, NOTHING
            self.has_token = True
            # A request that a prefill worker has started may still kill the engine of a decode worker.
            return delivered, NOTHING if self.state is RequestState.PREFILLING else _CLEARED
        self.has_token |= has_new
        if stream.is_prefilled:
            self._move(RequestEvent.PREFILLED, now)
            self._reset_worker()
            self._request = stream.next_phase()
            return delivered, (on.Retract(), on.Schedule())
        self._move(RequestEvent.FINISHED, now)
        return delivered, _COMPLETED

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        """Handle an event other than a chunk. Return the instructions that the client must execute, in order."""
        kind = type(event)
        states, handler = _HANDLERS[kind]
        if self.state not in states or (kind in _NUMBERED and event.attempt != self.stream.attempt):  # type: ignore[attr-defined]
            return NOTHING
        return handler(self, event, now)

    def _publish(self, possible: on.PublishingPossible, now: float) -> Sequence[Instruction]:
        # A later attempt waits for a worker. The first message itself finds out whether there is a queue.
        if self.stream.attempt > self._first_attempt and not possible.is_served:
            return (on.Schedule(),)
        if self.is_first_attempt and not possible.is_target_known:
            return (on.Schedule(),)
        fallback: Sequence[Instruction] = NOTHING
        if self._is_for_prefill(possible):
            reason = self._find_fallback(possible)
            if reason is None:
                return self._join_prefill_queue(now)
            fallback = (on.CountFallback(reason),)
        if possible.direct_to is not None:
            return *fallback, *self._hand_to(RequestEvent.HANDED_OVER, possible.direct_to, None, now)
        self.is_placed = False
        self._move(RequestEvent.PUBLISHED, now)
        return *fallback, self._make_publish(None, self.stream.handover if self.stream.phase == "decode" else None, now)

    def _is_for_prefill(self, possible: on.PublishingPossible) -> bool:
        if self.state is not RequestState.WAITING or self._has_failed_handover:
            return self.state is RequestState.WAITING
        if possible.num_prefill_workers is None:
            return False
        asked = self.stream.asked
        return asked.prompt_len >= possible.prefill_min_tokens and asked.sampling.max_tokens != 1

    def _find_fallback(self, possible: on.PublishingPossible) -> PrefillFallback | None:
        """Return the reason why a decode worker serves the request alone; None: a prefill worker may serve it first."""
        if self._has_failed_handover:
            return PrefillFallback.FAILED
        if not possible.num_prefill_workers:
            return PrefillFallback.NO_WORKER
        if not self.stream.asked.sampling.is_continuable:
            return PrefillFallback.SAMPLING
        return PrefillFallback.TOO_LARGE if len(self.payload()) + DECODE_BYTES > possible.max_bytes else None

    def _join_prefill_queue(self, now: float) -> Sequence[Instruction]:
        self._prefill_deadline = min(self._prefill_deadline, now + PREFILL_WAIT_S)
        self._move(RequestEvent.PREFILL_WANTED, now, until=self._prefill_deadline)
        return (on.JoinPrefillQueue(self._prefill_deadline),)

    def _leave_prefill_queue(self, decided: on.PrefillDecided, now: float) -> Sequence[Instruction]:
        if decided.worker is None:
            self._move(RequestEvent.PREFILL_SKIPPED, now)
            return (on.Schedule(),)
        self._request, self._payload = self.stream.cut_to_prefill(decided.connector), None
        return self._hand_to(RequestEvent.PREFILL_FOUND, decided.worker, KvTransfer(), now)

    def _hand_to(self, event: RequestEvent, worker: str, kv: KvTransfer | None, now: float) -> Sequence[Instruction]:
        self._move(event, now, until=now + HAND_OVER_S)
        self.handed_to, self.is_placed = worker, True
        return on.WakeAt(self._state_deadline), self._make_publish(worker, kv, now)

    def _make_publish(self, worker: str | None, kv: KvTransfer | None, now: float) -> Instruction:
        if self._unadmitted_since is None:
            self._unadmitted_since = now
        return on.Publish(worker, kv)

    def _send_less(self, oversized: on.Oversized, now: float) -> Sequence[Instruction]:
        # Without the KV a decode worker computes the prompt itself. This is slower than fetching the KV, but does not
        # fail.
        if self.stream.phase == "decode" and self.stream.handover is not None:
            self.stream.handover = None
            return (on.Publish(self.handed_to, None),)
        message = f"the request has {oversized.num_bytes} bytes; the server's max_payload allows {oversized.max_bytes}"
        return self._fail(request_error(ErrorCode.TOO_LARGE, message, request_id=self.stream.request_id), now)

    def _unpublish(self, _: on.PublishFailed, now: float) -> Sequence[Instruction]:
        self._move(RequestEvent.UNPUBLISHED, now)
        return (on.Schedule(),)

    def _enter_queue(self, _: on.Stored, now: float) -> Sequence[Instruction]:
        self._move(RequestEvent.STORED, now)
        return NOTHING

    def _handle_not_stored(self, refused: on.NotStored, now: float) -> Sequence[Instruction]:
        error = refused.error
        if error.code is ErrorCode.NO_WORKERS and (refused.may_come or not self.is_first_attempt):
            # The queue does not exist. Workers that are present, or start within the grace time, create it.
            self._last_error = error
            self._move(RequestEvent.UNSTORED, now, until=now + QUEUE_MISSING_S)
            return (on.WakeAt(self._state_deadline),)
        return self._handle_rejection(error, now)

    def _accept_offer(self, offer: on.Offered, now: float) -> Sequence[Instruction]:
        if self.is_open and self.worker == offer.worker:
            # An abort would also reach another worker of the same id, which may have this attempt.
            return NOTHING
        if self.state not in OUT or self.worker is not None:
            return (on.AbortAttempt(offer.worker, self.key),)
        self._move(RequestEvent.ADMITTED, now)
        self.worker, self.incarnation, self._payload = offer.worker, offer.incarnation, None
        self.workers += (offer.worker,)
        waited_s = 0.0 if self._unadmitted_since is None else now - self._unadmitted_since
        self._unadmitted_since = None
        return (on.RecordAdmission(waited_s),)

    def _handle_rejection(self, error: RequestError, now: float) -> Sequence[Instruction]:
        if self.state not in OUT:
            return NOTHING
        # A decode worker may support a request that a prefill worker does not support.
        passed_on = PASSED_ON | ({ErrorCode.UNSUPPORTED} if self.stream.phase == "prefill" else set())
        if self.state in HANDED_TO_ONE and error.code in passed_on:
            return self._withdraw(error, now)
        is_full = error.code is ErrorCode.QUEUE_FULL
        if is_full and self.is_placed and self.state is RequestState.RUNNING and not self.has_token:
            # The request waited there for a slot, behind others of its group. The worker's engine has not received it.
            self.workers = self.workers[:-1]
            return self._withdraw(error, now)
        if error.code.facts.resumed or (is_full and not self.is_first_attempt):
            return self._lose(on.Lost(error, is_over=True), now)
        return self._fail(error, now, is_over=True)

    def _leave_silent_worker(self, silent: on.WorkerSilent, now: float) -> Sequence[Instruction]:
        return self._withdraw(silent.error, now)

    def _withdraw(self, error: RequestError, now: float) -> Sequence[Instruction]:
        self._move(RequestEvent.WITHDRAWN, now)
        self._last_error = error
        self._reset_worker()
        self._request = self.stream.withdraw()
        return on.Retract(error), on.Schedule()

    def _end_wait(self, _: on.TimePassed, now: float) -> Sequence[Instruction]:
        if now < self._state_deadline:
            return (on.WakeAt(self._state_deadline),)
        if self.state is RequestState.QUEUE_MISSING and self._last_error is not None:
            return self._withdraw(self._last_error, now)
        message = f"worker {self.handed_to} did not answer a direct request within {HAND_OVER_S:g} s"
        return self._withdraw(self._make_error(ErrorCode.WORKER_LOST, message), now)

    def _lose(self, lost: on.Lost, now: float) -> Sequence[Instruction]:
        if lost.unreadable_at is not None:
            self._unreadable_at |= {lost.unreadable_at}
            if len(self._unreadable_at) >= MAX_UNREADABLE_WORKERS:
                return self._fail(lost.error, now)
        if self.stream.num_attempts >= MAX_ATTEMPTS:
            return on.CountLoss(is_retried=False), *self._fail(lost.error, now, is_over=lost.is_over)
        aborts = NOTHING if lost.is_over else self._abort_attempt()
        self._move(RequestEvent.SUSPECTED if lost.is_suspect else RequestEvent.LOST, now)
        self._last_error = lost.error
        self._has_failed_handover |= lost.error.code is ErrorCode.KV_TRANSFER_FAILED
        self._prefill_deadline = math.inf
        more = self.stream.next_attempt(self.worker or "", lost.error.code.value, now)
        self._reset_worker()
        self._began_as = self.stream.attempt
        if isinstance(more, Chunk):
            self._move(RequestEvent.FINISHED, now)
            return on.Retract(), *aborts, on.CountLoss(is_retried=False), on.Deliver([more]), on.Complete()
        self._request = more
        following = NOTHING if lost.is_suspect else (on.Schedule(),)
        return on.Retract(), *aborts, on.CountLoss(is_retried=True), *following

    def _release(self, _: on.SuspectReleased, now: float) -> Sequence[Instruction]:
        self._move(RequestEvent.RELEASED, now)
        return (on.Schedule(),)

    def _reset_worker(self) -> None:
        """Clear the worker and payload of the attempt or phase, before the next one that is not published yet."""
        self.worker = self.incarnation = self._payload = None
        self.has_token = False

    def _handle_failure(self, failed: on.Failed, now: float) -> Sequence[Instruction]:
        return self._fail(failed.error, now, is_over=failed.is_over)

    def _fail(self, error: RequestError, now: float, *, is_over: bool = False) -> Sequence[Instruction]:
        aborts = NOTHING if is_over else self._abort_attempt()
        self._move(RequestEvent.FINISHED, now)
        return on.Retract(), *aborts, on.Fail(error)

    def _stop(self, event: on.Stopped | on.Aborted, now: float) -> Sequence[Instruction]:
        aborts = self._abort_attempt()
        self._move(RequestEvent.FINISHED, now)
        delivered = (on.Deliver([self.stream.abort()]),) if isinstance(event, on.Aborted) else NOTHING
        return on.Retract(), *aborts, *delivered

    def _abort_attempt(self) -> Sequence[Instruction]:
        return NOTHING if self.worker is None else (on.AbortAttempt(self.worker, self.key),)

    def _move(self, event: RequestEvent, now: float, *, until: float = math.inf) -> None:
        self.state = REQUEST.next(self.state, event)
        self.since, self._state_deadline = now, until
        self.handed_to = None

    def _make_error(self, code: ErrorCode, message: str) -> RequestFailed:
        return RequestFailed(code=code, message=message, request_id=self.stream.request_id)


_Handler = Callable[[AttemptMachine, Any, float], Sequence[Instruction]]


_HANDLERS: Final[dict[type[Event], tuple[frozenset[RequestState], _Handler]]] = {
    on.PublishingPossible: (UNPUBLISHED, AttemptMachine._publish),
    on.PrefillDecided: (frozenset({RequestState.AWAITING_PREFILL}), AttemptMachine._leave_prefill_queue),
    on.Oversized: (OUT, AttemptMachine._send_less),
    # A message to a prefill worker is never sent twice: the worker counts as silent when its time is up.
    on.PublishFailed: (frozenset({RequestState.PUBLISHING, RequestState.HANDED_OVER}), AttemptMachine._unpublish),
    on.Stored: (frozenset({RequestState.PUBLISHING}), AttemptMachine._enter_queue),
    on.NotStored: (frozenset({RequestState.PUBLISHING}), AttemptMachine._handle_not_stored),
    on.Offered: (frozenset(RequestState), AttemptMachine._accept_offer),
    on.WorkerSilent: (HANDED_TO_ONE | UNADMITTED, AttemptMachine._leave_silent_worker),
    on.Lost: (OUT, AttemptMachine._lose),
    on.SuspectReleased: (frozenset({RequestState.HELD}), AttemptMachine._release),
    on.TimePassed: (TIMED, AttemptMachine._end_wait),
    on.Failed: (OPEN, AttemptMachine._handle_failure),
    on.Stopped: (OPEN, AttemptMachine._stop),
    on.Aborted: (OPEN, AttemptMachine._stop),
}
"""The states in which each event has an effect, and its handler."""
_NUMBERED: Final = frozenset(kind for kind in _HANDLERS if "attempt" in kind.__struct_fields__)
