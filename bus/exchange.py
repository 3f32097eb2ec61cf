"""A client's traffic with the workers: requests out, frames in, aborts where nobody waits any more.

Invariant: every call that was opened ends, with a result or with an error: by its terminal chunks, by its deadline, or
because its worker or the connection was lost. Nothing is mistaken for a result that is not one.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from bus.calls import Call
from bus.connection import Connection, publish
from bus.fleet import Fleet
from bus.protocol.fleet_view import Gone
from bus.protocol.link import Link
from bus.subjects import Subjects
from schemas.errors import BusBroken, ErrorCode, RemoteProtocolError, RequestFailed, RequestRejected, RequestTimeout
from schemas.limits import DEFAULT_TIMEOUT_S, MAX_REMEMBERED_IDS
from schemas.messages import WIRE_VERSION, LinkMessage, RequestKey, RequestMessage, decode_frame, encode
from schemas.request import GenerateRequest, lane_of

__all__ = ["ClientStats", "Exchange"]

logger = logging.getLogger(__name__)

ADMISSION_WAIT_S = 1.0
"""A live worker admits what it is handed within milliseconds."""


@dataclass(slots=True)
class ClientStats:
    """Counters since the client was connected."""

    requests: int = 0
    """Messages published: one for each child of each request."""
    frames: int = 0
    late_chunks: int = 0
    """Chunks of calls that had ended; their workers were told to stop."""
    duplicate_frames: int = 0
    missing_frames: int = 0
    """Gaps in a link; each failed the calls on it."""
    bad_messages: int = 0
    """Frames that did not decode."""


class Exchange:
    """The open calls of one client and its links to workers.

    Args:
        nats: connected.
        client: this client's name in subjects.
    """

    def __init__(self, nats: Connection, subjects: Subjects, client: str) -> None:
        self._nats = nats
        self._subjects = subjects
        self._client = client
        self._calls: dict[str, Call] = {}
        self._links: dict[str, Link] = {}
        # Ids that were given up while open, with the attempt that comes next: what still arrives is of the last one.
        self._next_attempt: dict[str, int] = {}
        # Aborts on their way, by worker; bounded by the requests in flight.
        self._aborts: dict[str, list[RequestKey]] = {}
        self._aborts_wanted = asyncio.Event()
        self.stats = ClientStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Exchange {self._client} calls={len(self._calls)} links={len(self._links)}>"

    async def open(
        self,
        request: GenerateRequest,
        fleet: Fleet,
        *,
        streams: bool,
        on_end: Callable[[Call], None] | None = None,
    ) -> Call:
        """Publish `request`; the caller must `drop` the call when it is done with it.

        Raises:
            RequestRejected: nothing was published, or nothing that is not aborted again.
            BusBroken: the connection is down and its buffer is full.
        """
        request_id = request.request_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message="this client has a live request of this id",
                request_id=request_id,
            )
        call = Call(request, attempt=self._next_attempt.pop(request_id, 0), streams=streams, on_end=on_end)
        self._calls[request_id] = call
        try:
            model = await fleet.resolve_model(request.model)
            subject = self._subjects.request(self._client, model, lane_of(request.priority))
            messages = self._messages(call)
            timeout_s = request.timeout_s if request.timeout_s is not None else DEFAULT_TIMEOUT_S
            call.timer = asyncio.get_running_loop().call_later(timeout_s, _expire, call, timeout_s)
            for message in messages:
                await publish(self._nats, subject, message)
                self.stats.requests += 1
        except BaseException:
            self.drop(call)
            raise
        return call

    def _messages(self, call: Call) -> list[bytes]:
        messages = [
            encode(
                RequestMessage(
                    client=self._client, attempt=call.attempt, child=child, request=msgspec.Raw(encode(request))
                )
            )
            for child, request in enumerate(call.children)
        ]
        largest, limit = max(map(len, messages)), self._nats.max_payload
        if largest > limit:
            raise RequestRejected(
                code=ErrorCode.TOO_LARGE,
                message=f"{largest} bytes are over the server's max_payload of {limit}",
                request_id=call.request.request_id,
            )
        return messages

    def drop(self, call: Call) -> None:
        """Forget `call`; what is still open of it is aborted at its worker. Safe to repeat."""
        request_id = call.request.request_id
        if self._calls.get(request_id) is not call:
            return
        del self._calls[request_id]
        if call.timer is not None:
            call.timer.cancel()
        still_open = call.open_children()
        if still_open:
            self._next_attempt[request_id] = call.attempt + 1
            if len(self._next_attempt) > MAX_REMEMBERED_IDS:
                del self._next_attempt[next(iter(self._next_attempt))]
        for child in still_open:
            worker = call.workers[child]
            # Without a worker there is nobody to tell yet: who admits it later is told to stop.
            if worker is not None:
                self._abort(worker, call.key(child))

    def close(self) -> None:
        """Fail and drop every call."""
        for call in list(self._calls.values()):
            self.drop(call)
            call.fail(_failure(call, ErrorCode.CLIENT_CLOSED, "the client was closed"))

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
        try:
            if not self._links.setdefault(worker, Link()).receive(frame):
                self.stats.duplicate_frames += 1
                return
        except RemoteProtocolError as exc:
            self.stats.missing_frames += 1
            self._fail_at(worker, ErrorCode.FRAMES_LOST, f"from worker {worker}: {exc}")
        for key in frame.admitted:
            call = self._call_of(key)
            if call is None:
                self._abort(worker, key)
            elif call.workers[key.child] is None:
                call.workers[key.child] = worker
        for chunk in frame.chunks:
            key = RequestKey(chunk.request_id, chunk.attempt, chunk.child)
            call = self._call_of(key)
            if call is not None:
                call.receive(chunk, worker)
                continue
            self.stats.late_chunks += 1
            if chunk.end is None:
                self._abort(worker, key)

    def _call_of(self, key: RequestKey) -> Call | None:
        call = self._calls.get(key.request_id)
        return call if call is not None and key.attempt == call.attempt and key.child < len(call.children) else None

    def worker_gone(self, gone: Gone) -> None:
        """Fail what a lost worker had, or may have had, in its hands."""
        link = self._links.get(gone.worker)
        if link is None or link.incarnation == gone.incarnation:
            self._fail_at(gone.worker, ErrorCode.WORKER_LOST, f"worker {gone.worker} is gone: {gone.reason}")
        for call in list(self._calls.values()):
            if call.is_unadmitted and call.age_s > ADMISSION_WAIT_S:
                call.fail(_failure(call, ErrorCode.WORKER_LOST, f"not admitted when worker {gone.worker} was lost"))

    def _fail_at(self, worker: str, code: ErrorCode, message: str) -> None:
        for call in list(self._calls.values()):
            if call.is_at(worker):
                call.fail(_failure(call, code, message))

    def fail_all(self, message: str) -> None:
        """Fail every call as `frames_lost`: what was under way is lost, for certain or perhaps."""
        for call in list(self._calls.values()):
            call.fail(_failure(call, ErrorCode.FRAMES_LOST, message))

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
                await publish(self._nats, subject, encode(LinkMessage(WIRE_VERSION, keys)))
            except BusBroken as exc:
                logger.warning("aborts.lost worker=%s count=%s error=%s", worker, len(keys), exc)


def _expire(call: Call, timeout_s: float) -> None:
    call.fail(
        RequestTimeout(
            stage="admission" if call.is_unadmitted else "generation",
            message=f"not finished within {timeout_s:g} s",
            request_id=call.request.request_id,
        )
    )


def _failure(call: Call, code: ErrorCode, message: str) -> RequestFailed:
    return RequestFailed(code=code, message=message, request_id=call.request.request_id)
