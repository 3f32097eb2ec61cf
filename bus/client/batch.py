"""Many requests at once: the source from which they are drawn, and those in flight.

Items come from an iterable or async iterable of the caller, one at a time and only on demand.
"""

import asyncio
import math
import time
import uuid
from array import array
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from msgspec.structs import replace

from ...schemas.checks import check_int, describe
from ...schemas.errors import InvalidRequest, NoWorkers, RequestError
from ...schemas.limits import MAX_IN_FLIGHT
from ...schemas.request import GenerateRequest, TokenIds, as_request, check_continuable
from ...schemas.sampling import SamplingParams
from .calls import Call
from .generation import Generation, join_samples
from .runtime import Runtime

T = TypeVar("T")
PERCENTS: Final = (50, 90, 99, 100)
"""Percentages of a batch's requests in `percentiles`."""
MAX_TIMES: Final = 65_536
"""Maximum number of stored times (512 KiB). A batch twice as large stores every second request, and so on."""
Requests = Iterable[GenerateRequest | TokenIds]
AsyncRequests = AsyncIterable[GenerateRequest | TokenIds]
InexactGroups = Literal["refuse", "continue", "drop"]
"""Handling of a stopped group whose sampler has state. With `refuse`, such prompts are rejected."""


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


class Source(Generic[T]):
    """Draws items from the caller's iterable or async iterable, one at a time and only on demand. Use it in one loop.

    Args:
        name: name of the source in errors.
        items: iterable or async iterable of the caller.
        convert: makes an item of the caller's, or raises an error.
        wake: called when an async iterable has returned an item, ended or raised an error.

    Raises:
        InvalidRequest: `items` is not iterable.
    """

    def __init__(self, name: str, items: Any, convert: Callable[[Any], T], wake: Callable[[], None]) -> None:
        if not isinstance(items, Iterable | AsyncIterable):
            raise InvalidRequest(field=name, problem=f"is {describe(items)}", allowed=f"an iterable of {name}")
        self._items = aiter(items) if isinstance(items, AsyncIterable) else iter(items)
        self._convert = convert
        self._wake = wake
        # At most one task. It stays until `pop` reads its item: cancelling it would end an async generator.
        self._next: asyncio.Task[Any] | None = None

    @property
    def is_ready(self) -> bool:
        """True if `pop` has an item or the end. If False, the next item is being drawn, and `wake` will be called."""
        if isinstance(self._items, Iterator):
            return True
        if self._next is None:
            # Not in a task group: a failure would cancel the caller's task, also while it runs other code.
            self._next = asyncio.get_running_loop().create_task(_anext(self._items), name="client.draw")
            self._next.add_done_callback(lambda _: self._wake())
        return self._next.done()

    def pop(self) -> T | None:
        """Return the next item, or None at the end. Call this only if `is_ready`.

        Raises:
            InvalidRequest: the item is not valid. The next one may be valid.
            Exception: the source raised it.
        """
        try:
            if isinstance(self._items, Iterator):
                return self._convert(next(self._items))
            if self._next is None:
                raise RuntimeError("no item is being drawn; check `is_ready` before `pop`")
            drawing, self._next = self._next, None
            return self._convert(drawing.result())
        except (StopIteration, StopAsyncIteration):
            return None

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Retrieve the error: asyncio warns about errors that no code has retrieved.
                self._next.exception()


async def _anext(items: AsyncIterator[Any]) -> Any:
    return await anext(items)


