"""The open calls of one client on the bus thread: their chunks, and the recovery of lost attempts.

A request for n samples is n requests to the fleet, its children. If one of them fails, all of them end.

Invariant: every opened call ends once, with a result or with an error. Each request has exactly one current attempt, on
at most one worker. A worker that sends chunks of another attempt receives an abort. After the loss of a worker, its
requests are published again as the next attempt, from the end of their response streams. Requests that may have killed
an engine are published one at a time (`rollbus.bus.protocol.attempt.suspects`).
"""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ...schemas.chunk import Chunk, ChunkError
from ...schemas.errors import ErrorCode, RequestError, RequestFailed, RequestTimeout
from ...schemas.limits import MAX_ENGINE_DEATHS_ALONE, MAX_REMEMBERED_IDS
from ...schemas.messages import Frame, FrameHeader, RequestKey
from ..protocol.attempt import events as on
from ..protocol.attempt.events import Event, Instruction
from ..protocol.attempt.machine import OUT, TIMED, AttemptMachine, RequestState
from ..protocol.attempt.suspects import Company, Engine, Suspects
from ..protocol.fleet.presence import LostWorker, Survivor
from ..protocol.queue.load import PrefixScope
from ..protocol.queue.placement import PlacedRequest, PlacementNeeds
from ..protocol.stream.buffers import share_names
from ..protocol.stream.response_stream import ResponseStream
from .calls import Call, CallResult
from .config import MAX_MODELS, ClientStats
from .deadlines import Deadlines
from .generation import ChildResult

if TYPE_CHECKING:
    from .dispatch import RequestDispatcher

logger = logging.getLogger(__name__)

HELD_BACK: Final = (
    "an engine died before it generated a token of this request, and the client retries such requests one at a time"
)


@share_names
class OpenCall:
    """A call while it is open.

    Args:
        call: the caller's side of the request.
        serial: number of the call, unique within this client.
        attempt: number of the first attempt. Above 0 if late chunks of an earlier call with the same id may arrive.
    """

    target_version: int | None = None
    """Target weight version of the model when the call was submitted. None until it is known, and if the request does
    not need it."""
    pieces: tuple[PrefixScope, tuple[int, ...]] | None = None
    """Hashes of the prompt, with their scope. None until they are computed."""
    has_ended = False
    """True if all children have their terminal chunk, or if the call has failed."""
    is_stopping = False
    """True if the children end with their present tokens and are not published again."""

    def __init__(self, call: Call, *, serial: int, attempt: int) -> None:
        self.call = call
        self.serial = serial
        self.request_id = call.wire_id
        self.model = call.model
        self.children = [
            ChildRequest(self, ResponseStream(request, child=index, attempt=attempt, keep=not call.streams), payload)
            for index, (request, payload) in enumerate(zip(call.children, call.payloads, strict=True))
        ]
        call.payloads = ()

    def finish(self, error: RequestError | None = None) -> None:
        """End the caller's side of the call. A second call of this method has no effect."""
        if self.has_ended:
            return
        self.has_ended = True
        if (spans := self.call.spans) is not None:
            spans.ended(self.model, self.children, self.call.streams, None if error is None else error.code)
        self.call.finish(CallResult([child.result() for child in self.children], error))

    def failure(self, code: ErrorCode, message: str) -> RequestFailed:
        """Return an error of this call."""
        return RequestFailed(code=code, message=message, request_id=self.request_id)


