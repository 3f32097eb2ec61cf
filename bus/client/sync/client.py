"""The client without asyncio: the methods of `Client` and `Fleet`, which block instead of being awaited.

Each blocking method takes its arguments, result, errors and docstring from the asynchronous method of the same name.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator, Iterable
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from ....schemas.chunk import Chunk
from ....schemas.errors import BusClosed, InvalidRequest
from ....schemas.limits import DEFAULT_MAX_IN_FLIGHT
from ....schemas.presence import WorkerPresence
from ....schemas.request import GenerateRequest
from ....schemas.sampling import SamplingParams
from .. import client as with_asyncio
from ..batch import Batch, check_iterable, check_request
from ..batch_times import BatchTimes
from ..client import Client, ClientStats, batch_of
from ..fleet import Fleet
from ..generation import Generation
from ..group_prompts import InexactGroups, Prompt
from .groups import BlockingGroups, HandedPrompts
from .owner_thread import OwnerThread

__all__ = ["BlockingClient", "BlockingFleet", "connect"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _BlockingCall(Protocol[T_co]):
    """An object whose methods block until the coroutine methods of a `T_co` return."""

    @property
    def _awaited(self) -> T_co: ...

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R: ...


def _blocking(
    method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_BlockingCall[T], P], R]:
    """Return a method that blocks until the coroutine of `method` has ended."""

    @wraps(method)
    def wait(self: _BlockingCall[T], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(method(self._awaited, *args, **kwargs))

    return wait


class BlockingFleet:
    """The workers of one fleet: the methods of `Fleet` without `await`. `BlockingClient.fleet` returns it."""

    def __init__(self, client: "BlockingClient", fleet: Fleet) -> None:
        self._client = client
        self._awaited = fleet

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
    experts = _blocking(Fleet.experts)
    pause = _blocking(Fleet.pause)
    resume = _blocking(Fleet.resume)
    drain = _blocking(Fleet.drain)
    flush_cache = _blocking(Fleet.flush_cache)
    sleep = _blocking(Fleet.sleep)
    wake = _blocking(Fleet.wake)
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

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return self._client._run(coroutine)


class BlockingClient:
    """The `Client` for programs without asyncio. Create it with `rollbus.sync.connect` and enter it with `with`.

    Several threads may use it at the same time. Inside a running event loop, for example in a notebook, it works and
    blocks that loop. Ctrl-C ends the interrupted call as a cancellation does; the client stays usable.

    In a forked process, such as the process of a data loader, the copy of the client raises `BusClosed`. That process
    must connect its own client. The client of the parent process is not affected.

    A program that exits without leaving the client still aborts all open requests. Callbacks (`on_end`, `on_ack`) run
    on the client's own threads and must return immediately. They get a `RuntimeError` if they call the client.
    """

    def __init__(self, client: Client) -> None:
        self._awaited = client
        # Set while connected.
        self._owner: OwnerThread | None = None

    def __repr__(self) -> str:
        """Return one line with the state."""
        return f"<BlockingClient {self._awaited!r}>"

    @property
    def with_asyncio(self) -> Client:
        """The asynchronous client, for code that shares its connection."""
        return self._awaited

    @property
    def fleet(self) -> BlockingFleet:
        """The workers of the fleet, and commands to them.

        Raises:
            BusClosed: the client is not connected.
        """
        return BlockingFleet(self, self._awaited.fleet)

    def stats(self) -> ClientStats:
        """Return a copy of the counters.

        Raises:
            BusClosed: the client is not connected.
        """
        return self._awaited.stats()

    def __enter__(self) -> Self:
        """Connect, subscribe to the messages of workers, and ask all workers for their presence."""
        if self._owner is not None:
            raise BusClosed("this client is already connected; enter it only once")
        owner = OwnerThread(self._awaited)
        owner.start()
        self._owner = owner
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort all open requests and close. Calls of other threads end with `client_closed` or `BusClosed`."""
        owner, self._owner = self._connected, None
        owner.stop()

    complete = _blocking(Client.complete)
    abort = _blocking(Client.abort)

    def generate(
        self, request: GenerateRequest, *, on_end: Callable[[], None] | None = None
    ) -> Generator[Chunk, None, None]:
        """Stream the chunks of `request`, as `Client.generate` does.

        Leaving the loop, or `close` on the iterator, aborts the request.
        """
        owner, chunks = self._connected, self._awaited.generate(request, on_end=on_end)
        try:
            while (chunk := owner.run(_next(chunks))) is not None:
                yield chunk
        finally:
            owner.finish(_leave(chunks))

    def complete_many(
        self,
        requests: Iterable[GenerateRequest],
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        times: BatchTimes | None = None,
    ) -> Generator[Generation, None, None]:
        """Yield the results of many requests in the order in which they finish, as `Client.complete_many` does.

        The client draws from `requests` on the caller's thread, while the caller waits for the next result.

        Raises:
            InvalidRequest: `requests` is not iterable, is an async iterable, or has an item that is no request.
            NoWorkers, ValueError, BusClosed, Exception: as `Client.complete_many`.
        """
        if isinstance(requests, AsyncIterable):
            allowed = "an iterable; `rollbus.connect` takes async iterables"
            raise InvalidRequest(field="requests", problem="is an async iterable", allowed=allowed)
        owner, source = self._connected, iter(check_iterable(requests))
        batch, is_over = batch_of(self._awaited, max_in_flight=max_in_flight, times=times), False
        try:
            while True:
                if batch.has_room and not is_over:
                    try:
                        request = check_request(next(source))
                    except StopIteration:
                        is_over = True
                        continue
                    refused = owner.run(batch.open(request))
                    if refused is not None:
                        yield refused
                elif batch.num_in_flight:
                    yield owner.run(batch.next_result())
                else:
                    break
        finally:
            owner.finish(_close(batch))
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
    ) -> BlockingGroups:
        """Return a sampler whose steps do not wait for the slowest results, as `Client.groups` does.

        Enter it with `with`.

        The sampler draws from `prompts` on the thread that calls `step`. Arguments and errors are those of
        `Client.groups`.
        """
        owner, handed = self._connected, HandedPrompts()
        sampler = self._awaited.groups(
            handed, n=n, need=need, over=over, sampling=sampling, max_lag=max_lag, inexact=inexact
        )
        return BlockingGroups(owner, sampler, handed, prompts)

    @property
    def _connected(self) -> OwnerThread:
        if self._owner is None:
            raise BusClosed("this client is not connected; use it inside `with`")
        return self._owner

    def _run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        if self._owner is None:
            coroutine.close()
        return self._connected.run(coroutine)


async def _next(chunks: AsyncGenerator[Chunk, None]) -> Chunk | None:
    return await anext(chunks, None)


async def _leave(chunks: AsyncGenerator[Chunk, None]) -> None:
    await chunks.aclose()


async def _close(batch: Batch) -> None:
    batch.close()


def _with_blocking(make: Callable[P, Client]) -> Callable[P, BlockingClient]:
    @wraps(make)
    def connect(*args: P.args, **kwargs: P.kwargs) -> BlockingClient:
        return BlockingClient(make(*args, **kwargs))

    connect.__doc__ = (make.__doc__ or "").replace("`async with`", "`with`")
    connect.__module__ = __name__
    return connect


connect = _with_blocking(with_asyncio.connect)
