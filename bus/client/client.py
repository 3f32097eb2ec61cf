"""The client for trainers: it sends requests, one or many at once, and returns chunks or complete generations."""

import math
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, get_args

from ...schemas.checks import check_bool, check_float, check_int
from ...schemas.chunk import Chunk
from ...schemas.errors import BusBroken, BusClosed, InvalidRequest
from ...schemas.limits import (
    DEFAULT_MAX_BUFFERED_BYTES,
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
from ...schemas.request import GenerateRequest, TokenIds, as_request
from ...schemas.sampling import SamplingParams
from ..auth.credentials import Credentials, client_identity
from ..nats.server import Server
from ..protocol.fleet.presence import WaitLimit
from ..protocol.groups import GroupPlanner
from ..subjects import Subjects
from ..tracing.spans import Tracing, check_tracing
from .batches import AsyncRequests, BatchTimes, ChunkBatch, Requests, ResultBatch, drain
from .config import ClientConfig, ClientStats
from .fleet import Fleet
from .fleet_state import FleetWatch
from .generation import Generation
from .groups import GroupSampler, InexactGroups, PromptForm, Prompts
from .record_writer import RunRecorder
from .runtime import Runtime

DEFAULT_WORKER_GRACE_S = 15.0
"""Seconds. A restart of the server or the network takes less; after a longer outage an error helps the caller more."""


class Client:
    """Sends requests and receives their results over one connection. Create it with `connect`.

    Use a client while the event loop that connected it runs. Its connection runs on a separate thread. While the event
    loop is blocked, the client still receives results and keeps its leases. If that loop has ended, the client raises
    `BusClosed` in every other loop. It can still be closed there.

    In a forked process, the copy of the client raises `BusClosed`; that process must connect its own client. The client
    of the parent process is not affected.

    Entering raises `BusBroken` or one of its subclasses: `ServerUnreachable` if no server answers, `TlsFailed`, or
    `PermissionDenied`. Leaving aborts all open requests, so that no engine works without a reader, and closes the
    connection. If leaving is cancelled, it completes first and then raises the cancellation.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        # Set while connected.
        self._connected: Runtime | None = None
        self._fleet: Fleet

    def __repr__(self) -> str:
        """Return one line with the state."""
        runtime = self._connected
        state = "closed" if runtime is None else f"calls={runtime.num_calls} unread_bytes={runtime.unread_bytes}"
        return f"<Client {self._config.client} fleet={self._config.subjects.fleet} {state}>"

    @property
    def fleet(self) -> Fleet:
        """The workers of the fleet, and commands to them.

        Raises:
            BusClosed: the client is not connected.
        """
        self._runtime  # noqa: B018 - a closed client fails here
        return self._fleet

    @property
    def _runtime(self) -> Runtime:
        if self._connected is None:
            raise BusClosed("this client is not connected; use it inside `async with`, or take `rollbus.sync.connect`")
        self._connected.thread.check_usable()
        return self._connected

    def stats(self) -> ClientStats:
        """Return a copy of the counters.

        Raises:
            BusClosed: the client is not connected.
        """
        return self._runtime.stats()

    async def __aenter__(self) -> Self:
        """Connect, subscribe to the messages of workers, and ask all workers for their presence."""
        if self._connected is not None:
            raise BusClosed("this client is already connected; enter it only once")
        runtime = Runtime(replace(self._config, incarnation=uuid.uuid4().hex[:12]))
        try:
            await runtime.start()
        except BusBroken as exc:
            # As in `connect`: the traceback of the thread adds nothing to the message.
            raise exc.with_traceback(None) from None
        self._connected, self._fleet = runtime, Fleet(runtime)
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Abort all open requests and close the connection."""
        runtime = self._connected
        if runtime is None:
            raise BusClosed("this client is not connected")
        self._connected = None
        del self._fleet
        await runtime.close()

    async def generate(
        self,
        request: GenerateRequest | TokenIds | None = None,
        *,
        on_end: Callable[[], None] | None = None,
        wait_limit: WaitLimit | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of `request`. With n > 1, chunks of all samples are interleaved and have their `child`.

        If the caller leaves the loop early, the client aborts the request. Use `contextlib.aclosing` to abort
        immediately.

        Args:
            request: request, or the token ids of a prompt: `rb.generate([1, 2, 3], max_tokens=8)`.
            on_end: called when the workers have finished the request, possibly before the caller has read the last
                chunk. It is not called if the caller leaves the loop before that.
            wait_limit: limit for the time without a serving worker before the first chunk. None: until the deadline.
            fields: fields of `GenerateRequest` and of `SamplingParams`, for a prompt of token ids.

        Raises:
            RequestError: the request was rejected, failed or timed out. All chunks received before have been yielded.
            BusClosed: the client is not connected.
        """
        runtime = self._runtime
        call = await runtime.open(as_request(request, fields), streams=True, wait_limit=wait_limit)
        if on_end is not None:
            call.when_ended(lambda _: on_end())
        try:
            while (chunk := await call.next_chunk()) is not None:
                yield chunk
        finally:
            runtime.remove(call)

    async def complete(
        self,
        /,
        request: GenerateRequest | TokenIds | None = None,
        *,
        wait_limit: WaitLimit | None = None,
        raises: bool = True,
        **fields: Any,
    ) -> Generation:
        """Return the complete result of `request`. With n > 1, that is child 0 with the others in `siblings`.

        Args:
            request: request, or the token ids of a prompt: `await rb.complete([1, 2, 3], max_tokens=8)`.
            wait_limit: limit for the time without a serving worker before the first token. None: until the deadline.
            raises: False: if the request fails or times out, return the tokens so far, with `Generation.error`.
            fields: fields of `GenerateRequest` and of `SamplingParams`, for a prompt of token ids.

        Cancellation: aborts the request.

        Raises:
            RequestError: the request was rejected, failed or timed out.
            BusClosed: the client is not connected.
        """
        runtime = self._runtime
        call = await runtime.open(as_request(request, fields), streams=False, wait_limit=wait_limit)
        try:
            await call.wait()
            if raises and call.error is not None:
                raise call.error
            return await runtime.pop_result(call)
        finally:
            runtime.remove(call)

    def complete_many(
        self,
        requests: Requests | AsyncRequests,
        *,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        times: BatchTimes | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Generation, None]:
        """Yield the results of many requests in the order in which they finish.

        The client draws from `requests` when it can send another request, so `requests` may be endless. It draws none
        while `max_in_flight` requests are open, or while more than `max_unread_bytes` of results are unread. It yields
        results also while an async iterable waits for its next request.

        A failed request does not affect the others. Its result is a `Generation` with `finish_reason` ERROR and `error`
        set. If the caller leaves the loop, the client aborts all open requests and cancels the pending `anext` of an
        async iterable.

        Args:
            requests: requests to send, or the token ids of each prompt, in an iterable or an async iterable.
            max_in_flight: requests that may be open at the same time (default: 512).
            times: records when 50, 90, 99 and 100 % of the requests were complete.
            fields: fields of `GenerateRequest` and of `SamplingParams`, for prompts of token ids.

        Raises:
            NoWorkers: no worker is left for the next request. All earlier results have been yielded.
            InvalidRequest: `requests` is not iterable or has an item that is no request; a field is wrong; or
                `max_in_flight` is not an integer from 1 to 1,000,000.
            BusClosed: the client is not connected.
            Exception: `requests` raised it. The client has aborted all open requests.
        """
        return drain(lambda: ResultBatch(self._runtime, max_in_flight, times), requests, fields)

    def stream_many(
        self, requests: Requests | AsyncRequests, *, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT, **fields: Any
    ) -> AsyncGenerator[list[Chunk], None]:
        """Yield the chunks of many requests: in each list all that have arrived since the last one.

        Each chunk has its `request_id` and `child`; chunks of one sample are in order. For hundreds of streams this
        costs less than a loop over `generate` for each: the caller's loop wakes up once for a frame, not once for each
        request.

        The client draws from `requests` as `complete_many` does. The limits of the open requests bound the unread
        chunks. Each sample ends with one terminal chunk (`is_terminal`). A failed request does not affect the others:
        each of its open samples ends with a chunk whose `finish_reason` is ERROR and whose `error` has the code and the
        message. `chunk.error.exception(chunk.request_id)` is the exception that `generate` raises. If the caller leaves
        the loop, the client aborts all open requests, as in `complete_many`.

        Args:
            requests: requests to send, or the token ids of each prompt, in an iterable or an async iterable.
            max_in_flight: requests that may be open at the same time (default: 512).
            fields: fields of `GenerateRequest` and of `SamplingParams`, for prompts of token ids.

        Raises:
            NoWorkers, InvalidRequest, BusClosed, Exception: as `complete_many`.
        """
        return drain(lambda: ChunkBatch(self._runtime, max_in_flight), requests, fields)

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
        record: RunRecorder | None = None,
    ) -> GroupSampler:
        """Return a sampler whose steps do not wait for their slowest answers. Enter it with `async with`.

        A step starts more groups than it needs and ends when `need` of them are complete. It stops the other groups.
        The next step continues the stopped groups from their tokens.

        Args:
            prompts: token ids, requests, or `GroupPrompt`s that add a key, in an iterable or an async iterable. It may
                be endless. The sampler draws one prompt at a time and gives each request a new id.
            n: answers in a group, 1 to 256.
            need: groups in a step, 1 to 65,536.
            over: groups that run at the same time, as a multiple of `need` from 1 to 8, rounded up (default: 1.25).
                With 1 the step waits for all groups.
            sampling: sampling parameters of prompts that are token ids. None: the defaults of `SamplingParams`.
            max_lag: at the start of a step, the sampler drops each group whose oldest token is more than this many
                versions behind. Dropped groups are in `GroupStep.dropped`. None: no group is dropped for its age.
            inexact: handling of prompts whose sampler has state (a seed, penalties, bad words, a grammar) and cannot
                continue exactly. `refuse` (default): raise an error. `continue`: continue them; the joined results are
                not `exact`. `drop`: drop such a group when it was stopped.
            record: record of these groups. None: the record of this client, if it has one.

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
            raise InvalidRequest("inexact", f"is {inexact!r}", "refuse, continue or drop")
        form = PromptForm(n, SamplingParams() if sampling is None else sampling, inexact)
        planner = GroupPlanner(need=need, limit=limit, max_lag=max_lag)
        return GroupSampler(self._runtime, prompts, form, planner, record)

    def record(
        self,
        folder: str | os.PathLike[str],
        *,
        experts: bool = False,
        max_buffered_bytes: int = DEFAULT_MAX_BUFFERED_BYTES,
    ) -> RunRecorder:
        """Record the results of `complete`, `complete_many` and `groups` from now on; needs `rollbus[data]`.

        The folder gets a row for each sample within 5 seconds. `rollbus.read_record` reads it without a worker. Streams
        have no row. The record ends when the client or the recorder is closed.

        Args:
            folder: folder of the record. Several processes may record into one folder.
            experts: True: also record the routed experts, in files of their own (default: False).
            max_buffered_bytes: bytes of rows in memory above which results wait for the disk (default: 256 MiB).

        Raises:
            InvalidRequest: this client has an open record, a value is not valid, or pyarrow is not installed.
            OSError: the folder cannot be written.
        """
        earlier = self._runtime.recorder
        if earlier is not None and earlier.is_open:
            problem = f"is {os.fspath(folder)!r}, but this client records into {str(earlier.folder)!r}"
            raise InvalidRequest("folder", problem, "one open record; close the first")
        self._runtime.recorder = started = RunRecorder(folder, experts=experts, max_buffered_bytes=max_buffered_bytes)
        return started

    async def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests of this client. Each of their response streams ends once, with `finish_reason` ABORT.

        If a request has all its tokens and only its terminal chunk is missing, it ends with the finish reason that
        follows from these tokens. The caller keeps the results received before: `complete` returns them. The engines
        stop the aborted requests.

        Returns:
            Ids of the requests that were open. Unknown ids and ids of ended requests are left out.

        Raises:
            InvalidRequest: `request_ids` is empty, or a single string.
            BusClosed: the client is not connected.
        """
        if isinstance(request_ids, str):
            raise InvalidRequest("request_ids", "is a string", "a list of request ids")
        ids = list(request_ids)
        if not ids:
            raise InvalidRequest("request_ids", "is empty", "at least one request id")
        return await self._runtime.abort(ids)


def runtime_of(client: Client) -> Runtime:
    """Return the runtime of a connected client, for code that shares its connection and thread.

    Raises:
        BusClosed: the client is not connected.
    """
    return client._runtime


def connect(  # noqa: PLR0913 - each has a default, and most callers name one or two
    url: str | Sequence[str] | Server | None = None,
    *,
    fleet: str | None = None,
    client: str | None = None,
    credentials: Credentials | str | os.PathLike[str] | None = None,
    worker_grace_s: float = DEFAULT_WORKER_GRACE_S,
    wait_for_workers_s: float = 0.0,
    max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES,
    prefill_min_tokens: int = DEFAULT_PREFILL_MIN_TOKENS,
    placement: bool = True,
    tracing: Tracing = False,
) -> Client:
    """Return a client of a fleet. Enter it with `async with` to connect.

    Args:
        url: URL of the NATS server. None: `$ROLLBUS_NATS`, or `nats://127.0.0.1:4222` if that is not set. Several
            URLs, in a sequence or separated by commas, are servers of one cluster; the client connects to any of them.
            A `Server` replaces `credentials` and the environment.
        fleet: name of the fleet whose workers serve the requests. None: the fleet in the credentials, or `default`.
        client: name of this client in subjects, unique among connected clients. None: the name in the credentials, or
            a random name.
        credentials: credentials of the NATS user, or their file. None: the file in `$ROLLBUS_CREDS`, or no user.
        worker_grace_s: seconds that a request waits for a worker after the last worker of its model was lost (default:
            15). While the client is disconnected from NATS, it treats workers as lost after lease plus margin (6 s).
            While a worker of the model starts, updates or is paused, requests wait until their deadline.
        wait_for_workers_s: seconds that a request waits for a worker if no worker serves its model and none starts
            (default: 0: a new request fails with `NoWorkers` after half a second). A larger value than `worker_grace_s`
            replaces it.
        max_unread_bytes: bytes of unread results above which `complete_many` and `stream_many` send no more
            requests (default: 1 GiB).
        prefill_min_tokens: prompts of at least this many tokens go to a prefill worker first, if the fleet has one
            (default: 32).
        placement: True (default): the client may send a request directly to a worker that has the beginning of its
            prompt in the prefix cache, or that serves its group. False: all requests, also those of sessions, go
            through the queue.
        tracing: OpenTelemetry spans of requests; needs `rollbus[otel]`. False (default): none. True: the environment
            configures the export (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and so on). A `TracerProvider`:
            that provider creates the spans.

    Raises:
        InvalidRequest: a name is not valid in a subject or differs from the credentials, a number is out of range, or
            `tracing` is set and OpenTelemetry is not installed.
        BusBroken: a URL is malformed, or the credentials cannot be read.
    """
    try:
        server = Server.named(url, credentials)
    except BusBroken as exc:
        # The message is complete without the internal frames of the traceback.
        raise exc.with_traceback(None) from None
    worker_grace_s = check_float("worker_grace_s", worker_grace_s, 0, MAX_TIMEOUT_S)
    wait_for_workers_s = check_float("wait_for_workers_s", wait_for_workers_s, 0, MAX_TIMEOUT_S)
    fleet, client = client_identity(server.credentials, fleet=fleet, client=client)
    return Client(
        ClientConfig(
            server=server,
            subjects=Subjects(fleet),
            client=client,
            worker_grace_s=max(worker_grace_s, wait_for_workers_s),
            wait_for_workers_s=wait_for_workers_s,
            max_unread_bytes=check_int("max_unread_bytes", max_unread_bytes, 1, 2**63),
            prefill_min_tokens=check_int("prefill_min_tokens", prefill_min_tokens, 1, MAX_PROMPT_TOKENS),
            placement=check_bool("placement", placement),
            tracing=check_tracing(tracing),
        )
    )


def watch_fleet(client: Client) -> FleetWatch:
    """Return a view of the fleet of a connected client.

    Raises:
        BusClosed: the client is not connected.
    """
    return FleetWatch(runtime_of(client))
