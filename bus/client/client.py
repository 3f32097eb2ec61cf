"""The client that trainers use: requests in, chunks or finished generations out."""

import math
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, get_args

from ...schemas.checks import check_bool, check_float, check_int
from ...schemas.chunk import Chunk
from ...schemas.errors import BusBroken, BusClosed, InvalidRequest
from ...schemas.limits import (
    DEFAULT_MAX_IN_FLIGHT,
    DEFAULT_MAX_UNREAD_BYTES,
    DEFAULT_PREFILL_MIN_TOKENS,
    MAX_N,
    MAX_OVER,
    MAX_PROMPT_TOKENS,
    MAX_STEP_GROUPS,
    MAX_TIMEOUT_S,
    MAX_WEIGHT_VERSION,
)
from ...schemas.request import GenerateRequest
from ...schemas.sampling import SamplingParams
from ..auth.credentials import Credentials, client_identity
from ..nats.server import Server
from ..protocol.groups.planner import GroupPlanner
from ..subjects import Subjects
from ..tracing.switch import Tracing, check_tracing
from .batch import Batch, RequestSource
from .batch_times import BatchTimes
from .call_registry import CallRegistry, check_ids
from .config import ClientConfig
from .fleet import Fleet
from .generation import Generation
from .group_prompts import InexactGroups, PromptForm, Prompts
from .group_sampler import GroupSampler
from .runtime import ClientStats

__all__ = ["Client", "ClientStats", "batch_of", "connect", "registry_of"]

DEFAULT_WORKER_GRACE_S = 15.0
"""Enough for a server or a network that is restarted; a fleet that stays away longer is better told of at once."""


def connect(  # noqa: PLR0913 - each has a default, and most callers name one or two
    url: str | Sequence[str] | Server | None = None,
    *,
    fleet: str | None = None,
    client: str | None = None,
    credentials: Credentials | str | os.PathLike[str] | None = None,
    worker_grace_s: float = DEFAULT_WORKER_GRACE_S,
    max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES,
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS,
    placement: bool = True,
    tracing: Tracing = False,
) -> "Client":
    """A client of a fleet, to be entered with `async with`.

    Args:
        url: of the NATS server; None: `$ROLLBUS_NATS`, else `nats://127.0.0.1:4222`. Several, in a sequence or with
            commas between them, are servers of one cluster, of which any will do. A `Server` says everything that
            `credentials` and the environment would.
        fleet: whose workers serve the requests; None: that of the credentials, else `default`.
        client: this client's name in subjects, unique among live clients; None: that of the credentials, else drawn at
            random.
        credentials: of the NATS user to connect as, or their file; None: the file in `$ROLLBUS_CREDS`, else no user.
        worker_grace_s: seconds that requests may wait for a worker to come up when the last one of their model is gone.
            Without a connection to NATS the client takes its workers for gone after a lease and margin (6 s).
        max_unread_bytes: of results that nobody has taken yet, above which `complete_many` sends no more requests.
        prefill_min_tokens: of prompts that go to a prefill worker first, where the fleet has any.
        placement: requests go straight to a worker that has their prompt's beginning in its cache, or the group that
            they belong to, where that pays. False: the queue alone, for sessions too.
        tracing: spans of requests for OpenTelemetry (`rollbus[otel]`). True: exported as the environment says
            (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and so on). A `TracerProvider`: made by that.

    Raises:
        InvalidRequest: a name that cannot stand in a subject or is not that of the credentials, a number out of range,
            or `tracing` without OpenTelemetry.
        BusBroken: a URL is malformed, or the credentials cannot be read.
    """
    try:
        server = Server.named(url, credentials)
    except BusBroken as exc:
        # The message says it all: users need not read our frames.
        raise exc.with_traceback(None) from None
    return Client(
        server,
        fleet=fleet,
        client=client,
        worker_grace_s=worker_grace_s,
        max_unread_bytes=max_unread_bytes,
        prefill_min_tokens=prefill_min_tokens,
        placement=placement,
        tracing=tracing,
    )


