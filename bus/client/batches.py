"""Many requests at once: the requests in flight, and their results or chunks in the order in which these arrive."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

from ...schemas.checks import check_int, describe
from ...schemas.chunk import Chunk
from ...schemas.errors import InvalidRequest, NoWorkers, RequestError
from ...schemas.limits import MAX_IN_FLIGHT
from ...schemas.request import GenerateRequest, TokenIds, as_request
from .calls import Call, SharedInbox
from .generation import Generation, failed_ends, join_samples
from .groups import Source
from .runtime import Runtime

R = TypeVar("R")
PERCENTS: Final = (50, 90, 99, 100)
"""Percentages of a batch's requests in `percentiles`."""
MAX_TIMES: Final = 65_536
"""Maximum number of stored times (512 KiB). A batch twice as large stores every second request, and so on."""
Requests = Iterable[GenerateRequest | TokenIds]
AsyncRequests = AsyncIterable[GenerateRequest | TokenIds]


class BatchTimes:
    """Seconds from the start of a batch until given percentages of its requests were complete.

    Pass an instance to `Client.complete_many`, and read it at any time from the same event loop:

        times = rollbus.BatchTimes()
        async for generation in rb.complete_many(requests, times=times):
            ...
        print(times.percentiles())  # {50: 3.1, 90: 7.4, 99: 12.0, 100: 14.2}

    A batch starts when its first result is requested. A request is complete when it has ended, with or without an
    error, also if the caller has not read its result. Percentages count only requests that are complete. If a batch is
    still running or was left early, they do not cover all its requests. Each new batch resets the times.
    """

    def __init__(self) -> None:
        self.start(0.0)

    def __repr__(self) -> str:
        """Return one line with the times."""
        times = " ".join(f"{percent}%:{seconds:.3f}s" for percent, seconds in self.percentiles().items())
        return f"<BatchTimes complete={self._num_complete} {times or 'empty'}>"

    @property
    def num_complete(self) -> int:
        """Number of requests of the batch that have ended."""
        return self._num_complete

    def start(self, now: float) -> None:
        """Start a batch at `now` and discard the times of the previous batch. `complete_many` calls this."""
        self._started_at = now
        self._num_complete = 0
        self._last_s = 0.0
        self._step = 1
        # Entry k is the completion time of request number (k + 1) * _step.
        self._times_s = array("d")

    def add(self, now: float) -> None:
        """Count a request that was complete at `now`. `complete_many` calls this.

        If later completion times were already added, the request counts as complete at the latest of them.
        """
        self._num_complete += 1
        self._last_s = max(self._last_s, now - self._started_at)
        if self._num_complete % self._step:
            return
        self._times_s.append(self._last_s)
        if len(self._times_s) >= MAX_TIMES:
            self._times_s = self._times_s[1::2]
            self._step *= 2

    def seconds_to(self, percent: float) -> float | None:
        """Return the seconds until this percentage of the requests was complete, or None if no request is.

        The value is exact for up to 65,535 requests. For larger batches it is the time of a request that was complete
        shortly after.

        Raises:
            ValueError: `percent` is not above 0 and at most 100.
        """
        if not 0 < percent <= 100:
            raise ValueError(f"percent is {percent}; allowed: above 0, up to 100")
        if not self._num_complete:
            return None
        number = max(math.ceil(self._num_complete * percent / 100), 1)
        index = math.ceil(number / self._step) - 1
        return self._times_s[index] if index < len(self._times_s) else self._last_s

    def percentiles(self) -> dict[int, float]:
        """Return the seconds until 50, 90, 99 and 100 % of the requests were complete, by percentage."""
        times = ((percent, self.seconds_to(percent)) for percent in PERCENTS)
        return {percent: seconds for percent, seconds in times if seconds is not None}


