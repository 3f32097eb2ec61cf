"""The client without asyncio: the methods of `Client`, `Fleet` and `GroupSampler`, which block.

Each blocking method takes its arguments, result, errors and docstring from the asynchronous method of the same name.
The event loop of the client runs on a thread of its own. Any thread may call a blocking method.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import wraps
from itertools import islice
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from ...schemas.checks import describe
from ...schemas.chunk import Chunk
from ...schemas.errors import BusClosed, InvalidRequest
from ...schemas.limits import DEFAULT_MAX_BUFFERED_BYTES, DEFAULT_MAX_IN_FLIGHT
from ...schemas.presence import WorkerPresence
from ...schemas.request import GenerateRequest, TokenIds
from ...schemas.sampling import SamplingParams
from ..protocol.fleet.presence import WaitLimit
from . import client as with_asyncio
from .batches import Batch, BatchTimes, ChunkBatch, Requests, ResultBatch, check_request
from .client import Client, runtime_of
from .config import ClientStats
from .fleet import Fleet
from .generation import Generation, GroupStep
from .groups import GroupSampler, InexactGroups, Prompt
from .record_writer import RunRecorder
from .runtime import Runtime
from .thread import CLEAN_UP_S, LoopThread

R = TypeVar("R")
P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class HandedPrompts:
    """An async iterable whose items another thread provides on demand. Use it from the owner's loop."""

    def __init__(self) -> None:
        self._wanted: asyncio.Future[Sequence[Prompt]] | None = None
        self._woken = asyncio.Event()

    def __aiter__(self) -> Self:
        """Return this object, which is its own iterator."""
        return self

    async def __anext__(self) -> Prompt:
        """Wait for the next prompt.

        Raises:
            StopAsyncIteration: no prompts are left.
        """
        self._wanted = asyncio.get_running_loop().create_future()
        self._woken.set()
        try:
            prompts = await self._wanted
        finally:
            self._wanted = None
        if not prompts:
            raise StopAsyncIteration
        return prompts[0]

    async def until_requested(self, step: Future[GroupStep]) -> bool:
        """Wait until the sampler requests a prompt, and return True.

        Return False if the step ended and `wake` was called.
        """
        while not step.done() and (self._wanted is None or self._wanted.done()):
            self._woken.clear()
            await self._woken.wait()
        return not step.done()

    def wake(self) -> None:
        """Make `until_requested` check its condition again."""
        self._woken.set()

    async def bring(self, prompts: Sequence[Prompt]) -> None:
        """Provide the requested prompt, or none at the end. This has no effect if the groups were closed meanwhile."""
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(prompts)


class BlockingGroups:
    """Steps of groups, as `GroupSampler` runs them. Create it with `BlockingClient.groups` and enter it with `with`.

    The thread that waits for the step also draws the prompts. Ctrl-C ends a step as a cancellation does: the groups
    keep running, and the next step begins with them. Leaving, also from another thread, ends a running step with
    `BusClosed` and aborts all requests in flight.

    Args:
        owner: thread of the client.
        sampler: draws its prompts from `handed`.
        handed: passes the prompts from this thread to the sampler.
        prompts: the caller's prompts.
        client: stays referenced, because a client without references closes itself.
    """

    def __init__(
        self,
        owner: LoopThread[Client],
        sampler: GroupSampler,
        handed: HandedPrompts,
        prompts: Iterable[Prompt],
        *,
        client: object,
    ) -> None:
        self._client = client
        self._owner = owner
        self._awaited = sampler
        self._handed = handed
        self._source = iter(_check_iterable("prompts", prompts))
        # Running steps. There is more than one only until the sampler has rejected the others.
        self._steps: set[Future[GroupStep]] = set()
        self._has_left = False

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<BlockingGroups {self._awaited!r}>"

    def __enter__(self) -> Self:
        """Allow steps."""
        self._owner.run_blocking(self._awaited.__aenter__())
        self._has_left = False
        return self

    def __exit__(self, *_error: object) -> None:
        """Abort all requests in flight. Calls of the client after this call run after the abort."""
        self._has_left = True
        for step in tuple(self._steps):
            self._owner.cancel(step)
        self._owner.finish(self._awaited.__aexit__(None, None, None))

    def __iter__(self) -> Generator[GroupStep, None, None]:
        """Yield steps until no prompts and no groups are left."""
        while step := self.step():
            yield step

    def step(self, *, version: int | None = None) -> GroupStep:
        """Run groups until enough are complete. Arguments, result and errors are those of `GroupSampler.step`."""
        self._owner.check_caller()
        had_left = self._has_left
        step = self._owner.submit(self._awaited.step(version=version))
        try:
            step.add_done_callback(lambda _: self._owner.post(self._handed.wake))
            self._steps.add(step)
            if self._has_left and not had_left:
                # Another thread has left meanwhile, and may not have seen this step.
                self._owner.cancel(step)
            while self._owner.run_blocking(self._handed.until_requested(step)):
                # An error of the source ends the step, as an interrupt does.
                self._owner.run_blocking(self._handed.bring(list(islice(self._source, 1))))
            return step.result()
        finally:
            self._owner.cancel(step, wait_s=CLEAN_UP_S)
            self._steps.discard(step)