@share_names
class ChildRequest(AttemptMachine):
    """A child request with its open call."""

    timer: asyncio.TimerHandle | None = None
    """Timer of the present state, if that state has a time limit."""
    may_wait = False
    """True if the current attempt may wait at its worker for a slot, and the worker has offered it at most once."""
    avoids_queue = False
    """True if a silent worker had it. It then goes directly to another worker, if one serves."""
    wanted: PlacementNeeds | None = None
    """The input of the placement of the current attempt. None: it was not computed."""
    placed: PlacedRequest | None = None
    """The worker that got or has the current attempt. None: no worker has it."""

    def __init__(self, open_call: OpenCall, stream: ResponseStream, payload: bytes) -> None:
        super().__init__(stream, payload, now=time.monotonic(), deadline=open_call.call.deadline_s)
        self.open_call = open_call

    @property
    def has_begun(self) -> bool:
        """True if the engine of its worker may have received the request."""
        return not self.may_wait or self.has_token

    @property
    def msg_id(self) -> str:
        """Id of the current attempt, unique within the client."""
        return f"{self.open_call.serial}.{self.stream.attempt}.{self.stream.child}"

    def payload(self) -> bytes:
        """Return the encoded request of the current attempt. A resumed request has the trace context of its resume."""
        spans = self.open_call.call.spans
        if self._payload is None and spans is not None and (context := spans.context_of(self.stream.child)):
            self._request = self._request.in_trace(context.traceparent, context.tracestate)
        return super().payload()

    def note(self, instructions: Sequence[Instruction]) -> None:
        """Cancel the timer of a state that has ended, and record instructions for the spans of a traced call."""
        if self.timer is not None and self.state not in TIMED:
            self.timer.cancel()
            self.timer = None
        spans = self.open_call.call.spans
        if spans is not None:
            for instruction in instructions:
                spans.note(self, instruction)

    def result(self) -> ChildResult:
        """Return the result of the child. The bus thread must not use the stream afterwards."""
        return ChildResult(self.stream.child, self.stream, self.workers)