class Client:
    """Requests and their streams over one connection. Made by `connect`; use it from one event loop.

    Its connection lives on a thread of its own: while the caller's loop is blocked, results come in and leases hold. A
    process that was forked gets `BusClosed` from its copy, and connects for itself; the parent's goes on.

    Entering raises `BusBroken`: `ServerUnreachable` when no server answers, `TlsFailed`, `PermissionDenied`, or the
    server's own refusal. Leaving aborts what is still open, so that no engine works
    for nobody, and closes the connection; a cancellation meanwhile is raised once that is done.
    """

    def __init__(  # noqa: PLR0913 - the arguments of `connect`
        self,
        server: Server,
        *,
        fleet: str | None,
        client: str | None,
        worker_grace_s: float,
        max_unread_bytes: int,
        prefill_min_tokens: int,
        placement: bool,
        tracing: Tracing,
    ) -> None:
        worker_grace_s = check_float("worker_grace_s", worker_grace_s, 0, MAX_TIMEOUT_S)
        self._max_unread_bytes = check_int("max_unread_bytes", max_unread_bytes, 1, 2**63)
        prefill_min_tokens = check_int("prefill_min_tokens", prefill_min_tokens, 1, MAX_PROMPT_TOKENS)
        placement = check_bool("placement", placement)
        fleet, client = client_identity(server.credentials, fleet=fleet, client=client)
        self._config = ClientConfig(
            server=server,
            subjects=Subjects(fleet),
            client=client,
            incarnation="",
            worker_grace_s=worker_grace_s,
            prefill_min_tokens=prefill_min_tokens,
            placement=placement,
            tracing=check_tracing(tracing),
        )
        # Set while connected.
        self._connected: CallRegistry | None = None

    def __repr__(self) -> str:
        """One line with the state."""
        registry = self._connected
        state = "closed" if registry is None else f"calls={registry.num_calls} unread_bytes={registry.unread_bytes}"
        return f"<Client {self._config.client} fleet={self._config.subjects.fleet} {state}>"

    @property
    def fleet(self) -> Fleet:
        """The fleet's workers.

        Raises:
            BusClosed: the client is not connected.
        """
        return self._registry.fleet

    @property
    def _registry(self) -> CallRegistry:
        if self._connected is None:
            raise BusClosed("this client is not connected; use it inside `async with`")
        self._connected.thread.check_process()
        return self._connected

    def stats(self) -> ClientStats:
        """A copy of the counters.

        Raises:
            BusClosed: the client is not connected.
        """
        return self._registry.stats()

    async def __aenter__(self) -> Self:
        """Connect, subscribe to what workers send, and ask all workers to announce themselves."""
        if self._connected is not None:
            raise BusClosed("this client is entered already")
        registry = CallRegistry(replace(self._config, incarnation=uuid.uuid4().hex[:12]))
        try:
            await registry.start()
        except BusBroken as exc:
            # As in `connect`: the thread's frames say nothing that the message does not.
            raise exc.with_traceback(None) from None
        self._connected = registry
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is open and close."""
        registry = self._connected
        if registry is None:
            raise BusClosed("this client is not connected")
        self._connected = None
        await registry.close()

    async def generate(
        self, request: GenerateRequest, *, on_end: Callable[[], None] | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of `request`, those of n > 1 samples interleaved and told apart by `child`.

        Leaving the loop early aborts the request; `contextlib.aclosing` makes that immediate.

        Args:
            on_end: called when the workers are done with the request, which may be before the last chunk was taken; not
                called if the loop was left before.

        Raises:
            RequestError: it was rejected, failed or timed out; what came before has been yielded.
        """
        registry = self._registry
        call = await registry.open(request, streams=True)
        if on_end is not None:
            call.when_ended(lambda _: on_end())
        try:
            while (chunk := await call.next_chunk()) is not None:
                yield chunk
        finally:
            registry.remove(call)

    async def complete(self, request: GenerateRequest) -> Generation:
        """The finished result of `request`; for n > 1 child 0 with `siblings`.

        Cancellation: aborts the request.

        Raises:
            RequestError: it was rejected, failed or timed out.
        """
        registry = self._registry
        call = await registry.open(request, streams=False)
        try:
            await call.wait()
            if call.error is not None:
                raise call.error
            return call.generation()
        finally:
            registry.remove(call)

    async def complete_many(
        self,
        requests: Iterable[GenerateRequest] | AsyncIterable[GenerateRequest],
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        times: BatchTimes | None = None,
    ) -> AsyncGenerator[Generation, None]:
        """Results of many requests in the order in which they finish, `max_in_flight` at a time.

        `requests` is drawn from as there is room, so that it may be endless. No more are drawn while results of more
        than `max_unread_bytes` wait to be read. Results come also while an async iterable waits for its next request. A
        request that fails harms no other: it comes as a `Generation` with `finish_reason` ERROR and `error` set.
        Leaving the loop aborts what is open, and cancels what an async iterable is doing for its next request.

        Args:
            times: is told when requests are complete: how long 50, 90, 99 and 100 % of them took.

        Raises:
            NoWorkers: no worker is left to take the next request; every result before it has been yielded.
            InvalidRequest: `requests` cannot be iterated, or has something else than requests.
            ValueError: `max_in_flight` is below 1.
            Exception: whatever `requests` raised; what is open is aborted.
        """
        batch = batch_of(self, max_in_flight=max_in_flight, times=times)
        source = RequestSource(requests, batch)
        try:
            while True:
                if batch.has_room and not source.is_over:
                    request = await source.draw()
                    refused = None if request is None else await batch.open(request)
                    if refused is not None:
                        yield refused
                elif batch.num_in_flight:
                    yield await batch.next_result()
                else:
                    break
        finally:
            batch.close()
            await source.close()
        if batch.no_workers is not None:
            raise batch.no_workers

    def groups(  # noqa: PLR0913 - each has a default but the sizes
        self,
        prompts: Prompts,
        *,
        n: int,
        need: int,
        over: float = 1.25,
        sampling: SamplingParams | None = None,
        max_lag: int | None = None,
        inexact: InexactGroups = "refuse",
    ) -> GroupSampler:
        """Steps that do not wait for their slowest answers; to be entered with `async with`.

        A step starts more groups than it needs, and is over when `need` of them are complete. The others are stopped.
        The next step continues them from their tokens.

        Args:
            prompts: token ids, requests, or `GroupPrompt`s that add a key; an iterable or an async one, which may be
                endless. They are taken one at a time. Each request gets an id of its own.
            n: answers in a group.
            need: groups in a step.
            over: groups that run at once, as a multiple of `need`, rounded up; 1: the step waits for all.
            sampling: of prompts that are token ids; None: the defaults.
            max_lag: groups whose oldest token is more versions behind than this when a step begins are dropped, and
                come as `GroupStep.dropped`. None: none are.
            inexact: prompts whose sampler has a state of its own (a seed, penalties, bad words, a grammar) cannot be
                continued exactly. `refuse`: they are not accepted. `continue`: their joined results are not `exact`.
                `drop`: once stopped they are dropped.

        Raises:
            BusClosed: the client is not connected.
            InvalidRequest: a value is out of range.
        """
        n = check_int("n", n, 1, MAX_N)
        need = check_int("need", need, 1, MAX_STEP_GROUPS)
        limit = math.ceil(check_float("over", over, 1, MAX_OVER) * need)
        if max_lag is not None:
            max_lag = check_int("max_lag", max_lag, 0, MAX_WEIGHT_VERSION)
        if inexact not in get_args(InexactGroups):
            raise InvalidRequest(field="inexact", problem=f"is {inexact!r}", allowed="refuse, continue or drop")
        form = PromptForm(n, SamplingParams() if sampling is None else sampling, inexact)
        planner = GroupPlanner(need=need, limit=limit, max_lag=max_lag)
        return GroupSampler(self._registry, prompts, form, planner)

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Stop requests of this client: each of their streams ends once, with `finish_reason` ABORT.

        A stream that has all its tokens, but not its end, ends as these tokens say.
        What had arrived stays with its caller: `complete` returns it. The engines stop working for them.

        Returns:
            Those that were open; an id that is unknown, or whose request has ended, is passed over.

        Raises:
            InvalidRequest: there are no ids.
            BusClosed: the client is not connected.
        """
        return await self._registry.abort(check_ids(request_ids))


def registry_of(client: Client) -> CallRegistry:
    """Return what a connected client consists of, for parts that share its connection and thread.

    Raises:
        BusClosed: the client is not connected.
    """
    return client._registry


def batch_of(client: Client, *, max_in_flight: int, times: BatchTimes | None) -> Batch:
    """Start a batch of a connected client; see `Client.complete_many`.

    Raises:
        BusClosed: the client is not connected.
        ValueError: `max_in_flight` is below 1.
    """
    return Batch(client._registry, max_in_flight=max_in_flight, max_unread_bytes=client._max_unread_bytes, times=times)
