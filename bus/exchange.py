"""A client's traffic with the workers: requests out, frames in, aborts where nobody waits any more.

Invariant: every call that was opened ends, with a result or with an error. What a worker or the connection loses is
published again as the next attempt, from where its stream stands. Of each request exactly one attempt is current, and
any worker that reports with another is told to stop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from bus.calls import Call, ChildCall
from bus.connection import Connection, publish
from bus.fleet import Fleet
from bus.protocol.fleet_view import Gone
from bus.protocol.link import Link
from bus.subjects import Subjects
from schemas.chunk import Chunk, ChunkError
from schemas.errors import (
    BusBroken,
    ErrorCode,
    RemoteProtocolError,
    RequestError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    request_error,
)
from schemas.limits import DEFAULT_TIMEOUT_S, MAX_ATTEMPTS, MAX_ENGINE_DEATHS, MAX_REMEMBERED_IDS
from schemas.messages import WIRE_VERSION, LinkMessage, RequestKey, RequestMessage, decode_frame, encode
from schemas.request import GenerateRequest, lane_of

__all__ = ["ClientStats", "Exchange"]

logger = logging.getLogger(__name__)

RESUMED = frozenset(
    {
        ErrorCode.WORKER_LOST,
        ErrorCode.WORKER_STOPPED,
        ErrorCode.FRAMES_LOST,
        ErrorCode.ENGINE_DEAD,
        ErrorCode.QUEUE_FULL,
    }
)
"""Failures of an attempt that say nothing about the next one. `queue_full` is among them only for later attempts."""
ADMISSION_TIMEOUT_S = 10.0
"""A live worker admits what it is handed within milliseconds, a full one within seconds: after that it never came."""
MAX_KEYS_PER_MESSAGE = 256
"""Of an abort message: 40 KiB with the longest ids, below any server's `max_payload`."""
LOOK_AGAIN_S = 0.5
"""How often requests that wait for a worker are looked at, besides whenever the fleet changes."""


@dataclass(slots=True)
class ClientStats:
    """Counters since the client was connected."""

    requests: int = 0
    """Messages published: one for each child of each request."""
    frames: int = 0
    attempts_lost: int = 0
    """Attempts given up because their worker or frames were lost; each was followed by another or by an error."""
    late_chunks: int = 0
    """Chunks of calls and attempts that had ended; their workers were told to stop."""
    duplicate_frames: int = 0
    missing_frames: int = 0
    """Gaps in a link; what was under way on it was asked for again."""
    bad_messages: int = 0
    """Frames that did not decode."""


