"""The open calls of one client, on the bus thread: what arrives for them, and what becomes of what is lost.

Invariant: every call that was opened ends once, with a result or with an error. Of each request exactly one attempt is
current, with at most one worker; the client tells every other worker that reports it to stop. What a worker loses is
published again as the next attempt, from where its stream stands. Requests that may have killed an engine are published
one at a time (`rollbus.bus.protocol.queue.suspects`).
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ...schemas.chunk import Chunk, ChunkError
from ...schemas.errors import ErrorCode, RequestError, RequestTimeout
from ...schemas.limits import MAX_ENGINE_DEATHS_ALONE, MAX_REMEMBERED_IDS
from ...schemas.messages import Frame, RequestKey
from ..protocol.attempt import events as on
from ..protocol.attempt.events import Event, Instruction
from ..protocol.attempt.states import OUT, RequestState
from ..protocol.fleet.presence_table import Survivor
from ..protocol.queue.suspects import Company, Engine, Suspects
from .calls import Call
from .children import ChildRequest, OpenCall
from .durations import MAX_MODELS

__all__ = ["AttemptCoordinator", "AttemptStats", "RequestAborter", "RequestPublisher", "is_at"]

logger = logging.getLogger(__name__)

HELD_BACK: Final = (
    "an engine died before it had made a token of this request, and the client tries such requests one at a time"
)


@dataclass(slots=True)
class AttemptStats:
    """Counters of attempts and chunks, as in `ClientStats`."""

    attempts_lost: int = 0
    late_chunks: int = 0


class RequestPublisher(Protocol):
    """What gets requests to the workers."""

    def add(self, child: ChildRequest) -> None:
        """Publish its current attempt."""

    def record_admission(self, child: ChildRequest, waited_s: float) -> None:
        """A worker has it, so long after it was published."""

    def remove(self, child: ChildRequest, refusal: RequestError | None) -> None:
        """Expect nothing more of what was published; `refusal` says why no worker took it."""

    def waiting_reason(self, child: ChildRequest) -> str:
        """What keeps it from being admitted; empty where nothing is known of that."""

    def is_blocked(self, child: ChildRequest) -> bool:
        """Return True if workers serve its model, and none of them can take it now."""


class RequestAborter(Protocol):
    """What reaches a worker that has a request."""

    def abort(self, worker: str, key: RequestKey) -> None:
        """Have it stop the request."""


class AttemptCoordinator:
    """The open calls of one client. `connect` it before use."""

    def __init__(self) -> None:
        self._publisher: RequestPublisher
        self._aborter: RequestAborter
        self._calls: dict[str, OpenCall] = {}
        self._serials = itertools.count()
        # Ids that were used, with the attempt that comes next: what still arrives is of the last one.
        self._next_attempt: dict[str, int] = {}
        self._failure: tuple[ErrorCode, str] | None = None
        self._suspects: Suspects[ChildRequest] = Suspects()
        self.stats = AttemptStats()
        self.retries: dict[str, int] = {}
        """By model: attempts that followed one that was given up. Legs and withdrawn attempts are none."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<AttemptCoordinator calls={len(self._calls)}{f' {self._suspects}' if len(self._suspects) else ''}>"

    def connect(self, publisher: RequestPublisher, aborter: RequestAborter) -> None:
        """Where requests go, and their aborts."""
        self._publisher = publisher
        self._aborter = aborter

    # For the caller's loop, which posts these in order.

    def submit(self, call: Call) -> None:
        """Take on a call; its id is not in use."""
        request_id = call.request.request_id
        open_call = OpenCall(call, serial=next(self._serials), attempt=self._next_attempt.get(request_id, 0))
        self._calls[request_id] = open_call
        if self._failure is not None:
            self._fail(open_call, open_call.failure(*self._failure))
            return
        left_s = max(call.deadline_s - time.monotonic(), 0)
        open_call.timer = asyncio.get_running_loop().call_later(left_s, self._expire, open_call)
        for child in open_call.children:
            self._publisher.add(child)

    def remove(self, call: Call) -> None:
        """Forget `call`, whose caller has left it; what is still open of it is aborted at its worker."""
        request_id = call.request.request_id
        open_call = self._calls.get(request_id)
        if open_call is None or open_call.call is not call:
            return
        del self._calls[request_id]
        if any(child.was_published for child in open_call.children):
            # Put behind all others: the oldest are forgotten first.
            self._next_attempt.pop(request_id, None)
            self._next_attempt[request_id] = open_call.next_attempt
            if len(self._next_attempt) > MAX_REMEMBERED_IDS:
                del self._next_attempt[next(iter(self._next_attempt))]
        self._send_all(open_call, on.Stopped())
        open_call.finish(open_call.failure(ErrorCode.CLIENT_CLOSED, "its caller has left"))
        open_call.clear()
        call.count_dropped()

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls where they stand, as aborted; returns those that were open."""
        aborted = []
        for request_id in request_ids:
            open_call = self._calls.get(request_id)
            if open_call is None or open_call.has_ended:
                continue
            aborted.append(request_id)
            self._send_all(open_call, on.Aborted())
            open_call.finish()
        return aborted

    def stop(self, request_ids: Iterable[str]) -> dict[str, list[int]]:
        """Have these calls end soon, with what they have; returns how many tokens each child has, of those open.

        A child that waits for a worker ends at once. A worker confirms with a terminal chunk, behind what it had sent
        already, perhaps the end of the whole answer. A child whose worker is lost first ends then: no attempt follows.
        """
        stopped = {}
        for request_id in request_ids:
            open_call = self._calls.get(request_id)
            if open_call is None or open_call.has_ended:
                continue
            stopped[request_id] = [child.stream.num_tokens for child in open_call.children]
            open_call.is_stopping = True
            for child in open_call.children:
                if child.is_open and child.worker is not None:
                    self._aborter.abort(child.worker, child.key)
                elif child.is_open:
                    self._end_stopped(child)
        return stopped

    def _end_stopped(self, child: ChildRequest) -> None:
        self.send(child, on.Aborted())
        self._clear_suspicion(child)
        self._finish_if_over(child.open_call)

    def _finish_if_over(self, open_call: OpenCall) -> None:
        if not any(child.is_open for child in open_call.children):
            open_call.finish()

    def _send_all(self, open_call: OpenCall, event: on.Stopped | on.Aborted) -> None:
        """End all children of `open_call`. The next worker that offers an unadmitted child gets an abort."""
        for child in open_call.children:
            self.send(child, event)
            self._clear_suspicion(child)

    def _fail(self, open_call: OpenCall, error: RequestError) -> None:
        """End a call with an error, and its work in the engines, whether or not its caller looks."""
        self._send_all(open_call, on.Stopped())
        open_call.finish(error)

    def _expire(self, open_call: OpenCall) -> None:
        waiting = [child for child in open_call.children if child.is_open and child.worker is None]
        stage = "admission" if waiting else "generation"
        message = f"not finished within {open_call.call.timeout_s:g} s"
        if waiting and (reason := self._waiting_reason(waiting[0])):
            message += f": {reason}"
        self._fail(open_call, RequestTimeout(stage=stage, message=message, request_id=open_call.request_id))

    def _waiting_reason(self, child: ChildRequest) -> str:
        return HELD_BACK if child.state is RequestState.HELD else self._publisher.waiting_reason(child)

    def send(self, child: ChildRequest, event: Event) -> None:
        """Let a child request handle an event, and do what that calls for."""
        self.execute(child, child.handle(event, time.monotonic()))

    def execute(self, child: ChildRequest, instructions: Sequence[Instruction]) -> None:
        """Do all that a child request calls for except publishing."""
        open_call = child.open_call
        child.stop_timer()
        child.note(instructions)
        for instruction in instructions:
            match instruction:
                case on.Schedule() if open_call.is_stopping:
                    self._end_stopped(child)
                case on.Schedule():
                    self._publisher.add(child)
                case on.WakeAt(at):
                    delay_s = max(at - time.monotonic(), 0)
                    child.timer = asyncio.get_running_loop().call_later(delay_s, self.send, child, on.TimePassed())
                case on.RecordAdmission(waited_s):
                    self._publisher.record_admission(child, waited_s)
                case on.Retract(refusal):
                    self._publisher.remove(child, refusal)
                case on.AbortAttempt(worker, key):
                    self._aborter.abort(worker, key)
                case on.CountLoss(is_retried):
                    self._count_loss(open_call.model, is_retried)
                case on.Deliver(chunks):
                    open_call.call.deliver(chunks)
                case on.ClearSuspicion():
                    self._clear_suspicion(child)
                case on.Complete():
                    self._clear_suspicion(child)
                    self._finish_if_over(open_call)
                case on.Fail(error):
                    self._fail(open_call, error)

    def _count_loss(self, model: str, is_retried: bool) -> None:
        self.stats.attempts_lost += 1
        if is_retried and (model in self.retries or len(self.retries) < MAX_MODELS):
            self.retries[model] = self.retries.get(model, 0) + 1

    # For the links.

    def handle_frame(self, worker: str, frame: Frame) -> None:
        """Take a worker's next frame."""
        incarnation, now = frame.incarnation, time.monotonic()
        for key in frame.admitted:
            child = self.find(key.request_id, key.attempt, key.child)
            if child is None:
                self._aborter.abort(worker, key)
            else:
                # Named again, it waits no longer: the engine has it.
                child.may_wait &= child.worker != worker
                self.execute(child, child.handle(on.Offered(worker, incarnation), now))
        dead: dict[ChildRequest, ChunkError] = {}
        for chunk in frame.chunks:
            child = self.find(chunk.request_id, chunk.attempt, chunk.child)
            if child is None or not (
                (child.worker == worker and child.incarnation == incarnation)
                or self._becomes_current(child, worker, incarnation, chunk)
            ):
                self.stats.late_chunks += 1
                if chunk.end is None:
                    self.refuse_offer(child, worker, RequestKey(chunk.request_id, chunk.attempt, chunk.child))
                continue
            error = chunk.error
            if error is not None and error.code is ErrorCode.ENGINE_DEAD and child.worker is not None:
                # Which had a token is known when the whole frame has been read.
                child.has_token |= bool(chunk.token_ids_data)
                dead[child] = error
                continue
            chunks, instructions = child.add(chunk, now)
            child.open_call.call.deliver(chunks)
            if instructions:
                self.execute(child, instructions)
        if dead:
            self.on_engine_death((worker, incarnation), dead)

    def _becomes_current(self, child: ChildRequest, worker: str, incarnation: str, chunk: Chunk) -> bool:
        """Return True if a chunk of `child` counts, although `worker` has not offered that."""
        if child.state not in OUT or child.worker is not None:
            return False
        # An error without an offer is a refusal: the worker never admitted the request.
        if chunk.error is None:
            self.send(child, on.Offered(worker, incarnation))
        return True

    def refuse_offer(self, child: ChildRequest | None, worker: str, key: RequestKey) -> None:
        """Have `worker` stop a request that it must not serve."""
        # Another worker of the same id would hear the abort, too, and may be the one that has this attempt.
        if child is None or child.worker != worker:
            self._aborter.abort(worker, key)

    def find(self, request_id: str, attempt: int, index: int) -> ChildRequest | None:
        """The child whose current attempt this is, while it is open."""
        open_call = self._calls.get(request_id)
        if open_call is None or index >= len(open_call.children):
            return None
        child = open_call.children[index]
        return child if child.is_open and child.stream.attempt == attempt else None

    def on_engine_death(self, engine: Engine, errors: Mapping[ChildRequest, ChunkError]) -> None:
        """Give up these requests of an engine that died; those without a token may be the cause."""
        if not errors:
            return
        # A worker serves one model.
        model = next(iter(errors)).open_call.model
        # What waited there for a slot was not in the engine.
        here = self.open_children(lambda child: is_at(child, engine) and child.has_begun)
        company = self._suspects.at_death(engine, Company(len(here), sum(not child.has_token for child in here)))
        untokened = [child for child in errors if child.has_begun and not child.has_token]
        poison = self._suspects.record_death(engine, model, untokened, was_alone=company.num_untokened == 1)
        for child, error in errors.items():
            if is_over := error.code is ErrorCode.ENGINE_DEAD:
                # A request that has a token may kill engines, too; that shows only where nothing else can be the cause.
                child.deaths_alone += child.has_begun and company.num_open == 1
                if child.deaths_alone >= MAX_ENGINE_DEATHS_ALONE:
                    poison[child] = child.deaths_alone
            if child not in poison:
                failure = child.open_call.failure(error.code, error.message)
                self.send(child, on.Lost(failure, is_over, self._suspects.is_held(child)))
        for child, num_deaths in poison.items():
            self.stats.attempts_lost += child.is_open
            message = f"{num_deaths} engines died while they served it: {errors[child].message}"
            failure = child.open_call.failure(ErrorCode.POISON_REQUEST, message)
            self.send(child, on.Failed(failure, is_over=errors[child].code is ErrorCode.ENGINE_DEAD))
        self._release_next_suspect(model)

    def _clear_suspicion(self, child: ChildRequest) -> None:
        """Suspect `child` no more; the next suspect may be tried."""
        if child in self._suspects:
            self._suspects.clear(child)
            self._release_next_suspect(child.open_call.model)

    def _release_next_suspect(self, model: str) -> None:
        child = self._suspects.next(model)
        if child is not None:
            self.send(child, on.SuspectReleased())

    def check_suspects(self) -> None:
        """Try the next suspects where the one on trial can be taken by no worker, and would hold them up for long."""
        for model, child in self._suspects.on_trial():
            if child.worker is None and self._publisher.is_blocked(child):
                self._suspects.pass_over(child)
                self._release_next_suspect(model)

    def on_worker_survival(self, survivor: Survivor) -> None:
        """Take back that an engine died: its worker was only not heard."""
        for child in self._suspects.undo_death((survivor.worker, survivor.incarnation)):
            self.send(child, on.SuspectReleased())

    def open_children(self, condition: Callable[[ChildRequest], bool]) -> list[ChildRequest]:
        """All children that have not ended and are meant."""
        children = (child for open_call in self._calls.values() for child in open_call.children)
        return [child for child in children if child.is_open and condition(child)]

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Fail every call, and all that are still submitted: the connection is lost for good, or closed."""
        self._failure = (code, message)
        for open_call in list(self._calls.values()):
            self._fail(open_call, open_call.failure(code, message))


def is_at(child: ChildRequest, engine: Engine) -> bool:
    """Return True if this life of a worker has the child."""
    return (child.worker, child.incarnation) == engine
