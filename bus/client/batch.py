"""Many requests at once: the source from which they are drawn, and those in flight.

Items come from an iterable or async iterable of the caller, one at a time and only on demand.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from msgspec.structs import replace

from ...schemas.checks import check_int, describe
from ...schemas.errors import InvalidRequest, NoWorkers, RequestError
from ...schemas.limits import MAX_IN_FLIGHT
from ...schemas.request import GenerateRequest, TokenIds, as_request, check_continuable
from ...schemas.sampling import SamplingParams
from .call_registry import CallRegistry
from .calls import Call
from .generation import Generation, join_samples
from .times import BatchTimes

T = TypeVar("T")
Requests = Iterable[GenerateRequest | TokenIds]
AsyncRequests = AsyncIterable[GenerateRequest | TokenIds]
InexactGroups = Literal["refuse", "continue", "drop"]
"""Handling of a stopped group whose sampler has state. With `refuse`, such prompts are rejected."""


class Drawing(Generic[T]):
    """Draws items from one source. Use it from the caller's loop.

    Args:
        source: iterable or async iterable of the caller.
        wake: called when an async iterable has returned an item, ended or raised an error.
    """

    def __init__(self, source: Iterable[T] | AsyncIterable[T], wake: Callable[[], None]) -> None:
        self._source = aiter(source) if isinstance(source, AsyncIterable) else iter(source)
        self._wake = wake
        # At most one task. It stays until `pop` reads its item: cancelling it would end an async generator.
        self._next: asyncio.Task[T] | None = None

    @property
    def is_ready(self) -> bool:
        """True if `pop` has an item or the end. If False, the next item is being drawn, and `wake` will be called."""
        if isinstance(self._source, Iterator):
            return True
        if self._next is None:
            self._next = self._start(self._source)
        return self._next.done()

    def _start(self, source: AsyncIterator[T]) -> asyncio.Task[T]:
        async def draw() -> T:
            return await anext(source)

        # Not in a task group: a failure would cancel the caller's task, also while it runs other code.
        drawing = asyncio.get_running_loop().create_task(draw(), name="client.draw")
        drawing.add_done_callback(lambda _: self._wake())
        return drawing

    def pop(self) -> T:
        """Return the next item. Call this only if `is_ready`.

        Raises:
            StopIteration: the source has ended. An async source raises `StopAsyncIteration`.
            Exception: the source raised it.
        """
        if isinstance(self._source, Iterator):
            return next(self._source)
        if self._next is None:
            raise RuntimeError("no item is being drawn; check `is_ready` before `pop`")
        drawing, self._next = self._next, None
        return drawing.result()

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait({self._next})
            if not self._next.cancelled():
                # Retrieve the error: asyncio warns about errors that no code has retrieved.
                self._next.exception()


class Batch:
    """Requests in flight, and their results in the order in which they end. Use it from the caller's loop.

    Creating a batch starts its `times`.

    Raises:
        InvalidRequest: `max_in_flight` is not an integer from 1 to `MAX_IN_FLIGHT`.
    """

    def __init__(self, registry: CallRegistry, *, max_in_flight: int, times: BatchTimes | None) -> None:
        self._registry = registry
        self._max_in_flight = check_int("max_in_flight", max_in_flight, 1, MAX_IN_FLIGHT)
        self._max_unread_bytes = registry.config.max_unread_bytes
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
    def has_result(self) -> bool:
        """True if `next_result` returns without waiting."""
        return bool(self._ended)

    @property
    def has_room(self) -> bool:
        """True if another request may be opened before the next result is read. Any thread may read this property."""
        if self._ended or self.no_workers is not None:
            return False
        # With nothing in flight no result can free memory. Unread results of other calls must then not block this
        # batch.
        return not self._in_flight or (
            len(self._in_flight) < self._max_in_flight and self._registry.unread_bytes < self._max_unread_bytes
        )

    async def open(self, request: GenerateRequest) -> Generation | None:
        """Open a request. Return its result if it was rejected, else None. Without workers, set `no_workers`."""
        try:
            call = await self._registry.open(request, streams=False)
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

    async def next_result(self) -> Generation:
        """Wait until a request in flight has ended, and return its result."""
        while not self._ended:
            self.news.clear()
            await self.news.wait()
        call = self._ended[0]
        generation = await self._registry.pop_result(call)
        self._ended.popleft()
        self._in_flight.remove(call)
        return generation

    def close(self) -> None:
        """Abort all requests in flight."""
        for call in self._in_flight:
            self._registry.remove(call)


class RequestSource:
    """Draws requests from the caller's source, one at a time and only on demand.

    Args:
        fields: fields of the requests for prompts that are token ids.

    Raises:
        InvalidRequest: `requests` is not iterable.
    """

    def __init__(self, requests: Requests | AsyncRequests, batch: Batch, fields: Mapping[str, Any]) -> None:
        source = requests if isinstance(requests, AsyncIterable) else check_iterable(requests)
        self._drawing = Drawing(source, batch.news.set)
        self._batch = batch
        self._fields = fields
        self.is_over = False

    async def draw(self) -> GenerateRequest | None:
        """Return the next request. Return None if the source has ended, or if a request of the batch ended first.

        Cancellation: the next call returns the request that is being drawn.

        Raises:
            InvalidRequest: the item is no request, or a field is wrong.
            Exception: the source raised it.
        """
        try:
            while not self._drawing.is_ready and not self._batch.has_result:
                self._batch.news.clear()
                await self._batch.news.wait()
            return check_request(self._drawing.pop(), self._fields) if self._drawing.is_ready else None
        except (StopIteration, StopAsyncIteration):
            self.is_over = True
            return None

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        await self._drawing.close()


def check_iterable(requests: Requests) -> Requests:
    """Return `requests` if it is iterable.

    Raises:
        InvalidRequest: `requests` is not iterable.
    """
    if not isinstance(requests, Iterable):
        raise InvalidRequest(field="requests", problem=f"is {describe(requests)}", allowed="an iterable of requests")
    return requests


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

    def request(self, prompt: "GenerateRequest | TokenIds") -> GenerateRequest:
        """Return the request for a group of answers, with a group id.

        Each request gets a new request id, because a data set can repeat a request while the first one runs.

        Raises:
            InvalidRequest: a field is wrong, or the sampler has state and `inexact` is `refuse`.
        """
        if not isinstance(prompt, GenerateRequest):
            prompt = GenerateRequest(prompt_token_ids=prompt, sampling=self.sampling)
        if prompt.sampling.n not in (1, self.n):
            raise InvalidRequest(field="sampling.n", problem=f"is {prompt.sampling.n}", allowed=f"1, or n={self.n}")
        if self.inexact == "refuse":
            check_continuable(prompt.sampling)
        group_id = prompt.group_id or uuid.uuid4().hex
        sampling = replace(prompt.sampling, n=self.n)
        return replace(prompt, request_id=uuid.uuid4().hex, group_id=group_id, sampling=sampling)


class GroupPrompts:
    """Prompts from an iterable or an async iterable, one at a time.

    Args:
        prompts: the caller's prompts.
        form: builds the requests.
        wake: called when an async iterable has returned a prompt, ended or raised an error.

    Raises:
        InvalidRequest: `prompts` is not iterable.
    """

    def __init__(self, prompts: Prompts, form: PromptForm, wake: Callable[[], None]) -> None:
        if not isinstance(prompts, Iterable | AsyncIterable):
            raise InvalidRequest(
                field="prompts", problem=f"is {describe(prompts)}", allowed="an iterable or an async iterable"
            )
        self._drawing: Drawing[Prompt] = Drawing(prompts, wake)
        self._form = form

    @property
    def is_ready(self) -> bool:
        """True if `pop` has a prompt or the end. If False, a prompt is being drawn, and `wake` will be called."""
        return self._drawing.is_ready

    def pop(self) -> tuple[GenerateRequest, object] | None:
        """Return the next request and its key, or None if no prompts are left. Call this only if `is_ready`.

        Raises:
            InvalidRequest: the prompt is not valid. The next prompt may be valid.
            Exception: the iterable raised it.
        """
        try:
            prompt = self._drawing.pop()
        except (StopIteration, StopAsyncIteration):
            return None
        if isinstance(prompt, GroupPrompt):
            return self._form.request(prompt.prompt), prompt.key
        return self._form.request(prompt), None

    async def close(self) -> None:
        """Cancel the pending draw and wait until the source has cleaned up."""
        await self._drawing.close()