class Batch(ABC, Generic[R]):
    """Requests in flight, and what the caller reads of them. Use it from the caller's loop.

    Creating a batch starts its `times`.

    Raises:
        InvalidRequest: `max_in_flight` is not an integer from 1 to `MAX_IN_FLIGHT`.
    """

    def __init__(self, runtime: Runtime, max_in_flight: int, times: BatchTimes | None = None) -> None:
        self._runtime = runtime
        self._max_in_flight = check_int("max_in_flight", max_in_flight, 1, MAX_IN_FLIGHT)
        self._max_unread_bytes = runtime.config.max_unread_bytes
        self._times = BatchTimes() if times is None else times
        self._times.start(time.monotonic())
        self._in_flight: set[Call] = set()
        # One object for all calls.
        self._end = self._on_end
        # Calls of `_in_flight` that have ended, each once.
        self._ended: deque[Call] = deque()
        # Chunks of all calls. None: the batch reads complete results.
        self._inbox: SharedInbox | None = None
        self.news = asyncio.Event()
        """Set when there is something to read. Other code may set it too."""
        self.no_workers: NoWorkers | None = None
        """Set when no worker was left for the last request. The batch then opens no more requests."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests that were not read to their ends."""
        return len(self._in_flight)

    @property
    def _is_ready(self) -> bool:
        return bool(self._ended or (self._inbox is not None and self._inbox.chunks))

    @property
    def has_room(self) -> bool:
        """True if another request may be opened before the next read. Any thread may read this property."""
        if self._is_ready or self.no_workers is not None:
            return False
        # With nothing in flight no result can free memory. Unread results of other calls must then not block this
        # batch.
        return not self._in_flight or (
            len(self._in_flight) < self._max_in_flight and self._runtime.unread_bytes < self._max_unread_bytes
        )

    async def open(self, request: GenerateRequest) -> R | None:
        """Open a request. Return its result if it was rejected, else None. Without workers, set `no_workers`."""
        try:
            call = await self._runtime.open(request, streams=self._inbox is not None, inbox=self._inbox)
        except NoWorkers as exc:
            self.no_workers = exc
            return None
        except RequestError as exc:
            self._times.add(time.monotonic())
            return self._rejected(request, exc)
        self._in_flight.add(call)
        call.when_ended(self._end)
        return None

    def _on_end(self, call: Call) -> None:
        if call.result is not None:
            self._times.add(call.result.ended_at)
        self._ended.append(call)
        self.news.set()

    async def wait_for_news(self) -> None:
        """Wait until `news` is set again."""
        self.news.clear()
        await self.news.wait()

    async def read(self) -> R | None:
        """Wait until there is something to read, and return it. None: a request has ended, and nothing was left."""
        while not self._is_ready:
            await self.wait_for_news()
        return await self._read()

    @abstractmethod
    async def _read(self) -> R | None:
        """Return what there is to read."""

    @abstractmethod
    def _rejected(self, request: GenerateRequest, error: RequestError) -> R:
        """Return what the caller reads of a request that was not submitted."""

    def close(self) -> None:
        """Abort all requests in flight, and drop their chunks."""
        for call in self._in_flight:
            self._runtime.remove(call)
        if self._inbox is not None:
            self._inbox.close()


class ResultBatch(Batch[Generation]):
    """Requests whose results are read one by one, in the order in which they end."""

    async def _read(self) -> Generation:
        call = self._ended[0]
        generation = await self._runtime.pop_result(call)
        self._ended.popleft()
        self._in_flight.remove(call)
        return generation

    def _rejected(self, request: GenerateRequest, error: RequestError) -> Generation:
        return join_samples(request, (), error)


class ChunkBatch(Batch[list[Chunk]]):
    """Requests whose chunks are read, all that have arrived at once.

    Invariant: each sample of each request ends with one terminal chunk. If a request fails, the batch makes it.
    """

    def __init__(self, runtime: Runtime, max_in_flight: int) -> None:
        super().__init__(runtime, max_in_flight)
        self._shared = self._inbox = SharedInbox(runtime.inbox, self.news.set)

    async def _read(self) -> list[Chunk] | None:
        # Read the ends before the chunks: the bus thread appends all chunks of a call before it ends the call.
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        chunks = self._shared.take()
        for call in ended:
            if call.result is not None and call.result.error is not None:
                chunks += failed_ends(call.request, call.result.samples, call.result.error)
            self._runtime.remove(call)
            self._in_flight.remove(call)
        return chunks or None

    def _rejected(self, request: GenerateRequest, error: RequestError) -> list[Chunk]:
        return failed_ends(request, (), error)


def check_request(drawn: Any, fields: Mapping[str, Any]) -> GenerateRequest:
    """Return `drawn` if it is a request. If it is token ids, return the request with these fields.

    Raises:
        InvalidRequest: `drawn` is neither, or a field is wrong.
    """
    if not isinstance(drawn, GenerateRequest) and not hasattr(drawn, "__len__"):
        allowed = "requests, or the token ids of each prompt"
        raise InvalidRequest("requests", f"has {describe(drawn)}", allowed)
    return as_request(drawn, fields)


async def drain(
    make: Callable[[], Batch[R]], requests: "Requests | AsyncRequests", fields: Mapping[str, Any]
) -> AsyncGenerator[R, None]:
    """Send the requests through a new batch, and yield what it returns. See `Client.complete_many`."""

    def wake() -> None:
        batch.news.set()

    # The batch must be closed, so what may fail comes before it.
    source = Source("requests", requests, lambda drawn: check_request(drawn, fields), wake)
    batch = make()
    is_over = False
    try:
        while True:
            has_room = not is_over and batch.has_room
            if has_room and not source.is_ready:
                # For the next request, or for what the requests in flight return.
                await batch.wait_for_news()
            elif has_room:
                request = source.pop()
                is_over = request is None
                rejected = None if request is None else await batch.open(request)
                if rejected is not None:
                    yield rejected
            elif batch.num_in_flight:
                if (returned := await batch.read()) is not None:
                    yield returned
            else:
                break
    finally:
        batch.close()
        await source.close()
    if batch.no_workers is not None:
        raise batch.no_workers