class AttemptCoordinator:
    """The open calls of one client and the current attempts of their children. Call `connect` before use."""

    def __init__(self) -> None:
        self._publisher: RequestDispatcher
        self._abort_at: Callable[[str, RequestKey], None]
        self._calls: dict[str, OpenCall] = {}
        self._serials = itertools.count()
        # Next attempt number of each used id. Late chunks belong to an earlier attempt.
        # Not a dict, which finds its first key only behind the places of all removed ones.
        self._next_attempt: OrderedDict[str, int] = OrderedDict()
        self._deadlines: Deadlines[OpenCall] = Deadlines(self._expire)
        self._failure: tuple[ErrorCode, str] | None = None
        self._suspects: Suspects[ChildRequest] = Suspects()
        self.silent: Container[str] = frozenset()
        """The workers that this client avoids, because they sent no tokens."""
        self.stats = ClientStats()
        """Counters of all parts of the client."""

    def debug_state(self) -> dict[str, int]:
        """Return counts; see `Runtime.debug_state`."""
        calls = list(self._calls.values())
        placed = sum(child.placed is not None for call in calls for child in call.children)
        return {"calls": len(calls), "suspects": len(self._suspects), "placed": placed}

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the calls have received that their callers have not left. Any thread may read it."""
        # The copy of the values is atomic.
        calls = list(self._calls.values())
        return sum(child.stream.num_tokens for call in calls for child in call.children)

    def connect(self, publisher: "RequestDispatcher", abort: Callable[[str, RequestKey], None]) -> None:
        """Set the object that publishes requests, and the function that makes a worker abort a request."""
        self._publisher = publisher
        self._abort_at = abort

    # The caller's loop posts calls of these methods in order.

    def submit(self, call: Call) -> None:
        """Open a call. Its id must not be in use."""
        request_id = call.wire_id
        open_call = OpenCall(call, serial=next(self._serials), attempt=self._next_attempt.get(request_id, 0))
        self._calls[request_id] = open_call
        if self._failure is not None:
            self._fail(open_call, open_call.failure(*self._failure))
            return
        self._deadlines.add(open_call, call.deadline_s)
        for child in open_call.children:
            self._publisher.add(child)

    def remove(self, call: Call) -> None:
        """Remove a call that its caller has left, and abort its open children at their workers."""
        request_id = call.wire_id
        open_call = self._calls.get(request_id)
        if open_call is None or open_call.call is not call:
            return
        del self._calls[request_id]
        self._deadlines.remove(open_call, call.deadline_s)
        # A child that was never published has the first number.
        if used := [child.stream.attempt for child in open_call.children if child.was_published]:
            self._next_attempt[request_id] = max(used) + 1
            # The oldest ids are removed first.
            self._next_attempt.move_to_end(request_id)
            if len(self._next_attempt) > MAX_REMEMBERED_IDS:
                self._next_attempt.popitem(last=False)
        if not open_call.has_ended:
            self._fail(open_call, open_call.failure(ErrorCode.CLIENT_CLOSED, "the caller left the call"))
        # The children refer to the call, and the call refers to its result. A large result would otherwise stay in
        # memory until the garbage collector finds the cycle.
        open_call.children.clear()
        call.count_dropped()

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls immediately as aborted. Return the ids of those that were open."""
        aborted = self._find_open(request_ids)
        for open_call in aborted:
            self._send_all(open_call, on.Aborted())
            open_call.finish()
        return [open_call.request_id for open_call in aborted]

    def _find_open(self, request_ids: Iterable[str]) -> list[OpenCall]:
        return [call for call in map(self._calls.get, request_ids) if call is not None and not call.has_ended]

    def stop(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """End these calls soon with the tokens they have. Return the number of tokens of each child, for open calls.

        A child that waits for a worker ends immediately. Otherwise the worker confirms with a terminal chunk, after the
        chunks that it has already sent. The request may also have ended normally by then. If the worker is lost first,
        the child ends at that time, without another attempt.
        """
        stopped = {}
        for open_call in self._find_open(request_ids):
            stopped[open_call.request_id] = [child.stream.num_tokens for child in open_call.children]
            open_call.is_stopping = True
            for child in open_call.children:
                if child.is_open and child.worker is not None:
                    self._abort_at(child.worker, child.key)
                elif child.is_open:
                    self._end_stopped(child)
        return stopped

    def _end_stopped(self, child: ChildRequest) -> None:
        self.send(child, on.Aborted())
        self._clear_suspicion(child)
        self._finish_if_over(child.open_call)

    def _finish_if_over(self, open_call: OpenCall) -> None:
        for child in open_call.children:
            if child.state is not RequestState.ENDED:
                return
        open_call.finish()

    def _send_all(self, open_call: OpenCall, event: on.Stopped | on.Aborted) -> None:
        """End all children of `open_call`. The next worker that offers an unadmitted child gets an abort."""
        for child in open_call.children:
            self.send(child, event)
            self._clear_suspicion(child)

    def _fail(self, open_call: OpenCall, error: RequestError) -> None:
        """End a call with an error and abort its requests in the engines, also if the caller does not read."""
        self._send_all(open_call, on.Stopped())
        open_call.finish(error)

    def _expire(self, open_call: OpenCall) -> None:
        if open_call.has_ended:
            return
        waiting = [child for child in open_call.children if child.is_open and child.worker is None]
        stage = "admission" if waiting else "generation"
        message = f"the request was not finished within {open_call.call.timeout_s:g} s"
        if waiting:
            is_held = waiting[0].state is RequestState.HELD
            reason = HELD_BACK if is_held else self._publisher.waiting_reason(waiting[0])
            message += f": {reason}" if reason else ""
        self._fail(open_call, RequestTimeout(stage=stage, message=message, request_id=open_call.request_id))

    def send(self, child: ChildRequest, event: Event) -> None:
        """Let a child request handle an event, and execute its instructions."""
        if instructions := child.handle(event, time.monotonic()):
            self.execute(child, instructions)

    def execute(self, child: ChildRequest, instructions: Sequence[Instruction]) -> None:
        """Execute all instructions of a child request except publications."""
        open_call = child.open_call
        if child.timer is not None or open_call.call.spans is not None:
            child.note(instructions)
        for instruction in instructions:
            match instruction:
                # The instructions of each request, then those of few.
                case on.Retract(refusal):
                    self._publisher.remove(child, refusal)
                case on.RecordAdmission(waited_s):
                    self._publisher.record_admission(child, waited_s)
                case on.Complete():
                    self._clear_suspicion(child)
                    self._finish_if_over(open_call)
                case on.ClearSuspicion():
                    self._clear_suspicion(child)
                case on.Schedule():
                    self._schedule(child)
                case on.WakeAt(at):
                    delay_s = max(at - time.monotonic(), 0)
                    child.timer = asyncio.get_running_loop().call_later(delay_s, self.send, child, on.TimePassed())
                case on.AbortAttempt(worker, key):
                    self._abort_at(worker, key)
                case on.CountLoss(is_retried):
                    self._count_loss(open_call.model, is_retried)
                case on.Deliver(chunks):
                    open_call.call.deliver(chunks)
                case on.Fail(error):
                    self._fail(open_call, error)

    def _schedule(self, child: ChildRequest) -> None:
        if child.open_call.is_stopping:
            self._end_stopped(child)
        else:
            self._publisher.add(child)

    def _count_loss(self, model: str, is_retried: bool) -> None:
        self.stats.attempts_lost += 1
        if is_retried:
            # KV phases and withdrawn attempts are not counted.
            retries = self.stats.retries
            retries[model] = retries.get(model, 0) + 1
            if len(retries) > MAX_MODELS:
                del retries[next(iter(retries))]

    # For `ClientLinks`.

    def handle_frame(self, worker: str, frame: Frame) -> None:
        """Process the next frame of a worker."""
        incarnation, now = frame.incarnation, time.monotonic()
        if frame.admitted:
            self._handle_offers(worker, frame, now)
        dead: dict[ChildRequest, ChunkError] = {}
        for chunk in frame.chunks:
            child = self.find(chunk.request_id, chunk.attempt, chunk.child)
            end = chunk.end
            if child is None or not (
                (child.worker == worker and child.incarnation == incarnation)
                or self._becomes_current(child, worker, incarnation, chunk)
            ):
                self.stats.late_chunks += 1
                if end is None:
                    self.refuse_offer(child, worker, RequestKey(chunk.request_id, chunk.attempt, chunk.child))
                continue
            error = None if end is None else end.error
            if error is not None and error.code is ErrorCode.ENGINE_DEAD and child.worker is not None:
                # The whole frame must be read to know which requests have a token.
                child.has_token |= bool(chunk.token_ids_data)
                dead[child] = error
                continue
            chunks, instructions = child.add(chunk, now)
            child.open_call.call.deliver(chunks)
            if instructions:
                self.execute(child, instructions)
        if dead:
            self.on_engine_death((worker, incarnation), dead)

    def _handle_offers(self, worker: str, frame: Frame, now: float) -> None:
        for key in frame.admitted:
            child = self.find(key.request_id, key.attempt, key.child)
            if child is None:
                self._abort_at(worker, key)
            else:
                if child.worker is None or (child.may_wait and child.worker == worker):
                    child.heard_at = now
                # The second offer means that the engine has the request. Further ones are no sign of life.
                child.may_wait &= child.worker != worker
                if worker in self.silent and child.worker is None and self._publisher.others(child):
                    self._refuse_silent(child, worker)
                else:
                    self.execute(child, child.handle(on.Offered(worker, frame.incarnation), now))

    def _refuse_silent(self, child: ChildRequest, worker: str) -> None:
        """Send the request to another worker, because this one offered to run requests and sent no tokens."""
        self._abort_at(worker, child.key)
        child.avoids_queue = True
        message = f"worker {worker} offered to run earlier requests and sent no tokens of them"
        self.send(child, on.WorkerSilent(child.open_call.failure(ErrorCode.WORKER_LOST, message)))

    def _becomes_current(self, child: ChildRequest, worker: str, incarnation: str, chunk: Chunk) -> bool:
        """Return True if a chunk of `child` is valid although `worker` sent no offer. Treat the chunk as the offer."""
        if child.state not in OUT or child.worker is not None:
            return False
        # An error without an offer is a rejection: the worker never admitted the request.
        if chunk.error is None:
            self.send(child, on.Offered(worker, incarnation))
        return True

    def refuse_offer(self, child: ChildRequest | None, worker: str, key: RequestKey) -> None:
        """Abort a request at a worker that must not serve it."""
        # Another worker with the same id receives the abort too, and may be the worker that runs this attempt.
        if child is None or child.worker != worker:
            self._abort_at(worker, key)

    def find(self, request_id: str, attempt: int, index: int) -> ChildRequest | None:
        """Return the child whose current attempt this is, or None if it is not open."""
        try:
            child = self._calls[request_id].children[index]
        except LookupError:
            return None
        return child if child.stream.attempt == attempt and child.state is not RequestState.ENDED else None

    def on_engine_death(self, engine: Engine, errors: Mapping[ChildRequest, ChunkError]) -> None:
        """Resume or fail these requests of a dead engine. Requests without a token may have caused the death."""
        if not errors:
            return
        # A worker serves one model.
        model = next(iter(errors)).open_call.model
        # Requests that waited at the worker for a slot were not in the engine.
        here = self.open_children(lambda child: child.engine == engine and child.has_begun)
        company = self._suspects.at_death(engine, Company(len(here), sum(not child.has_token for child in here)))
        untokened = [child for child in errors if child.has_begun and not child.has_token]
        poison = self._suspects.record_death(engine, model, untokened, was_alone=company.num_untokened == 1)
        for child, error in errors.items():
            if is_over := error.code is ErrorCode.ENGINE_DEAD:
                # A request with a token may also kill engines. This is certain only if it was alone in the engine.
                child.deaths_alone += child.has_begun and company.num_open == 1
                if child.deaths_alone >= MAX_ENGINE_DEATHS_ALONE:
                    poison[child] = child.deaths_alone
            if child not in poison:
                failure = child.open_call.failure(error.code, error.message)
                self.send(child, on.Lost(failure, is_over, self._suspects.is_held(child)))
        for child, num_deaths in poison.items():
            message = f"{num_deaths} engines died while they served this request: {errors[child].message}"
            failure = child.open_call.failure(ErrorCode.POISON_REQUEST, message)
            self.send(child, on.Failed(failure, is_over=errors[child].code is ErrorCode.ENGINE_DEAD))
        self._release_next_suspect(model)

    def _clear_suspicion(self, child: ChildRequest) -> None:
        """Remove `child` from the suspects, and release the next suspect."""
        if child in self._suspects:
            self._suspects.clear(child)
            self._release_next_suspect(child.open_call.model)

    def _release_next_suspect(self, model: str) -> None:
        child = self._suspects.next(model)
        if child is not None:
            self.send(child, on.SuspectReleased())

    def check_suspects(self) -> None:
        """Release the next suspect of a model if no worker can accept the suspect on trial."""
        for model, child in self._suspects.on_trial():
            if child.worker is None and self._publisher.is_blocked(child):
                self._suspects.pass_over(child)
                self._release_next_suspect(model)

    def on_worker_survival(self, survivor: Survivor) -> None:
        """Undo the death of an engine: its worker was only silent."""
        for child in self._suspects.undo_death((survivor.worker, survivor.incarnation)):
            self.send(child, on.SuspectReleased())

    def open_children(self, condition: Callable[[ChildRequest], bool]) -> list[ChildRequest]:
        """Return all open children that meet the condition."""
        children = (child for open_call in self._calls.values() for child in open_call.children)
        return [child for child in children if child.is_open and condition(child)]

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Fail every open call and every later one, because the connection is permanently lost or closed."""
        self._failure = (code, message)
        for open_call in list(self._calls.values()):
            self._fail(open_call, open_call.failure(code, message))

    def mark_worker_lost(self, lost: LostWorker) -> None:
        """Mark the offered requests of a lost worker or incarnation as lost. The queue keeps the others."""
        reason = f"worker {lost.worker} was lost: {lost.reason}"
        if lost.is_death:
            engine = lost.worker, lost.incarnation
            victims = self.open_children(lambda child: child.engine == engine)
            self.on_engine_death(engine, dict.fromkeys(victims, ChunkError(ErrorCode.WORKER_LOST, reason)))
        self._mark_lost_where(
            lambda child: child.worker == lost.worker and (lost.is_final or child.incarnation == lost.incarnation),
            ErrorCode.WORKER_LOST,
            reason,
        )
        for child in self.open_children(lambda child: child.handed_to == lost.worker):
            self.send(child, on.WorkerSilent(child.open_call.failure(ErrorCode.WORKER_LOST, reason)))

    def mark_unheard_lost(self, incarnations: Container[tuple[str, str]], offered_before: float) -> None:
        """Mark requests as lost if their worker's incarnation has sent no presence since its offer.

        Presence and frames use different subjects, so the last frame of a worker may arrive after its final presence.

        Args:
            incarnations: live (worker, incarnation) pairs.
            offered_before: time on `time.monotonic()`. Later offers are too young to expect presence.
        """
        self._mark_lost_where(
            lambda child: (
                child.worker is not None and child.since < offered_before and child.engine not in incarnations
            ),
            ErrorCode.WORKER_LOST,
            "the incarnation of the worker that offered to run the request has ended",
        )

    def mark_lost(self, worker: str, incarnation: str, reason: str) -> None:
        """Mark the requests of one incarnation of a worker as lost."""
        self._mark_lost_where(lambda child: child.engine == (worker, incarnation), ErrorCode.WORKER_LOST, reason)

    def fail_false(self, engine: Engine, key: RequestKey, message: str) -> None:
        """Fail the request of a chunk that is wrong as `protocol_error`, unless another worker has the request."""
        child = self.find(key.request_id, key.attempt, key.child)
        if child is not None and child.engine in (("", ""), engine):
            self.send(child, on.Failed(child.open_call.failure(ErrorCode.PROTOCOL_ERROR, message)))
            child = None
        self.refuse_offer(child, engine[0], key)

    def retry_unreadable(self, engine: Engine, header: FrameHeader | None, message: str) -> None:
        """Resume the requests of a worker whose frame cannot be decoded as new attempts.

        A request is a suspect if its chunk cannot be decoded. If the frame does not show which chunk that is, all
        requests of the worker are suspects. A request that is a suspect at two workers fails.
        """
        worker, _ = engine
        offered, suspects = (frozenset(), frozenset()) if header is None else (header.keys, header.bad_keys)
        for child in self.open_children(
            lambda child: child.engine == engine or (child.worker is None and child.key in offered)
        ):
            at = worker if not suspects or child.key in suspects else None
            self.send(child, on.Lost(child.open_call.failure(ErrorCode.PROTOCOL_ERROR, message), unreadable_at=at))
        # The unreadable frame may also have contained their offers.
        for child in self.open_children(lambda child: child.handed_to == worker):
            self.send(child, on.WorkerSilent(child.open_call.failure(ErrorCode.PROTOCOL_ERROR, message)))

    def mark_all_lost(self, reason: str) -> None:
        """Mark every attempt at a worker as lost, because messages in transit may be lost."""
        self._mark_lost_where(lambda child: child.worker is not None, ErrorCode.FRAMES_LOST, reason)

    def _mark_lost_where(self, is_lost: Callable[[ChildRequest], bool], code: ErrorCode, message: str) -> None:
        for child in self.open_children(is_lost):
            self.send(child, on.Lost(child.open_call.failure(code, message)))