def _check_iterable(name: str, items: Iterable[T]) -> Iterable[T]:
    """Return `items` if it is iterable without asyncio."""
    if isinstance(items, AsyncIterable):
        allowed = "an iterable; `rollbus.connect` takes async iterables"
        raise InvalidRequest(name, "is an async iterable", allowed)
    if not isinstance(items, Iterable):
        raise InvalidRequest(name, f"is {describe(items)}", f"an iterable of {name}")
    return items


class _BlockingCall(Protocol[T_co]):
    """An object whose methods block until the coroutine methods of a `T_co` return."""

    @property
    def _connected(self) -> LoopThread[Client]: ...

    @property
    def _awaited(self) -> T_co: ...


def _blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_BlockingCall[T], P], R]:
    """Return a method that blocks until the coroutine of `method` has ended."""

    @wraps(method)
    def wait(self: _BlockingCall[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._connected.run_blocking(method(self._awaited, *args, **kwargs))

    return wait


class BlockingFleet:
    """The workers of one fleet: the methods of `Fleet` without `await`. `BlockingClient.fleet` returns it."""

    def __init__(self, client: "BlockingClient") -> None:
        self._client = client

    @property
    def _connected(self) -> LoopThread[Client]:
        return self._client._connected

    @property
    def _awaited(self) -> Fleet:
        return self._client.with_asyncio.fleet

    def __repr__(self) -> str:
        """Return one line with each worker and its state."""
        return f"<BlockingFleet {self._awaited!r}>"

    @property
    def workers(self) -> tuple[WorkerPresence, ...]:
        """Live workers sorted by id, with their current states, versions and adapters.

        Load, counters and times may be old: `state` asks the workers for them.
        """
        return self._awaited.workers

    @property
    def bad_messages(self) -> int:
        """Number of presence messages and acks of workers that could not be decoded."""
        return self._awaited.bad_messages

    state = _blocking(Fleet.state)
    paused_since = _blocking(Fleet.paused_since)
    mute_pause = _blocking(Fleet.mute_pause)
    reset = _blocking(Fleet.reset)
    check_queues = _blocking(Fleet.check_queues)
    known_models = _blocking(Fleet.known_models)
    models_with_adapter = _blocking(Fleet.models_with_adapter)
    forget_model = _blocking(Fleet.forget_model)
    wait_for_workers = _blocking(Fleet.wait_for_workers)
    send = _blocking(Fleet.send)
    timelines = _blocking(Fleet.timelines)
    requests = _blocking(Fleet.requests)
    experts = _blocking(Fleet.experts)
    pause = _blocking(Fleet.pause)
    resume = _blocking(Fleet.resume)
    drain = _blocking(Fleet.drain)
    restart_one_by_one = _blocking(Fleet.restart_one_by_one)
    flush_cache = _blocking(Fleet.flush_cache)
    sleep = _blocking(Fleet.sleep)
    wake = _blocking(Fleet.wake)
    lend = _blocking(Fleet.lend)
    return_worker = _blocking(Fleet.return_worker)
    abort = _blocking(Fleet.abort)
    check_weights = _blocking(Fleet.check_weights)
    update_weights = _blocking(Fleet.update_weights)
    load_lora = _blocking(Fleet.load_lora)
    unload_lora = _blocking(Fleet.unload_lora)
    init_weight_transfer = _blocking(Fleet.init_weight_transfer)
    start_weight_update = _blocking(Fleet.start_weight_update)
    update_weight_chunk = _blocking(Fleet.update_weight_chunk)
    finish_weight_update = _blocking(Fleet.finish_weight_update)
    cancel_weight_update = _blocking(Fleet.cancel_weight_update)


class BlockingClient:
    """The `Client` for programs without asyncio. Create it with `rollbus.sync.connect`.

    The client connects at its first use. `close`, or the end of a `with` block, closes it. A client that is no longer
    referenced closes itself, for example if the cell of a notebook that created it runs again.

    Several threads may use it at the same time. Inside a running event loop, for example in a notebook, it works and
    blocks that loop. Ctrl-C ends the interrupted call as a cancellation does; the client stays usable.

    In a forked process, such as the process of a data loader, the copy of the client raises `BusClosed`. That process
    must connect its own client. The client of the parent process is not affected.

    A program that exits without closing the client still aborts all open requests. Callbacks (`on_end`, `on_ack`) run
    on the client's own threads and must return immediately. They get a `RuntimeError` if they call the client.
    """

    def __init__(self, client: Client) -> None:
        self._awaited = client
        self._opening = threading.Lock()
        # Set while connected.
        self._owner: LoopThread[Client] | None = None
        self._is_closed = False
        # Runs if nothing references the connected client any more.
        self._on_dropped: weakref.finalize[..., BlockingClient]

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<BlockingClient {self._awaited!r}>"

    @property
    def with_asyncio(self) -> Client:
        """The asynchronous client, for code that shares its connection."""
        self._connected  # noqa: B018 - connects at the first use
        return self._awaited

    @property
    def fleet(self) -> BlockingFleet:
        """The workers of the fleet, and commands to them.

        Raises:
            BusClosed: the client was closed.
        """
        self.with_asyncio.fleet  # noqa: B018 - a closed client fails here
        return BlockingFleet(self)

    def stats(self) -> ClientStats:
        """Return a copy of the counters.

        Raises:
            BusClosed: the client was closed.
        """
        return self.with_asyncio.stats()

    def open(self) -> Self:
        """Connect, subscribe to the messages of workers, and ask all workers for their presence.

        The first use of a new client calls this. After `close`, only this connects again. It has no effect on a
        connected client.

        Raises:
            BusBroken: no server answers, or the server rejects this client.
        """
        with self._opening:
            if self._owner is None:
                # The thread must not refer to this object.
                owner = LoopThread("rollbus-owner", self._awaited)
                owner.start_blocking()
                self._on_dropped = weakref.finalize(self, owner.request_stop)
                # At exit, the owner threads are stopped and awaited.
                self._on_dropped.atexit = False
                self._owner, self._is_closed = owner, False
        return self

    def close(self) -> None:
        """Abort all open requests and close. Calls of other threads end with `BusClosed`, or with `client_closed`.

        It has no effect on a closed client.
        """
        with self._opening:
            owner, self._owner, self._is_closed = self._owner, None, True
        if owner is not None:
            self._on_dropped.detach()
            owner.stop_blocking()

    def __enter__(self) -> Self:
        """Connect, as `open` does."""
        return self.open()

    def __exit__(self, *_error: object) -> None:
        """Close, as `close` does."""
        self.close()

    def record(
        self,
        folder: str | os.PathLike[str],
        *,
        experts: bool = False,
        max_buffered_bytes: int = DEFAULT_MAX_BUFFERED_BYTES,
    ) -> RunRecorder:
        """Record the results of this client from now on, as `Client.record` does."""
        return self._awaited.record(folder, experts=experts, max_buffered_bytes=max_buffered_bytes)

    complete = _blocking(Client.complete)
    abort = _blocking(Client.abort)

    def generate(
        self,
        request: GenerateRequest | TokenIds | None = None,
        *,
        on_end: Callable[[], None] | None = None,
        wait_limit: WaitLimit | None = None,
        **fields: Any,
    ) -> Generator[Chunk, None, None]:
        """Stream the chunks of `request`, as `Client.generate` does.

        Leaving the loop, or `close` on the iterator, aborts the request.
        """
        owner = self._connected
        chunks = self._awaited.generate(request, on_end=on_end, wait_limit=wait_limit, **fields)
        try:
            while (chunk := owner.run_blocking(_next(chunks))) is not None:
                yield chunk
        finally:
            # If the program ends, the thread has ended, and the names of this module may be gone.
            if not owner.has_ended:
                owner.finish(_leave(chunks))

    def complete_many(
        self,
        requests: Requests,
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        times: BatchTimes | None = None,
        **fields: Any,
    ) -> Generator[Generation, None, None]:
        """Yield the results of many requests in the order in which they finish, as `Client.complete_many` does.

        The client draws from `requests` on the caller's thread, while the caller waits for the next result.

        Raises:
            InvalidRequest: `requests` is not iterable, is an async iterable, or has an item that is no request; or a
                field is wrong.
            NoWorkers, ValueError, BusClosed, Exception: as `Client.complete_many`.
        """
        return self._drain(lambda runtime: ResultBatch(runtime, max_in_flight, times), requests, fields)

    def stream_many(
        self, requests: Requests, *, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT, **fields: Any
    ) -> Generator[list[Chunk], None, None]:
        """Yield the chunks of many requests, all that have arrived at once, as `Client.stream_many` does.

        Requests and errors are those of `complete_many`.
        """
        return self._drain(lambda runtime: ChunkBatch(runtime, max_in_flight), requests, fields)

    def _drain(
        self, make: Callable[[Runtime], Batch[R]], requests: Requests, fields: Mapping[str, Any]
    ) -> Generator[R, None, None]:
        requests = _check_iterable("requests", requests)
        owner, source = self._connected, iter(requests)
        batch, is_over = make(runtime_of(self._awaited)), False
        try:
            while True:
                if batch.has_room and not is_over:
                    try:
                        request = check_request(next(source), fields)
                    except StopIteration:
                        is_over = True
                        continue
                    rejected = owner.run_blocking(batch.open(request))
                    if rejected is not None:
                        yield rejected
                elif batch.num_in_flight:
                    if (returned := owner.run_blocking(batch.read())) is not None:
                        yield returned
                else:
                    break
        finally:
            owner.post(batch.close)
        if batch.no_workers is not None:
            raise batch.no_workers

    def groups(  # noqa: PLR0913 - the arguments of `Client.groups`
        self,
        prompts: Iterable[Prompt],
        *,
        n: int,
        need: int,
        over: float = 1.25,
        sampling: SamplingParams | None = None,
        max_lag: int | None = None,
        inexact: InexactGroups = "refuse",
        record: RunRecorder | None = None,
    ) -> BlockingGroups:
        """Return a sampler whose steps do not wait for the slowest results, as `Client.groups` does.

        Enter it with `with`.

        The sampler draws from `prompts` on the thread that calls `step`. Arguments and errors are those of
        `Client.groups`.
        """
        owner, handed = self._connected, HandedPrompts()
        sampler = self._awaited.groups(
            handed, n=n, need=need, over=over, sampling=sampling, max_lag=max_lag, inexact=inexact, record=record
        )
        return BlockingGroups(owner, sampler, handed, prompts, client=self)

    @property
    def _connected(self) -> LoopThread[Client]:
        while (owner := self._owner) is None:
            if self._is_closed:
                raise BusClosed("this client was closed; `open` connects it again")
            self.open()
        return owner


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _leave(chunks: AsyncGenerator[Chunk, None]) -> None:
    await chunks.aclose()


def _with_blocking(make: Callable[P, Client]) -> Callable[P, BlockingClient]:
    @wraps(make)
    def connect(*args: P.args, **kwargs: P.kwargs) -> BlockingClient:
        return BlockingClient(make(*args, **kwargs))

    connect.__doc__ = (make.__doc__ or "").replace("`async with`", "`with`")
    connect.__module__ = __name__
    return connect


connect = _with_blocking(with_asyncio.connect)
