"""The client that trainers use: requests out, chunks in, and nothing mistaken for a result that is not one."""

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec
from nats.aio.msg import Msg

from bus.calls import Call
from bus.connection import Connection, close_connection, open_connection, publish, subscribe
from bus.fleet import Fleet
from bus.generation import Generation
from bus.protocol.fleet_view import Gone
from bus.protocol.link import Link
from bus.subjects import Subjects
from schemas.checks import check_subject_token
from schemas.chunk import Chunk
from schemas.errors import (
    BusBroken,
    BusClosed,
    ErrorCode,
    NoWorkers,
    RemoteProtocolError,
    RequestError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
)
from schemas.limits import DEFAULT_MAX_IN_FLIGHT, DEFAULT_TIMEOUT_S
from schemas.messages import WIRE_VERSION, LinkMessage, RequestKey, RequestMessage, decode_frame, encode
from schemas.request import GenerateRequest, lane_of

__all__ = ["Client", "ClientStats", "connect"]

logger = logging.getLogger(__name__)

LEASE_CHECK_S = 0.5
"""How often leases are looked at: a tenth of a lease."""
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


def connect(url: str | None = None, *, fleet: str = "default", client: str | None = None) -> "Client":
    """A client of a fleet, to be entered with `async with`.

    Args:
        url: of the NATS server; None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`.
        fleet: whose workers serve the requests.
        client: this client's name in subjects, unique among live clients; None: drawn at random.

    Raises:
        InvalidRequest: a name that cannot stand in a subject.
    """
    return Client(url or os.environ.get("ROLLBUS_NATS") or "nats://127.0.0.1:4222", fleet=fleet, client=client)


