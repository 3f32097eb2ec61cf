"""State and types that the routes share: settings, open requests, and the users' turns.

Users share the fleet's capacity equally. Workers pull requests from the queue in the order of their arrival. So this
service puts only a few more requests into the queue than the workers can run, and the others wait here for their
users' turns. Otherwise a flood from one user would delay all later requests of other users.
"""

import asyncio
import bisect
import itertools
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...bus.client.client import runtime_of
from ...bus.protocol.fleet.presence import WaitLimit
from ...bus.tracing.spans import Tracer
from ...schemas.errors import RequestTimeout
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.presence import WorkerPresence
from ...schemas.request import check_given_id, wire_id
from ...schemas.telemetry import WaitingRequest
from ..tokenization import Tokenizer, TokenizerUnavailable
from . import Settings
from .access import user_of
from .calls import Admission, ChunksAt, EventStream, StreamEnd
from .edge import given_request_id, while_connected
from .errors import HttpError, error_response
from .live.fleet import LiveFleet
from .metrics import Metrics
from .openai.parsers import Parsers
from .text import TokenizerLoads

if TYPE_CHECKING:
    from .control.services import Services
    from .sessions.manager import Session, Sessions


class RequestAborted(Exception):
    """A request was aborted before its token requests were open.

    Attributes:
        request_id: the id that its client chose, or a new one.
        model: the requested model; empty if it is unknown.
    """

    def __init__(self, request_id: str, models: Sequence[str]) -> None:
        self.request_id = request_id
        self.model = models[0] if models else ""
        super().__init__("the request was aborted")


@dataclass(eq=False, slots=True)
class Preparation:
    """One HTTP request from the time at which its body was read until its token requests are open."""

    request_id: str
    id_scope: str | None
    """The user, if the user's client chose the id."""
    scope: asyncio.Timeout | None
    """Ends the preparation. None: it has ended, and the token requests are open in a moment."""
    models: Sequence[str] = ()
    """The models that may serve it. Empty while they are unknown."""
    is_aborted: bool = False

    @property
    def wire_id(self) -> str:
        """Id of the request on the wire."""
        return wire_id(self.request_id, self.id_scope)

    def may_be_for(self, model: str | None) -> bool:
        """Return True if the request may be for `model`, or if that is None."""
        return model is None or not self.models or model in self.models

    def abort(self, model: str | None) -> bool:
        """End the preparation if the request is for `model`, or if that is None. Return True if it ends."""
        if self.scope is None or not (model is None or model in self.models):
            return False
        if not self.is_aborted:
            self.is_aborted = True
            self.scope.reschedule(0.0)
        return True


MIN_AHEAD: Final = 8
"""Minimum number of samples in the fleet's queue, so that a worker with a free slot need not wait for this service."""
MIN_LEFT_S: Final = 0.001
"""Least rest of a timeout in seconds: a request's timeout is above 0."""