class Exchange:
    """The open calls of one client and its links to workers.

    Args:
        nats: connected.
        client: this client's name in subjects.
        worker_grace_s: how long a lost request may wait for another worker.
    """

    def __init__(self, nats: Connection, subjects: Subjects, client: str, *, worker_grace_s: float) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client = client
        self._worker_grace_s = worker_grace_s
        self._calls: dict[str, Call] = {}
        self._links: dict[str, Link] = {}
        # Ids that were given up while open, with the attempt that comes next: what still arrives is of the last one.
        self._next_attempt: dict[str, int] = {}
        # Aborts on their way, by worker; bounded by the requests in flight.
        self._aborts: dict[str, list[RequestKey]] = {}
        self._aborts_wanted = asyncio.Event()
        # Children whose next attempt waits for a worker; bounded likewise.
        self._lost: deque[tuple[Call, ChildCall]] = deque()
        self._lost_wanted = asyncio.Event()
        self.stats = ClientStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Exchange {self._client} calls={len(self._calls)} links={len(self._links)}>"

    async def open(self, request: GenerateRequest, fleet: Fleet, *, streams: bool) -> Call:
        """Publish `request`; the caller must `drop` the call when it is done with it.

        Raises:
            RequestRejected: nothing was published, or nothing that is not aborted again.
            RequestFailed: the connection was lost for good, or the client closed, before it was published.
            BusBroken: the connection is down and its buffer is full.
        """
        request_id = request.request_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message="this client has a live request of this id",
                request_id=request_id,
            )
        call = Call(request, attempt=self._next_attempt.get(request_id, 0), streams=streams)
        self._calls[request_id] = call
        try:
            call.model = await fleet.resolve_model(request.model)
            if call.error is not None:
                raise call.error
            timeout_s = request.timeout_s if request.timeout_s is not None else DEFAULT_TIMEOUT_S
            call.timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, call, timeout_s)
            for child in call.children:
                await self._publish(call, child)
        except BaseException:
            self.drop(call)
            raise
        return call

    async def _publish(self, call: Call, child: ChildCall) -> None:
        message = encode(
            RequestMessage(
                client=self._client,
                attempt=child.stream.attempt,
                child=child.child,
                request=msgspec.Raw(encode(child.to_publish)),
            )
        )
        if len(message) > self._nats.max_payload:
            raise RequestRejected(
                code=ErrorCode.TOO_LARGE,
                message=f"{len(message)} bytes are over the server's max_payload of {self._nats.max_payload}",
                request_id=call.request.request_id,
            )
        subject = self._subjects.request(self._client, call.model, lane_of(call.request.priority))
        child.publish()
        await publish(self._nats, subject, message)
        self.stats.requests += 1

    def drop(self, call: Call) -> None:
        """Forget `call`; what is still open of it is aborted at its worker. Safe to repeat."""
        request_id = call.request.request_id
        if self._calls.get(request_id) is not call:
            return
        del self._calls[request_id]
        if call.timer is not None:
            call.timer.cancel()
        was_published = any(child.is_published or child.stream.num_attempts > 1 for child in call.children)
        if request_id in self._next_attempt or (was_published and any(child.is_open for child in call.children)):
            # Put behind all others: the oldest are forgotten first.
            self._next_attempt.pop(request_id, None)
            self._next_attempt[request_id] = call.next_attempt
            if len(self._next_attempt) > MAX_REMEMBERED_IDS:
                del self._next_attempt[next(iter(self._next_attempt))]
        self._stop_children(call)

    def _stop_children(self, call: Call) -> None:
        """Have what is open of `call` aborted; where nobody has admitted it, who does so later is told."""
        for child in call.children:
            if child.is_open and child.worker is not None:
                self._abort(child.worker, child.key)
                child.worker = None

    def _fail(self, call: Call, error: RequestError) -> None:
        """End a call with an error, and its work in the engines, whether or not its caller looks."""
        call.fail(error)
        self._stop_children(call)

    def close(self) -> None:
        """Fail and drop every call."""
        for call in list(self._calls.values()):
            self._fail(call, _failure(call, ErrorCode.CLIENT_CLOSED, "the client was closed"))
            self.drop(call)

    async def receive(self, message: Msg) -> None:
        """Take a frame from a worker."""
        worker = message.subject.rpartition(".")[2]
        try:
            frame = decode_frame(message.data)
        except RemoteProtocolError as exc:
            self.stats.bad_messages += 1
            logger.warning("frame.bad worker=%s error=%s", worker, exc)
            return
        self.stats.frames += 1
        link = self._links.setdefault(worker, Link())
        if link.incarnation not in (None, frame.incarnation):
            self._lose_at(worker, ErrorCode.WORKER_LOST, f"worker {worker} came back as a new incarnation")
        try:
            if not link.receive(frame):
                self.stats.duplicate_frames += 1
                return
        except RemoteProtocolError as exc:
            self.stats.missing_frames += 1
            self._lose_at(worker, ErrorCode.FRAMES_LOST, f"from worker {worker}: {exc}")
        for key in frame.admitted:
            found = self._find(key)
            if found is None or not found[1].admit(worker):
                self._abort(worker, key)
        for chunk in frame.chunks:
            key = RequestKey(chunk.request_id, chunk.attempt, chunk.child)
            found = self._find(key)
            if found is not None and found[1].admit(worker):
                self._take(*found, chunk)
                continue
            self.stats.late_chunks += 1
            if chunk.end is None:
                self._abort(worker, key)

    def _find(self, key: RequestKey) -> tuple[Call, ChildCall] | None:
        """The call and child whose current attempt this is."""
        call = self._calls.get(key.request_id)
        if call is None or call.has_ended or key.child >= len(call.children):
            return None
        child = call.children[key.child]
        return (call, child) if child.stream.attempt == key.attempt else None

    def _take(self, call: Call, child: ChildCall, chunk: Chunk) -> None:
        if chunk.error is not None:
            self._fail_attempt(call, child, chunk.error)
            return
        try:
            call.deliver(child.stream.add(chunk))
        except RemoteProtocolError as exc:
            self._fail(call, _failure(call, ErrorCode.PROTOCOL_ERROR, f"worker {child.worker}: {exc}"))

    def _fail_attempt(self, call: Call, child: ChildCall, error: ChunkError) -> None:
        failure = request_error(
            error.code,
            error.message,
            request_id=call.request.request_id,
            field=error.field,
            problem=error.problem,
            allowed=error.allowed,
        )
        is_first_refusal = error.code is ErrorCode.QUEUE_FULL and child.stream.num_attempts == 1
        if error.code in RESUMED and not is_first_refusal:
            self._lose(call, child, failure)
        else:
            self._fail(call, failure)

    def _lose(self, call: Call, child: ChildCall, error: RequestError) -> None:
        """Give up a child's current attempt, whose worker may be gone, and line up the next."""
        if call.has_ended or not child.is_open:
            return
        self.stats.attempts_lost += 1
        if child.worker is not None:
            self._abort(child.worker, child.key)
        if error.code is ErrorCode.ENGINE_DEAD:
            child.engine_deaths += 1
        if child.engine_deaths >= MAX_ENGINE_DEATHS:
            message = f"{child.engine_deaths} engines died while they served it: {error.message}"
            self._fail(call, _failure(call, ErrorCode.POISON_REQUEST, message))
        elif child.stream.num_attempts >= MAX_ATTEMPTS:
            self._fail(call, error)
        else:
            more = child.give_up(error)
            if isinstance(more, Chunk):
                call.deliver([more])
            else:
                self._lost.append((call, child))
                self._lost_wanted.set()

    async def republish(self, fleet: Fleet) -> None:
        """Publish the next attempts of what was lost, once a worker serves them, until cancelled."""
        while True:
            await self._lost_wanted.wait()
            self._lost_wanted.clear()
            while self._lost:
                for _ in range(len(self._lost)):
                    await self._publish_again(*self._lost.popleft(), fleet)
                if self._lost:
                    await fleet.wait_for_change(LOOK_AGAIN_S)

    async def _publish_again(self, call: Call, child: ChildCall, fleet: Fleet) -> None:
        if call.has_ended or child.is_published:
            return
        try:
            if self._nats.is_connected and fleet.is_served(call.model):
                await self._publish(call, child)
                return
        except RequestError as exc:
            self._fail(call, exc)
            return
        except BusBroken as exc:
            child.is_published = False
            logger.warning("request.waits error=%s", exc)
        if child.waited_s > self._worker_grace_s and child.last_error is not None:
            self._fail(call, child.last_error)
        else:
            self._lost.append((call, child))

    def worker_gone(self, gone: Gone) -> None:
        """Give up what a lost worker had, or may have had, in its hands."""
        link = self._links.get(gone.worker)
        if gone.is_final:
            self._links.pop(gone.worker, None)
        if gone.is_final or link is None or link.incarnation == gone.incarnation:
            self._lose_at(gone.worker, ErrorCode.WORKER_LOST, f"worker {gone.worker} is gone: {gone.reason}")
        # Another worker may hold what nobody has admitted; that one is told to stop when it reports.
        self._lose_where(
            lambda call, child: call.model == gone.model and child.is_published and child.worker is None,
            ErrorCode.WORKER_LOST,
            f"not admitted when worker {gone.worker} was lost: {gone.reason}",
        )

    def lose_unadmitted(self) -> None:
        """Give up what was published long ago and never admitted: it, or its admission, was lost on the way."""
        self._lose_where(
            lambda _, child: child.is_published and child.worker is None and child.waited_s > ADMISSION_TIMEOUT_S,
            ErrorCode.WORKER_LOST,
            f"not admitted within {ADMISSION_TIMEOUT_S:g} s",
        )

    def lose_all(self, message: str) -> None:
        """Give up every attempt under way: frames are lost, for certain or perhaps."""
        self._lose_where(lambda _, child: child.is_published, ErrorCode.FRAMES_LOST, message)

    def _lose_at(self, worker: str, code: ErrorCode, message: str) -> None:
        self._lose_where(lambda _, child: child.worker == worker, code, message)

    def _lose_where(self, is_lost: Callable[[Call, ChildCall], bool], code: ErrorCode, message: str) -> None:
        for call in list(self._calls.values()):
            for child in call.children:
                if is_lost(call, child):
                    self._lose(call, child, _failure(call, code, message))

    def fail_all(self, message: str) -> None:
        """Fail every call: the connection is lost for good."""
        for call in list(self._calls.values()):
            self._fail(call, _failure(call, ErrorCode.FRAMES_LOST, message))

    def _abort(self, worker: str, key: RequestKey) -> None:
        self._aborts.setdefault(worker, []).append(key)
        self._aborts_wanted.set()

    async def send_aborts(self) -> None:
        """Publish aborts as they come up, until cancelled."""
        while True:
            await self._aborts_wanted.wait()
            self._aborts_wanted.clear()
            await self.flush_aborts()

    async def flush_aborts(self) -> None:
        """Publish the aborts that wait; where the connection is down, workers are told when their next chunk comes."""
        aborts, self._aborts = self._aborts, {}
        for worker, keys in aborts.items():
            subject = self._subjects.link(self._client, worker)
            try:
                for first in range(0, len(keys), MAX_KEYS_PER_MESSAGE):
                    message = LinkMessage(WIRE_VERSION, keys[first : first + MAX_KEYS_PER_MESSAGE])
                    await publish(self._nats, subject, encode(message))
            except BusBroken as exc:
                logger.warning("aborts.lost worker=%s count=%s error=%s", worker, len(keys), exc)

    def _expire(self, call: Call, timeout_s: float) -> None:
        self._fail(
            call,
            RequestTimeout(
                stage="admission" if call.is_unadmitted else "generation",
                message=f"not finished within {timeout_s:g} s",
                request_id=call.request.request_id,
            ),
        )


def _failure(call: Call, code: ErrorCode, message: str) -> RequestFailed:
    return RequestFailed(code=code, message=message, request_id=call.request.request_id)