class Batch:
    """Requests in flight, and their results in the order in which they end. Use it from the caller's loop.

    Creating a batch starts its `times`.

    Raises:
        InvalidRequest: `max_in_flight` is not an integer from 1 to `MAX_IN_FLIGHT`.
    """

    def __init__(self, runtime: Runtime, *, max_in_flight: int, times: BatchTimes | None) -> None:
        self._runtime = runtime
        self._max_in_flight = check_int("max_in_flight", max_in_flight, 1, MAX_IN_FLIGHT)
        self._max_unread_bytes = runtime.config.max_unread_bytes
        self._times = BatchTimes() if times is None else times
        self._times.start(time.monotonic())
        self._in_flight: set[Call] = set()
        # Calls of `_in_flight` that have ended, each once.
        self._ended: deque[Call] = deque()
        self.news = asyncio.Event()
        """Set when a request has ended. Other code may set it too."""
        self.no_workers: NoWorkers | None = None
        """Set when no worker was left for the last request. The batch then opens no more requests."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests whose results were not read."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """True if another request may be opened before the next result is read. Any thread may read this property."""
        if self._ended or self.no_workers is not None:
            return False
        # With nothing in flight no result can free memory. Unread results of other calls must then not block this
        # batch.
        return not self._in_flight or (
            len(self._in_flight) < self._max_in_flight and self._runtime.unread_bytes < self._max_unread_bytes
        )

    async def open(self, request: GenerateRequest) -> Generation | None:
        """Open a request. Return its result if it was rejected, else None. Without workers, set `no_workers`."""
        try:
            call = await self._runtime.open(request, streams=False)
        except NoWorkers as exc:
            self.no_workers = exc
            return None
        except RequestError as exc:
            self._times.add(time.monotonic())
            return join_samples(request, (), exc)
        self._in_flight.add(call)
        call.when_ended(self._on_end)
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

    async def next_result(self) -> Generation:
        """Wait until a request in flight has ended, and return its result."""
        while not self._ended:
            await self.wait_for_news()
        call = self._ended[0]
        generation = await self._runtime.pop_result(call)
        self._ended.popleft()
        self._in_flight.remove(call)
        return generation

    def close(self) -> None:
        """Abort all requests in flight."""
        for call in self._in_flight:
            self._runtime.remove(call)


def check_request(drawn: Any, fields: Mapping[str, Any]) -> GenerateRequest:
    """Return `drawn` if it is a request. If it is token ids, return the request with these fields.

    Raises:
        InvalidRequest: `drawn` is neither, or a field is wrong.
    """
    if not isinstance(drawn, GenerateRequest) and not hasattr(drawn, "__len__"):
        allowed = "requests, or the token ids of each prompt"
        raise InvalidRequest(field="requests", problem=f"has {describe(drawn)}", allowed=allowed)
    return as_request(drawn, fields)


@dataclass(frozen=True, slots=True)
class GroupPrompt:
    """A prompt with a key of the caller."""

    prompt: "GenerateRequest | TokenIds"
    """A request, or token ids that get the sampling parameters of the groups."""
    key: object = None
    """Returned as `Group.key`. The key stays in this process."""


Prompt = GenerateRequest | TokenIds | GroupPrompt


Prompts = Iterable[Prompt] | AsyncIterable[Prompt]


@dataclass(frozen=True, slots=True)
class PromptForm:
    """Builds requests from prompts."""

    n: int
    sampling: SamplingParams
    """Sampling parameters of prompts that are token ids."""
    inexact: InexactGroups

    def request(self, prompt: Prompt) -> tuple[GenerateRequest, object]:
        """Return the request for a group of answers, with a group id, and the key of the prompt.

        Each request gets a new request id, because a data set can repeat a request while the first one runs.

        Raises:
            InvalidRequest: a field is wrong, or the sampler has state and `inexact` is `refuse`.
        """
        key = None
        if isinstance(prompt, GroupPrompt):
            key, prompt = prompt.key, prompt.prompt
        if not isinstance(prompt, GenerateRequest):
            prompt = GenerateRequest(prompt_token_ids=prompt, sampling=self.sampling)
        if prompt.sampling.n not in (1, self.n):
            raise InvalidRequest(field="sampling.n", problem=f"is {prompt.sampling.n}", allowed=f"1, or n={self.n}")
        if self.inexact == "refuse":
            check_continuable(prompt.sampling)
        group_id = prompt.group_id or uuid.uuid4().hex
        sampling = replace(prompt.sampling, n=self.n)
        return replace(prompt, request_id=uuid.uuid4().hex, group_id=group_id, sampling=sampling), key