def room_of(workers: Sequence[WorkerPresence], model: str) -> int | None:
    """Return the limit on open samples of a model in the fleet; None if no worker announces its number of slots."""
    slots = sum(
        worker.capabilities.max_num_seqs
        for worker in workers
        if worker.model == model
        and worker.state.is_present
        and worker.capabilities is not None
        and worker.capabilities.role != "prefill"
    )
    return slots + max(slots // 4, MIN_AHEAD) if slots else None


@dataclass(frozen=True, slots=True)
class FleetTurn:
    """A request that may go to the fleet now."""

    request: bus.GenerateRequest
    """The request with the rest of its timeout."""
    arrived_at: float
    """Time at which the request began to wait for its turn, on `time.monotonic()`."""
    end: Callable[[], None]
    """Call this when the request has ended in the fleet. Repeated calls are safe."""


@dataclass(slots=True, order=True)
class _Waiting:
    """A request and its turn."""

    priority: int
    serial: int
    """Position in the order of arrival."""
    user: str = field(compare=False)
    request: bus.GenerateRequest = field(compare=False)
    due: asyncio.Future[None] = field(compare=False)
    """Done as soon as the request may go to the fleet. It then counts as open."""
    has_ended: bool = field(compare=False, default=False)

    @property
    def model(self) -> str:
        return self.request.model or ""


class Turns:
    """The waiting requests of all models. Next is one of the user with the fewest open samples, its most urgent one.

    Users with equal numbers take turns.

    Args:
        workers: returns the current workers.
        default_room: limit on open samples of a model if no worker announces its number of slots.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerPresence]], default_room: int, metrics: Metrics) -> None:
        self._workers = workers
        self._default_room = default_room
        self._metrics = metrics
        self._serials = itertools.count()
        # By model: the waiting requests of all users, the most urgent first, in the order of the users' turns.
        self._waiting: dict[str, dict[str, list[_Waiting]]] = {}
        # Open samples by model and user.
        self._open: dict[str, Counter[str]] = {}
        self._by_request: dict[int, _Waiting] = {}

    @asynccontextmanager
    async def turn(self, user: str, request: bus.GenerateRequest) -> AsyncIterator[FleetTurn]:
        """Wait for a request's turn. The turn ends with the block at the latest.

        Raises:
            RequestTimeout: the request's turn did not come within its timeout.
        """
        arrived_at, due = time.monotonic(), asyncio.get_running_loop().create_future()
        waiting = _Waiting(request.priority, next(self._serials), user, request, due)
        bisect.insort(self._waiting.setdefault(waiting.model, {}).setdefault(user, []), waiting)
        end = partial(self._end, waiting)
        try:
            self._call_up(waiting.model)
            yield FleetTurn(request if due.done() else await self._wait(waiting), arrived_at, end)
        finally:
            end()

    async def _wait(self, waiting: _Waiting) -> bus.GenerateRequest:
        begun, request = time.monotonic(), waiting.request
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self._by_request[id(request)] = waiting
        try:
            self._metrics.waiting[waiting.model,] += 1
            await asyncio.wait([waiting.due], timeout=timeout_s)
        finally:
            self._metrics.waiting[waiting.model,] -= 1
            del self._by_request[id(request)]
        if not waiting.due.done():
            message = f"not finished within {timeout_s:g} s: the request waited behind other requests of this service"
            raise RequestTimeout(stage="admission", message=message, request_id=request.request_id)
        return replace(request, timeout_s=max(timeout_s - (time.monotonic() - begun), MIN_LEFT_S))

    def has_waiting(self, request: bus.GenerateRequest) -> bool:
        """Return True if a request waits for its turn."""
        return id(request) in self._by_request

    def end_wait(self, request: bus.GenerateRequest) -> None:
        """Let a request that is aborted go to the client of the bus before its turn, because only that aborts it."""
        if (waiting := self._by_request.get(id(request))) is not None and not waiting.due.done():
            self._begin(waiting)

    def _call_up(self, model: str) -> None:
        running = self._open.setdefault(model, Counter())
        if model not in self._waiting:
            return
        room = room_of(self._workers(), model) or self._default_room
        # The last request may exceed the room.
        while (users := self._waiting.get(model)) and running.total() < room:
            self._begin(users[min(users, key=running.__getitem__)][0])

    def _begin(self, waiting: _Waiting) -> None:
        self._leave(waiting)
        self._open[waiting.model][waiting.user] += waiting.request.sampling.n
        waiting.due.set_result(None)
        users = self._waiting.get(waiting.model, {})
        if waiting.user in users:
            users[waiting.user] = users.pop(waiting.user)

    def _leave(self, waiting: _Waiting) -> None:
        """Remove a waiting request."""
        users = self._waiting[waiting.model]
        users[waiting.user].remove(waiting)
        if not users[waiting.user]:
            del users[waiting.user]
        if not users:
            del self._waiting[waiting.model]

    def _end(self, waiting: _Waiting) -> None:
        if waiting.has_ended:
            return
        waiting.has_ended = True
        if not waiting.due.done():
            self._leave(waiting)
        else:
            running = self._open[waiting.model]
            running[waiting.user] -= waiting.request.sampling.n
            if not running[waiting.user]:
                del running[waiting.user]
        self._call_up(waiting.model)
        if not self._open[waiting.model]:
            del self._open[waiting.model]


BATCH_BYTES: Final = 16 << 10
"""Bytes of chunks that are converted at a time, at most about 100 tokens. It bounds the events made at once."""
ABORT_AGAIN_S: Final = 0.02
"""Seconds between two aborts of requests that wait for their turn."""
ABORT_TIMEOUT_S: Final = 10.0
"""Seconds in which requests must be open, so that they are aborted: milliseconds, and a second for an unknown model."""


@dataclass(slots=True)
class Service:
    """One HTTP service in front of a fleet."""

    rb: bus.Client
    settings: Settings
    admission: Admission
    parsers: Parsers | None = None
    """Parsers of tool calls and reasoning; None if the operator requested none."""
    loads: TokenizerLoads = field(default_factory=TokenizerLoads)
    """Loads the models' tokenizers."""
    tracer: Tracer | None = field(init=False)
    """The client's tracer; None if tracing is off."""
    metrics: Metrics = field(init=False)
    turns: Turns = field(init=False)
    _open_requests: dict[int, tuple[Request, bus.GenerateRequest]] = field(default_factory=dict)
    """The open token requests by identity, because two clients may choose one id, each with its HTTP request."""
    _preparing: dict[Request, Preparation] = field(default_factory=dict)
    """The HTTP requests whose token requests are not open yet."""
    live: LiveFleet = field(init=False)
    """The live view of the fleet."""

    sessions: "Sessions" = field(init=False)
    """The sessions of agents. `make_app` sets them, because they need this class."""
    services: "Services" = field(init=False)
    """The requests that wait at any service of the fleet. `make_app` sets it too."""
    serve_turn: "ServeTurn" = field(init=False)
    """Answers a turn of a session. `make_app` sets it too."""

    def __post_init__(self) -> None:
        """Create the metrics, the turns and the live view."""
        self.tracer = runtime_of(self.rb).tracer
        self.metrics = Metrics(self.rb)
        self.turns = Turns(lambda: self.rb.fleet.workers, self.settings.max_in_flight, self.metrics)
        self.live = LiveFleet(self.rb)

    async def tokenizer(self, worker: WorkerPresence) -> Tokenizer:
        """Return the tokenizer of a worker's model.

        Raises:
            HttpError: 501, the tokenizer is not on this machine.
        """
        folder = self._tokenizer_folder(worker)
        try:
            return await self.loads.tokenizer(folder)
        except TokenizerUnavailable as exc:
            raise HttpError(501, f"{exc}; start the service with --tokenizer DIR", code="no_tokenizer") from exc

    async def has_loaded(self, worker: WorkerPresence) -> bool:
        """Return True if the tokenizer of a worker's model is loaded or cannot be loaded. Wait some seconds for it."""
        try:
            return await self.loads.has_ended(self._tokenizer_folder(worker))
        except (HttpError, TokenizerUnavailable):
            return True

    def _tokenizer_folder(self, worker: WorkerPresence) -> Path:
        folder = self.settings.tokenizer
        if folder is None:
            folder = Path(worker.model_path or "")
            # An engine without a checkpoint has no folder. An empty path would mean the current folder.
            if not folder.is_absolute():
                message = (
                    f"no tokenizer: the model {worker.model!r} has no folder; start the service with --tokenizer DIR"
                )
                raise HttpError(501, message, code="no_tokenizer")
        return folder

    def admit(self, request: Request, count: int = 1) -> None:
        """Count an HTTP request as `count` token requests until its answer is sent.

        Raises:
            HttpError: 429, there are too many token requests.
        """
        until_answered: ExitStack = request.state.until_answered
        until_answered.enter_context(self.admission.admitted(count, self.user_of(request)))

    def user_of(self, request: Request) -> str:
        """Return a key for the user of a request."""
        state = request.scope["state"]
        if "user" not in state:
            state["user"] = user_of(request, self.settings.token, self.settings.admin_token)
        user: str = state["user"]
        return user

    async def complete(
        self, http_request: Request, request: bus.GenerateRequest, *, raises: bool = True
    ) -> bus.Generation:
        """Return the finished result. If the HTTP client disconnects, abort the request.

        Args:
            raises: False: return a failed result too, as `rollbus.Client.complete`.

        Raises:
            ClientDisconnect: the HTTP client disconnected.
            RollbusError: as `rollbus.Client.complete`.
        """
        with self.metrics.generation(request.model or "", request.prompt_len) as progress:
            with while_connected(http_request.scope), self._open(http_request, request):
                async with self.turns.turn(self.user_of(http_request), request) as turn:
                    wait_limit = self._wait_limit(http_request, turn)
                    generation = await self.rb.complete(turn.request, wait_limit=wait_limit, raises=raises)
            progress.finished(generation)
            return generation

    def _wait_limit(self, http_request: Request, turn: FleetTurn) -> WaitLimit:
        return WaitLimit(turn.arrived_at, self.settings.max_wait_s, http_request.state.waited_s)

    async def chunks(
        self, http_request: Request, request: bus.GenerateRequest, at: int = 0, *, is_limited: bool = True
    ) -> AsyncGenerator[ChunksAt, None]:
        """Yield `at` with all chunks that have arrived, as they arrive. Closing the generator aborts the request.

        Args:
            is_limited: False: without a worker, the first chunk may come later than `max_wait_s`.

        Raises:
            RollbusError: as `rollbus.Client.generate`.
        """
        runtime = runtime_of(self.rb)
        with (
            self.metrics.generation(request.model or "", request.prompt_len) as progress,
            self._open(http_request, request),
        ):
            async with self.turns.turn(self.user_of(http_request), request) as turn:
                wait_limit = self._wait_limit(http_request, turn) if is_limited else None
                # Not `generate`, which costs one more generator and one more turn for each token.
                call = await runtime.open(turn.request, streams=True, wait_limit=wait_limit)
                call.when_ended(lambda _: turn.end())
                try:
                    while chunks := await call.next_chunks(BATCH_BYTES):
                        for chunk in chunks:
                            progress.add(chunk)
                        yield at, chunks
                finally:
                    runtime.remove(call)

    @asynccontextmanager
    async def preparing(self, request: Request, body_id: str | None) -> AsyncIterator[None]:
        """Let `abort_open` end the block, which prepares the token requests of an HTTP request.

        Args:
            body_id: the request's id in the body.

        Raises:
            RequestAborted: the request was aborted within the block.
            InvalidRequest: the request's id is not valid.
        """
        given = given_request_id(request.headers) or (body_id and check_given_id("request_id", body_id))
        try:
            async with asyncio.timeout(None) as scope:
                own = Preparation(given or request.state.new_id, self.user_of(request) if given else None, scope)
                self._preparing[request] = own
                until_answered: ExitStack = request.state.until_answered
                until_answered.callback(self._preparing.pop, request, None)
                try:
                    yield
                finally:
                    own.scope = None
        except TimeoutError:
            if not own.is_aborted:
                raise
        if own.is_aborted:
            raise RequestAborted(own.request_id, own.models)

    def is_for(self, request: Request, models: Sequence[str]) -> None:
        """Record the models that an HTTP request may be for, while it is prepared."""
        if (own := self._preparing.get(request)) is not None:
            own.models = tuple(models)

    @contextmanager
    def _open(self, http_request: Request, request: bus.GenerateRequest) -> Iterator[None]:
        self._open_requests[id(request)] = http_request, request
        self._preparing.pop(http_request, None)
        try:
            yield
        finally:
            del self._open_requests[id(request)]

    async def waiting(self, model: str | None, ids: Collection[str] | None) -> list[WaitingRequest]:
        """Return the requests of this service that no worker has. Arguments are as for `abort_open`."""
        runtime, now = runtime_of(self.rb), time.monotonic()

        def in_queue() -> set[str]:
            children = runtime.coordinator.open_children(lambda child: child.worker is None)
            return {child.open_call.request_id for child in children}

        def described(key: Request, each: Preparation | bus.GenerateRequest, name: str, stage: str) -> WaitingRequest:
            seconds = round(now - key.state.began_at, 3)
            own = each.request_id, each.wire_id
            return WaitingRequest(request_id=own[0], wire_id=own[1], model=name, stage=stage, seconds=seconds)

        queued = await runtime.thread.call(in_queue)
        found = [
            described(key, each, next(iter(each.models), ""), "preparing")
            for key, each in self._preparing.items()
            if each.may_be_for(model)
        ]
        for key, request in self._open_requests.values():
            stage = "turn" if self.turns.has_waiting(request) else "queue" if request.wire_id in queued else ""
            if stage and model in (None, request.model):
                found.append(described(key, request, request.model or "", stage))
        return [each for each in found if ids is None or each.request_id in ids]

    async def abort_open(self, model: str | None, ids: Collection[str] | None = None) -> dict[str, str]:
        """Abort the open requests of this service, even those that wait here or in the queue.

        Requests that are prepared now end at once. If their model counts and is unknown yet, they end when it is known.

        Args:
            model: None: requests to any model.
            ids: ids of the requests, chosen by their clients. None: all.

        Returns:
            The ids of the aborted requests, by wire id.
        """
        own: list[tuple[Request, Preparation | bus.GenerateRequest]] = [
            *self._preparing.items(),
            *self._open_requests.values(),
        ]
        arrived = {http_request for http_request, each in own if ids is None or each.request_id in ids}
        # By identity. The objects are kept, so that no later request has the same identity.
        meant: dict[int, bus.GenerateRequest] = {}
        ended: set[int] = set()
        found: dict[str, str] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while True:
                    for http_request in arrived & self._preparing.keys():
                        preparation = self._preparing[http_request]
                        if preparation.abort(model):
                            found[preparation.wire_id] = preparation.request_id
                            arrived.discard(http_request)
                    for key, (http_request, each) in self._open_requests.items():
                        if http_request in arrived and model in (None, each.model):
                            meant[key] = each
                            self.turns.end_wait(each)
                    left = (meant.keys() & self._open_requests.keys()) - ended
                    preparing = [self._preparing[each] for each in arrived & self._preparing.keys()]
                    if not left and not any(each.may_be_for(model) for each in preparing):
                        break
                    if left:
                        aborted = await self.rb.abort([meant[key].request_id for key in left])
                        ended.update(key for key in left if meant[key].request_id in aborted)
                    await asyncio.sleep(ABORT_AGAIN_S)
        return found | {each.wire_id: each.request_id for each in meant.values()}

    async def stream(
        self,
        request: Request,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        ending: StreamEnd,
    ) -> EventStream:
        """Start a stream after its first event, because an error before that event sets the HTTP status."""
        try:
            with while_connected(request.scope):
                first = await anext(events)
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, headers, ending)


ServeTurn = Callable[[Service, Request, "Session", Any], Awaitable[Response]]
"""Answers an `openai.routes.AskedTurn` as a turn of a session."""
Handler = Callable[[Service, Request], Awaitable[Response]]
"""Answers one request. It may raise `HttpError` and errors of the bus."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route: its handler, and the types that the OpenAPI document shows for it."""

    handler: Handler
    body: type[msgspec.Struct] | None = None
    """Type that the handler decodes from the body; None if it reads no body."""
    answer: object = Any
    """Type of the JSON answer, a media type for text, None for an empty answer, or a dict of these by status.

    Errors are not listed, because all have the same fields. An error may have more fields.
    """
    query: type | None = None
    """Struct of the query parameters."""
    errors: Callable[[HttpError], Response] = error_response
    """Returns the answer for an error, in the format of the route's API."""


RouteTable = dict[tuple[str, str], HttpRoute]
"""Routes by method and path."""
