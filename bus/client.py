"""The client that trainers use: requests in, chunks or finished generations out."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from types import TracebackType
from typing import Self

from bus.calls import Call
from bus.connection import Connection, close_connection, default_url, open_connection, subscribe
from bus.exchange import ClientStats, Exchange
from bus.fleet import Fleet
from bus.generation import Generation
from bus.subjects import Subjects
from schemas.checks import check_float, check_subject_token
from schemas.chunk import Chunk
from schemas.errors import BusBroken, BusClosed, NoWorkers, RequestError
from schemas.limits import DEFAULT_MAX_IN_FLIGHT, MAX_TIMEOUT_S
from schemas.request import GenerateRequest

__all__ = ["Client", "ClientStats", "connect"]

DEFAULT_WORKER_GRACE_S = 15.0
"""Enough for a server or a network that is restarted; a fleet that stays away longer is better told of at once."""
LEASE_CHECK_S = 0.5
"""How often leases are looked at: a tenth of a lease."""


def connect(
    url: str | None = None,
    *,
    fleet: str = "default",
    client: str | None = None,
    worker_grace_s: float = DEFAULT_WORKER_GRACE_S,
) -> "Client":
    """A client of a fleet, to be entered with `async with`.

    Args:
        url: of the NATS server; None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`.
        fleet: whose workers serve the requests.
        client: this client's name in subjects, unique among live clients; None: drawn at random.
        worker_grace_s: seconds that a request whose worker was lost may wait for another to come up.

    Raises:
        InvalidRequest: a name that cannot stand in a subject, or a negative time.
    """
    return Client(url or default_url(), fleet=fleet, client=client, worker_grace_s=worker_grace_s)


class Client:
    """Requests and their streams over one connection. Made by `connect`; use it from one event loop.

    Entering raises `BusBroken` when no server answers. Leaving aborts what is still open, so that no engine works
    for nobody, and closes the connection.
    """

    def __init__(self, url: str, *, fleet: str, client: str | None, worker_grace_s: float) -> None:
        self._url = url
        self._worker_grace_s = check_float("worker_grace_s", worker_grace_s, 0, MAX_TIMEOUT_S)
        self._subjects = Subjects(fleet)
        self._client = check_subject_token("client", client or f"c-{uuid.uuid4().hex[:12]}")
        self._tasks: asyncio.TaskGroup
        self._background: list[asyncio.Task[None]] = []
        # Set while connected.
        self._nats: Connection | None = None
        self._fleet: Fleet | None = None
        self._exchange: Exchange | None = None

    def __repr__(self) -> str:
        """One line with the state."""
        return f"<Client {self._client} fleet={self._subjects.fleet} {self._exchange or 'closed'}>"

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
    def _traffic(self) -> Exchange:
        if self._exchange is None:
            raise BusClosed("this client is not connected; use it inside `async with`")
        return self._exchange

    def stats(self) -> ClientStats:
        """A copy of the counters.

        Raises:
            BusClosed: the client is not connected.
        """
        return replace(self._traffic.stats)

    async def __aenter__(self) -> Self:
        """Connect, listen, and ask who is there."""
        if self._nats is not None:
            raise BusClosed("this client is entered already")
        nats = await open_connection(
            self._url, name=f"rollbus client {self._client}", on_reconnect=self._on_reconnect, on_error=self._on_error
        )
        exchange = Exchange(nats, self._subjects, self._client, worker_grace_s=self._worker_grace_s)
        fleet = Fleet(nats, self._subjects, exchange.worker_gone)
        try:
            await subscribe(nats, self._subjects.presences, fleet.receive)
            await subscribe(nats, self._subjects.frames_to(self._client), exchange.receive)
            # In order on one connection: the server knows both subscriptions before any request can cause an answer.
            await fleet.listen_anew()
        except BaseException:
            await close_connection(nats)
            raise
        self._nats, self._exchange, self._fleet = nats, exchange, fleet
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._background = [
            self._tasks.create_task(exchange.send_aborts(), name="client.aborts"),
            self._tasks.create_task(exchange.republish(fleet), name="client.republish"),
            self._tasks.create_task(self._watch(nats, fleet, exchange), name="client.watch"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is open and close."""
        nats, exchange = self._nats, self._exchange
        if nats is None or exchange is None:
            raise BusClosed("this client is not connected")
        self._nats = self._fleet = self._exchange = None
        exchange.close()
        for task in self._background:
            task.cancel()
        try:
            # The body's exception is not shown to the group, which would wrap it: callers catch what they raised.
            await self._tasks.__aexit__(None, None, None)
            await exchange.flush_aborts()
        finally:
            await close_connection(nats)

    async def _on_reconnect(self) -> None:
        if self._exchange is not None:
            self._exchange.lose_all("the connection to NATS was lost meanwhile")
            await self.fleet.listen_anew()

    def _on_error(self, error: Exception) -> None:
        if self._exchange is None:
            return
        if isinstance(error, BusBroken):
            self._exchange.fail_all(str(error))
        else:
            # Frames were dropped unread, or one upset us.
            self._exchange.lose_all(f"frames were lost: {error}")

    async def _watch(self, nats: Connection, fleet: Fleet, exchange: Exchange) -> None:
        """Look at leases, and at what nobody has admitted."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(LEASE_CHECK_S)
            if not nats.is_connected:
                # Lease clocks stand still: nobody could be heard.
                continue
            if time.monotonic() - before > 2 * LEASE_CHECK_S:
                # This loop was blocked: what workers said meanwhile has yet to be read.
                await fleet.listen_anew()
            else:
                fleet.expire()
                exchange.lose_unadmitted()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of `request`, those of n > 1 samples interleaved and told apart by `child`.

        Leaving the loop early aborts the request; `contextlib.aclosing` makes that immediate.

        Raises:
            RequestError: it was rejected, failed or timed out; what came before has been yielded.
        """
        traffic = self._traffic
        call = await traffic.open(request, self.fleet, streams=True)
        try:
            async for chunk in call.chunks():
                yield chunk
        finally:
            traffic.drop(call)

    async def complete(self, request: GenerateRequest) -> Generation:
        """The finished result of `request`; for n > 1 child 0 with `siblings`.

        Cancellation: aborts the request.

        Raises:
            RequestError: it was rejected, failed or timed out.
        """
        traffic = self._traffic
        call = await traffic.open(request, self.fleet, streams=False)
        try:
            await call.wait()
        finally:
            traffic.drop(call)
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
        traffic = self._traffic
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
                traffic.drop(call)
                yield call.generation()
        finally:
            for call in in_flight:
                traffic.drop(call)
        if no_workers is not None:
            raise no_workers

    async def _start(self, request: GenerateRequest, ended: asyncio.Queue[Call]) -> Call:
        """Open a call that ends in `ended`, also when it is refused; only `NoWorkers` is raised."""
        try:
            call = await self._traffic.open(request, self.fleet, streams=False)
        except NoWorkers:
            raise
        except RequestError as exc:
            call = Call(request, streams=False)
            call.fail(exc)
        call.when_ended(ended.put_nowait)
        return call