class Client:
    """Requests and their streams over one connection. Made by `connect`; use it from one event loop.

    Entering raises `BusBroken` when no server answers. Leaving aborts what is still open, so that no engine works
    for nobody, and closes the connection.
    """

    def __init__(self, url: str, *, fleet: str = "default", client: str | None = None) -> None:
        self._url = url
        self._subjects = Subjects(fleet)
        self._client = check_subject_token("client", client or f"c-{uuid.uuid4().hex[:12]}")
        self._calls: dict[str, Call] = {}
        self._links: dict[str, Link] = {}
        # Aborts on their way, by worker; bounded by the requests in flight.
        self._aborts: dict[str, list[RequestKey]] = {}
        self._aborts_wanted = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._background: list[asyncio.Task[None]] = []
        self._connection: Connection | None = None
        self._fleet: Fleet | None = None
        self._stats = ClientStats()

    def __repr__(self) -> str:
        """One line with the state."""
        state = "connected" if self._connection is not None else "closed"
        return f"<Client {self._client} {state} fleet={self._subjects.fleet} calls={len(self._calls)}>"

    @property
    def fleet(self) -> Fleet:
        """The fleet's workers.

        Raises:
            BusClosed: the client is not connected.
        """
        if self._fleet is None:
            raise BusClosed("this client is not connected; use it inside `async with`")
        return self._fleet

    @property
    def _nats(self) -> Connection:
        if self._connection is None:
            raise BusClosed("this client is not connected; use it inside `async with`")
        return self._connection

    def stats(self) -> ClientStats:
        """A copy of the counters."""
        return replace(self._stats)

    async def __aenter__(self) -> Self:
        """Connect, listen, and ask who is there."""
        nats = await open_connection(
            self._url, name=f"rollbus client {self._client}", on_reconnect=self._on_reconnect, on_error=self._on_error
        )
        self._fleet = Fleet(nats, self._subjects, self._on_gone)
        self._connection = nats
        try:
            await subscribe(nats, self._subjects.presences, self._fleet.receive)
            await subscribe(nats, self._subjects.frames_to(self._client), self._on_frame)
            # The server knows both subscriptions before the first request can cause an answer.
            await nats.flush()
            await self._fleet.reconnected()
        except BaseException:
            await self._disconnect()
            raise
        await self._tasks.__aenter__()
        self._background = [
            self._tasks.create_task(self._send_aborts(), name="client.aborts"),
            self._tasks.create_task(self._watch_leases(), name="client.leases"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is open and close."""
        for call in list(self._calls.values()):
            self._drop(call)
            call.fail(_failure(call, ErrorCode.CLIENT_CLOSED, "the client was closed"))
        for task in self._background:
            task.cancel()
        # The body's exception is not shown to the group, which would wrap it: callers catch what they raised.
        await self._tasks.__aexit__(None, None, None)
        try:
            await self._publish_aborts()
        except BusBroken as exc:
            logger.warning("aborts.lost error=%s", exc)
        finally:
            await self._disconnect()

    async def _disconnect(self) -> None:
        nats, self._connection, self._fleet = self._nats, None, None
        await close_connection(nats)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of `request`, those of n > 1 samples interleaved and told apart by `child`.

        Leaving the loop early aborts the request; `contextlib.aclosing` makes that immediate.

        Raises:
            RequestError: it was rejected, failed or timed out; what came before has been yielded.
        """
        call = await self._open(request, streams=True)
        try:
            async for chunk in call.chunks():
                yield chunk
        finally:
            self._drop(call)

    async def complete(self, request: GenerateRequest) -> Generation:
        """The finished result of `request`; for n > 1 child 0 with `siblings`.

        Cancellation: aborts the request.

        Raises:
            RequestError: it was rejected, failed or timed out.
        """
        call = await self._open(request, streams=False)
        try:
            await call.wait()
        finally:
            self._drop(call)
        if call.error is not None:
            raise call.error
        return call.generation()

    async def complete_many(
        self, requests: Iterable[GenerateRequest], *, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    ) -> AsyncGenerator[Generation, None]:
        """Results of many requests in the order in which they finish, `max_in_flight` at a time.

        `requests` is taken from as there is room, so that it may be endless. A request that fails harms no other:
        it comes as a `Generation` with `finish_reason` ERROR and `error` set. Leaving the loop aborts what is open.

        Raises:
            NoWorkers: no worker is left to take the next request; every result before it has been yielded.
            ValueError: `max_in_flight` is below 1.
        """
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; allowed: 1 or more")
        source = iter(requests)
        request = next(source, None)
        in_flight: set[Call] = set()
        # Every call ends once, so that there is always room.
        ended: asyncio.Queue[Call] = asyncio.Queue(max_in_flight)
        no_workers: NoWorkers | None = None
        try:
            while request is not None or in_flight:
                if request is not None and len(in_flight) < max_in_flight and ended.empty():
                    try:
                        in_flight.add(await self._start(request, ended))
                        request = next(source, None)
                    except NoWorkers as exc:
                        request, no_workers = None, exc
                    continue
                call = await ended.get()
                in_flight.remove(call)
                self._drop(call)
                yield call.generation()
        finally:
            for call in in_flight:
                self._drop(call)
        if no_workers is not None:
            raise no_workers

    async def _start(self, request: GenerateRequest, ended: asyncio.Queue[Call]) -> Call:
        """Open a call that ends in `ended`, also when it is refused; only `NoWorkers` is raised."""
        try:
            return await self._open(request, streams=False, on_end=ended.put_nowait)
        except NoWorkers:
            raise
        except RequestError as exc:
            refused = Call(request, streams=False, on_end=ended.put_nowait)
            refused.fail(exc)
            return refused

    async def _open(
        self, request: GenerateRequest, *, streams: bool, on_end: Callable[[Call], None] | None = None
    ) -> Call:
        """Publish `request` and register its call."""
        request_id = request.request_id
        if request_id in self._calls:
            raise RequestRejected(
                code=ErrorCode.DUPLICATE_REQUEST,
                message="this client has a live request of this id",
                request_id=request_id,
            )
        nats = self._nats
        call = Call(request, streams=streams, on_end=on_end)
        self._calls[request_id] = call
        try:
            model = await self.fleet.resolve_model(request.model)
            subject = self._subjects.request(self._client, model, lane_of(request.priority))
            messages = [self._message(child, index) for index, child in enumerate(call.children)]
            limit = nats.max_payload
            if max(map(len, messages)) > limit:
                raise RequestRejected(
                    code=ErrorCode.TOO_LARGE,
                    message=f"{max(map(len, messages))} bytes are over the server's max_payload of {limit}",
                    request_id=request_id,
                )
            timeout_s = request.timeout_s if request.timeout_s is not None else DEFAULT_TIMEOUT_S
            call.timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, call, timeout_s)
            for message in messages:
                await publish(nats, subject, message)
                self._stats.requests += 1
        except BaseException:
            self._drop(call)
            raise
        return call

    def _message(self, request: GenerateRequest, child: int) -> bytes:
        return encode(RequestMessage(client=self._client, child=child, request=msgspec.Raw(encode(request))))

    def _drop(self, call: Call) -> None:
        """Forget `call`; what is still open of it is aborted at its worker."""
        if self._calls.get(call.request.request_id) is not call:
            return
        del self._calls[call.request.request_id]
        if call.timer is not None:
            call.timer.cancel()
        for child in call.open_children():
            worker = call.workers[child]
            # Without a worker there is nobody to tell yet: who admits it later is told to stop.
            if worker is not None:
                self._abort(worker, call.key(child))

    def _expire(self, call: Call, timeout_s: float) -> None:
        call.fail(
            RequestTimeout(
                stage="admission" if call.is_unadmitted else "generation",
                message=f"not finished within {timeout_s:g} s",
                request_id=call.request.request_id,
            )
        )

    async def _on_frame(self, message: Msg) -> None:
        worker = message.subject.rpartition(".")[2]
        try:
            frame = decode_frame(message.data)
        except RemoteProtocolError as exc:
            self._stats.bad_messages += 1
            logger.warning("frame.bad worker=%s error=%s", worker, exc)
            return
        self._stats.frames += 1
        try:
            if not self._links.setdefault(worker, Link()).receive(frame):
                self._stats.duplicate_frames += 1
                return
        except RemoteProtocolError as exc:
            self._stats.missing_frames += 1
            self._fail_at(worker, ErrorCode.FRAMES_LOST, f"from worker {worker}: {exc}")
        for key in frame.admitted:
            call = self._call_of(key)
            if call is None:
                self._abort(worker, key)
            elif call.workers[key.child] is None:
                call.workers[key.child] = worker
        for chunk in frame.chunks:
            call = self._call_of(RequestKey(chunk.request_id, chunk.attempt, chunk.child))
            if call is not None:
                call.receive(chunk, worker)
                continue
            self._stats.late_chunks += 1
            if chunk.end is None:
                self._abort(worker, RequestKey(chunk.request_id, chunk.attempt, chunk.child))

    def _call_of(self, key: RequestKey) -> Call | None:
        call = self._calls.get(key.request_id)
        return call if call is not None and key.attempt == 0 and key.child < len(call.children) else None

    def _fail_at(self, worker: str, code: ErrorCode, message: str) -> None:
        for call in list(self._calls.values()):
            if call.is_at(worker):
                call.fail(_failure(call, code, message))

    def _on_gone(self, gone: Gone) -> None:
        link = self._links.get(gone.worker)
        if link is None or link.incarnation == gone.incarnation:
            self._fail_at(gone.worker, ErrorCode.WORKER_LOST, f"worker {gone.worker} is gone: {gone.reason}")
        # A request that nobody has admitted for so long may have been in its hands.
        for call in list(self._calls.values()):
            if call.is_unadmitted and call.age_s > ADMISSION_WAIT_S:
                call.fail(_failure(call, ErrorCode.WORKER_LOST, f"not admitted when worker {gone.worker} was lost"))

    async def _on_reconnect(self) -> None:
        """Requests and frames that were under way are lost for certain or perhaps: say so rather than wait."""
        self._fail_all("the connection to NATS was lost meanwhile")
        await self.fleet.reconnected()

    def _on_error(self, error: Exception) -> None:
        """Frames were dropped unread, a frame upset us, or the server has ended the connection for good."""
        self._fail_all(f"frames were lost: {error}")

    def _fail_all(self, message: str) -> None:
        for call in list(self._calls.values()):
            call.fail(_failure(call, ErrorCode.FRAMES_LOST, message))

    def _abort(self, worker: str, key: RequestKey) -> None:
        self._aborts.setdefault(worker, []).append(key)
        self._aborts_wanted.set()

    async def _send_aborts(self) -> None:
        while True:
            await self._aborts_wanted.wait()
            self._aborts_wanted.clear()
            try:
                await self._publish_aborts()
            except BusBroken as exc:
                # Their workers are told again when the next of their chunks arrives.
                logger.warning("aborts.lost error=%s", exc)

    async def _publish_aborts(self) -> None:
        aborts, self._aborts = self._aborts, {}
        for worker, keys in aborts.items():
            subject = self._subjects.link(self._client, worker)
            await publish(self._nats, subject, encode(LinkMessage(WIRE_VERSION, keys)))

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            if self._nats.is_connected:
                self.fleet.expire()


def _failure(call: Call, code: ErrorCode, message: str) -> RequestFailed:
    return RequestFailed(code=code, message=message, request_id=call.request.request_id)
