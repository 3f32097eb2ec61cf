"""The open calls of one client, on the bus thread: what arrives for them, and what becomes of what is lost.

Invariant: every call that was opened ends once, with a result or with an error. Of each request exactly one attempt is
current, with at most one worker, and whoever reports with another is told to stop. What a worker loses is published
again as the next attempt, from where its stream stands.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec.structs import force_setattr

from bus.client.calls import Call
from bus.client.children import Child, LiveCall, Way
from bus.client.durations import MAX_MODELS
from bus.protocol.fleet_view import Gone
from bus.protocol.states import RequestState
from schemas.chunk import Chunk, ChunkError
from schemas.errors import ErrorCode, RemoteProtocolError, RequestError, RequestTimeout, request_error
from schemas.limits import MAX_ATTEMPTS, MAX_ENGINE_DEATHS, MAX_REMEMBERED_IDS
from schemas.messages import Frame, RequestKey

__all__ = ["Exchange", "ExchangeStats", "Outlet", "Stopper"]

logger = logging.getLogger(__name__)

RESUMED: Final = frozenset(
    {
        ErrorCode.WORKER_LOST,
        ErrorCode.WORKER_STOPPED,
        ErrorCode.WORKER_FENCED,
        ErrorCode.CLIENT_LOST,
        ErrorCode.OVER_BUDGET,
        ErrorCode.FRAMES_LOST,
        ErrorCode.ENGINE_DEAD,
        ErrorCode.KV_TRANSFER_FAILED,
    }
)
"""Failures of an attempt that say nothing about the next one."""
PASSED_ON: Final = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.WEIGHTS_TOO_OLD})
"""What a worker says of a request that it was handed directly, and that another may take."""


@dataclass(slots=True)
class ExchangeStats:
    """Counters of attempts and chunks."""

    attempts_lost: int = 0
    """Attempts given up because of their worker or of what was under way; another attempt or an error followed."""
    late_chunks: int = 0
    """Chunks of calls and attempts that had ended; their workers were told to stop."""


class Outlet(Protocol):
    """What gets requests to the workers."""

    def add(self, child: Child) -> None:
        """Publish its current attempt."""

    def admitted(self, child: Child) -> None:
        """A worker has it."""

    def remove(self, child: Child, refusal: RequestError | None = None) -> None:
        """Its current attempt, or leg, is over; `refusal` says why nobody took it."""

    def hindrance(self, child: Child) -> str:
        """What keeps it from being admitted; empty where nothing is known of that."""


class Stopper(Protocol):
    """What reaches a worker that has a request."""

    def abort(self, worker: str, key: RequestKey) -> None:
        """Have it stop the request."""


class Exchange:
    """The open calls of one client. `connect` it before use."""

    def __init__(self) -> None:
        self._outlet: Outlet
        self._stopper: Stopper
        self._calls: dict[str, LiveCall] = {}
        self._serials = itertools.count()
        # Ids that were used, with the attempt that comes next: what still arrives is of the last one.
        self._next_attempt: dict[str, int] = {}
        self._broken: tuple[ErrorCode, str] | None = None
        self.stats = ExchangeStats()
        self.retries: dict[str, int] = {}
        """By model: attempts that followed one that was given up. Legs and withdrawn attempts are none."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Exchange calls={len(self._calls)}>"

    def connect(self, outlet: Outlet, stopper: Stopper) -> None:
        """Where requests go, and their aborts."""
        self._outlet = outlet
        self._stopper = stopper

    # For the caller's loop, which posts these in order.

    def submit(self, call: Call) -> None:
        """Take on a call; its id is not in use."""
        request_id = call.request.request_id
        live = LiveCall(call, serial=next(self._serials), attempt=self._next_attempt.get(request_id, 0))
        self._calls[request_id] = live
        if self._broken is not None:
            self._fail(live, live.failure(*self._broken))
            return
        left_s = max(call.deadline_s - time.monotonic(), 0)
        live.timer = asyncio.get_running_loop().call_later(left_s, self._expire, live)
        for child in live.children:
            self._outlet.add(child)

    def drop(self, call: Call) -> None:
        """Forget `call`, whose caller has left it; what is still open of it is aborted at its worker."""
        request_id = call.request.request_id
        live = self._calls.get(request_id)
        if live is None or live.call is not call:
            return
        del self._calls[request_id]
        if any(child.is_sent or child.stream.attempt > live.first_attempt for child in live.children):
            # Put behind all others: the oldest are forgotten first.
            self._next_attempt.pop(request_id, None)
            self._next_attempt[request_id] = live.next_attempt
            if len(self._next_attempt) > MAX_REMEMBERED_IDS:
                del self._next_attempt[next(iter(self._next_attempt))]
        self._stop_children(live)
        live.finish(live.failure(ErrorCode.CLIENT_CLOSED, "its caller has left"))
        live.forget()
        call.forget()

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End these calls where they stand, as aborted; returns those that were open."""
        aborted = []
        for request_id in request_ids:
            live = self._calls.get(request_id)
            if live is None or live.has_ended:
                continue
            aborted.append(request_id)
            open_children = [child for child in live.children if child.is_open]
            self._stop_children(live)
            for child in open_children:
                live.call.deliver([child.stream.abort()])
            live.finish()
        return aborted

    def _stop_children(self, live: LiveCall) -> None:
        """Nothing more is to come of `live`; where nobody has admitted it, who does so later is told."""
        for child in live.children:
            if child.is_open:
                self._outlet.remove(child)
                self._abort_if_held(child)
                child.finish()

    def _abort_if_held(self, child: Child) -> None:
        if child.worker is not None:
            self._stopper.abort(child.worker, child.key)

    def _fail(self, live: LiveCall, error: RequestError) -> None:
        """End a call with an error, and its work in the engines, whether or not its caller looks."""
        self._stop_children(live)
        live.finish(error)

    def _expire(self, live: LiveCall) -> None:
        waiting = [child for child in live.children if child.is_open and child.worker is None]
        stage = "admission" if waiting else "generation"
        message = f"not finished within {live.call.timeout_s:g} s"
        if waiting and (hindrance := self._outlet.hindrance(waiting[0])):
            message += f": {hindrance}"
        self._fail(live, RequestTimeout(stage=stage, message=message, request_id=live.request_id))

    # For the links.

    def take(self, worker: str, frame: Frame) -> None:
        """Take a worker's next frame."""
        for key in frame.admitted:
            child = self._find(key.request_id, key.attempt, key.child)
            if child is None or not self._admit(child, worker, frame.incarnation):
                self._stopper.abort(worker, key)
        for chunk in frame.chunks:
            child = self._find(chunk.request_id, chunk.attempt, chunk.child)
            if child is not None and child.worker is None and chunk.error is not None:
                # Refused: it was never admitted.
                self._fail_attempt(child, chunk.error)
            elif child is not None and self._admit(child, worker, frame.incarnation):
                self._take_chunk(child, chunk)
            else:
                self.stats.late_chunks += 1
                if chunk.end is None:
                    self._stopper.abort(worker, RequestKey(chunk.request_id, chunk.attempt, chunk.child))

    def _find(self, request_id: str, attempt: int, index: int) -> Child | None:
        """The child whose current attempt this is, while it is open."""
        live = self._calls.get(request_id)
        if live is None or index >= len(live.children):
            return None
        child = live.children[index]
        return child if child.is_open and child.stream.attempt == attempt else None

    def _admit(self, child: Child, worker: str, incarnation: str) -> bool:
        if child.worker is not None:
            return child.worker == worker and child.incarnation == incarnation
        child.admit(worker, incarnation)
        self._outlet.admitted(child)
        return True

    def _take_chunk(self, child: Child, chunk: Chunk) -> None:
        if chunk.error is not None:
            self._fail_attempt(child, chunk.error)
            return
        live = child.live
        # Whatever stands there: only the subject, which permissions bind, says who speaks.
        force_setattr(chunk, "worker_id", child.worker)
        try:
            delivered = child.stream.add(chunk)
        except RemoteProtocolError as exc:
            self.fail(child, live.failure(ErrorCode.PROTOCOL_ERROR, f"worker {child.worker}: {exc}"))
            return
        self._deliver(child, delivered)
        if child.stream.is_prefilled:
            self._outlet.remove(child)
            child.next_leg()
            self._outlet.add(child)

    def _deliver(self, child: Child, chunks: list[Chunk]) -> None:
        live = child.live
        live.call.deliver(chunks)
        if child.stream.end is not None:
            self._outlet.remove(child)
            child.finish()
            if not any(other.is_open for other in live.children):
                live.finish()

    def _fail_attempt(self, child: Child, error: ChunkError) -> None:
        child.released()
        failure = request_error(
            error.code,
            error.message,
            request_id=child.live.request_id,
            field=error.field,
            problem=error.problem,
            allowed=error.allowed,
        )
        self.refuse(child, failure)

    # For whoever finds that something is lost.

    def fail(self, child: Child, error: RequestError) -> None:
        """End the call of `child` with `error`; without effect once it has ended."""
        if child.is_open:
            self._fail(child.live, error)

    def refuse(self, child: Child, error: RequestError) -> None:
        """An attempt came back with `error`: end the call, or go on with the next where that may fare better."""
        is_full = error.code is ErrorCode.QUEUE_FULL
        # What a prefill worker cannot do, a decode worker may.
        is_no_judge = child.way is Way.PREFILL and error.code is ErrorCode.UNSUPPORTED
        if child.direct_to is not None and (error.code in PASSED_ON or is_no_judge):
            self.withdraw(child, error)
        elif error.code in RESUMED or (is_full and not child.is_first_attempt):
            self.lose(child, error)
        else:
            self.fail(child, error)

    def withdraw(self, child: Child, error: RequestError) -> None:
        """Publish a request that nobody took again; that does not count as an attempt."""
        if child.is_open and child.state is not RequestState.WAITING:
            self._outlet.remove(child, error)
            child.withdraw(error)
            self._outlet.add(child)

    def lose(self, child: Child, error: RequestError) -> None:
        """Give up a child's current attempt, whose worker may be gone, and line up the next."""
        if not child.is_open or child.state is RequestState.WAITING:
            return
        self.stats.attempts_lost += 1
        self._outlet.remove(child)
        self._abort_if_held(child)
        if error.code is ErrorCode.ENGINE_DEAD:
            child.engine_deaths += 1
        if child.engine_deaths >= MAX_ENGINE_DEATHS:
            message = f"{child.engine_deaths} engines died while they served it: {error.message}"
            self._fail(child.live, child.live.failure(ErrorCode.POISON_REQUEST, message))
        elif child.stream.num_attempts >= MAX_ATTEMPTS:
            self._fail(child.live, error)
        else:
            last_chunk = child.give_up(error)
            if last_chunk is None:
                self._count_retry(child.live.model)
                self._outlet.add(child)
            else:
                self._deliver(child, [last_chunk])

    def _count_retry(self, model: str) -> None:
        if model in self.retries or len(self.retries) < MAX_MODELS:
            self.retries[model] = self.retries.get(model, 0) + 1

    def worker_gone(self, gone: Gone) -> None:
        """Give up what a lost worker, or a lost life of one, had. The queue keeps what it had not offered."""
        reason = f"worker {gone.worker} is gone: {gone.reason}"
        self._lose_where(
            lambda child: child.worker == gone.worker and (gone.is_final or child.incarnation == gone.incarnation),
            ErrorCode.WORKER_LOST,
            reason,
        )
        for child in self._open_children(lambda child: child.worker is None and child.direct_to == gone.worker):
            self.withdraw(child, child.live.failure(ErrorCode.WORKER_LOST, reason))

    def lose_unheard(self, lives: Container[tuple[str, str]], offered_before: float) -> None:
        """Give up what a life of a worker has of which nothing was heard since it offered to run it.

        Its last frame may be handled behind the announcement that it is gone, as these come on different subjects.

        Args:
            lives: worker and incarnation of those that are there.
            offered_before: on `time.monotonic()`; offers after that are too young for an announcement.
        """
        self._lose_where(
            lambda child: (
                child.worker is not None
                and child.since < offered_before
                and (child.worker, child.incarnation) not in lives
            ),
            ErrorCode.WORKER_LOST,
            "the life of the worker that offered to run it is over",
        )

    def lose_at(self, worker: str, reason: str) -> None:
        """Give up what a worker has in its hands."""
        self._lose_where(lambda child: child.worker == worker, ErrorCode.WORKER_LOST, reason)

    def lose_all(self, reason: str) -> None:
        """Give up every attempt that a worker has in its hands: what was under way may be lost."""
        self._lose_where(lambda child: child.worker is not None, ErrorCode.FRAMES_LOST, reason)

    def _lose_where(self, is_lost: Callable[[Child], bool], code: ErrorCode, message: str) -> None:
        for child in self._open_children(is_lost):
            self.lose(child, child.live.failure(code, message))

    def _open_children(self, are_meant: Callable[[Child], bool]) -> list[Child]:
        children = (child for live in self._calls.values() for child in live.children)
        return [child for child in children if child.is_open and are_meant(child)]

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """Fail every call, and all that are still submitted: the connection is lost for good, or closed."""
        self._broken = (code, message)
        for live in list(self._calls.values()):
            self._fail(live, live.failure(code, message))
