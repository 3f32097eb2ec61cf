"""State and types that the routes share: settings, open requests, and the users' turns.

Users share the fleet's capacity equally. Workers pull requests from the queue in the order of their arrival. So this
service puts only a few more requests into the queue than the workers can run, and the others wait here for their
users' turns. Otherwise a flood from one user would delay all later requests of other users.
"""

import asyncio
import bisect
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...bus.client.client import runtime_of
from ...bus.client.presence import PresenceWatcher
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
from .metrics import GenerationTimer, Metrics
from .openai.parsers import Parsers
from .text import TokenizerLoads

if TYPE_CHECKING:
    from .control.services import Services
    from .requests import RequestTarget
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
    models: Sequence[str] = ()
    """The models that may serve it. Empty while they are unknown."""
    is_aborted: bool = False
    task: asyncio.Task[Any] | None = None
    """The task that prepares. None: it has ended, and the token requests are open in a moment."""

    async def __aenter__(self) -> None:
        """Begin the block that `abort` ends. A class, because a generator takes five times as long."""
        self.task = asyncio.current_task()

    async def __aexit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        """End the block.

        Raises:
            RequestAborted: the request was aborted within the block.
        """
        task, self.task = self.task, None
        if not self.is_aborted or task is None:
            return
        # An error, or another cancellation, has precedence.
        is_only = not task.uncancel()
        if kind is None or (is_only and issubclass(kind, asyncio.CancelledError)):
            raise RequestAborted(self.request_id, self.models) from None

    @property
    def wire_id(self) -> str:
        """Id of the request on the wire."""
        return wire_id(self.request_id, self.id_scope)

    def may_be_for(self, model: str | None) -> bool:
        """Return True if the request may be for `model`, or if that is None."""
        return model is None or not self.models or model in self.models

    def abort(self, model: str | None) -> bool:
        """End the preparation if the request is for `model`, or if that is None. Return True if it ends."""
        if self.task is None or not (model is None or model in self.models):
            return False
        if not self.is_aborted:
            self.is_aborted = True
            self.task.cancel()
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


T = TypeVar("T")


Workers = Callable[[], Sequence[WorkerPresence]]
"""Returns the current workers, the same object until they change."""


def of_fleet(workers: Workers, find: Callable[[Sequence[WorkerPresence], str], T | None]) -> Callable[[str], T | None]:
    """Return what follows from the current workers for a model, found again only when they have changed.

    Args:
        find: finds it. None is not kept, because clients choose the names of models.
    """
    seen: Sequence[WorkerPresence] = ()
    found: dict[str, T] = {}

    def current(model: str) -> T | None:
        nonlocal seen, found
        if (now := workers()) is not seen:
            seen, found = now, {}
        if model not in found and (new := find(now, model)) is not None:
            found[model] = new
        return found.get(model)

    return current


@dataclass(slots=True, eq=False)
class FleetTurn:
    """The turn of one request: a block that begins when the request may go to the fleet, and ends the turn at last."""

    turns: "Turns"
    user: str
    request: bus.GenerateRequest
    """The request. Within the block, it has the rest of its timeout."""
    http_request: Any
    serial: int
    """Position in the order of arrival."""
    model: str
    arrived_at: float = field(default_factory=time.monotonic)
    """Time at which the request began to wait for its turn, on `time.monotonic()`."""
    due: asyncio.Future[None] | None = None
    """Done as soon as the request may go to the fleet. None: it has not waited."""
    is_open: bool = False
    """True: the request counts as open."""
    has_ended: bool = False

    async def __aenter__(self) -> Self:
        """Wait for the turn.

        Raises:
            RequestTimeout: the request's turn did not come within its timeout.
        """
        self.turns.entered[self] = None
        try:
            await self.turns.wait_for(self)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        """End the turn."""
        self.end()
        del self.turns.entered[self]

    def end(self) -> None:
        """End the turn: the request has ended in the fleet. Repeated calls are safe."""
        if not self.has_ended:
            self.has_ended = True
            self.turns.remove(self)


class Turns:
    """The waiting requests of all models. Next is one of the user with the fewest open samples, its most urgent one.

    Users with equal numbers take turns.

    Args:
        default_room: limit on open samples of a model if no worker announces its number of slots.
    """

    def __init__(self, workers: Workers, default_room: int, metrics: Metrics) -> None:
        self._room_of = of_fleet(workers, room_of)
        self._default_room = default_room
        self._metrics = metrics
        self._serials = itertools.count()
        # By model: the waiting requests of all users, the most urgent first, in the order of the users' turns.
        self._waiting: dict[str, dict[str, list[FleetTurn]]] = {}
        # Open samples by model and user.
        self._open: dict[str, dict[str, int]] = {}
        self.entered: dict[FleetTurn, None] = {}
        """The turns whose blocks run or wait. Two clients may choose one id, so they are known by identity."""

    def turn(self, user: str, request: bus.GenerateRequest, http_request: object = None) -> FleetTurn:
        """Return the turn of a request, which an `async with` block waits for."""
        return FleetTurn(self, user, request, http_request, next(self._serials), request.model or "")

    async def wait_for(self, turn: FleetTurn) -> None:
        """Wait for a turn, as entering it does."""
        if turn.model not in self._waiting and self._has_room(turn.model):
            self._open_up(turn)
            return
        turn.due = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(turn.model, {}).setdefault(turn.user, [])
        bisect.insort(turns, turn, key=lambda one: (one.request.priority, one.serial))
        self._call_up(turn.model)
        if not turn.is_open:
            turn.request = await self._wait(turn, turn.due)

    async def _wait(self, turn: FleetTurn, due: asyncio.Future[None]) -> bus.GenerateRequest:
        begun, request = time.monotonic(), turn.request
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        self._metrics.waiting[turn.model,] += 1
        try:
            await asyncio.wait([due], timeout=timeout_s)
        finally:
            self._metrics.waiting[turn.model,] -= 1
        if not turn.is_open:
            message = f"not finished within {timeout_s:g} s: the request waited behind other requests of this service"
            raise RequestTimeout(stage="admission", message=message, request_id=request.request_id)
        return replace(request, timeout_s=max(timeout_s - (time.monotonic() - begun), MIN_LEFT_S))

    def end_wait(self, turn: FleetTurn) -> None:
        """Let a request that is aborted go to the client of the bus before its turn, because only that aborts it."""
        if not turn.is_open:
            self._begin(turn)

    def _has_room(self, model: str) -> bool:
        # The last request may exceed the room.
        return sum(self._open.get(model, {}).values()) < (self._room_of(model) or self._default_room)

    def _call_up(self, model: str) -> None:
        while (users := self._waiting.get(model)) and self._has_room(model):
            running = self._open.get(model, {})
            self._begin(users[min(users, key=lambda user: running.get(user, 0))][0])

    def _begin(self, turn: FleetTurn) -> None:
        """Open up a waiting request."""
        self._leave(turn)
        self._open_up(turn)
        users = self._waiting.get(turn.model, {})
        if turn.user in users:
            users[turn.user] = users.pop(turn.user)

    def _open_up(self, turn: FleetTurn) -> None:
        running = self._open.setdefault(turn.model, {})
        running[turn.user] = running.get(turn.user, 0) + turn.request.sampling.n
        turn.is_open = True
        if turn.due is not None:
            turn.due.set_result(None)

    def _leave(self, turn: FleetTurn) -> None:
        """Remove a waiting request."""
        users = self._waiting[turn.model]
        users[turn.user].remove(turn)
        if not users[turn.user]:
            del users[turn.user]
        if not users:
            del self._waiting[turn.model]

    def remove(self, turn: FleetTurn) -> None:
        """Remove a request that has ended, or that waits no more."""
        model = turn.model
        if turn.is_open:
            running = self._open[model]
            running[turn.user] -= turn.request.sampling.n
            if not running[turn.user]:
                del running[turn.user]
            if not running:
                del self._open[model]
        else:
            self._leave(turn)
        self._call_up(model)


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
    watcher: PresenceWatcher = field(init=False)
    """The client's view of the workers."""
    metrics: Metrics = field(init=False)
    turns: Turns = field(init=False)
    _preparing: dict[Request, Preparation] = field(default_factory=dict)
    """The HTTP requests whose token requests are not open yet."""
    live: LiveFleet = field(init=False)
    """The live view of the fleet."""

    sessions: "Sessions" = field(init=False)
    """The sessions of agents. `make_app` sets them, because they need this class."""
    targets: "Callable[[str], RequestTarget | None]" = field(init=False)
    """Returns the model or adapter of that name that workers announce. `make_app` sets it too."""
    services: "Services" = field(init=False)
    """The requests that wait at any service of the fleet. `make_app` sets it too."""
    serve_turn: "ServeTurn" = field(init=False)
    """Answers a turn of a session. `make_app` sets it too."""

    def __post_init__(self) -> None:
        """Create the metrics, the turns and the live view."""
        runtime = runtime_of(self.rb)
        self.tracer, self.watcher = runtime.tracer, runtime.watcher
        self.metrics = Metrics(self.rb)
        self.turns = Turns(self.workers, self.settings.max_in_flight, self.metrics)
        self.live = LiveFleet(self.rb)

    def workers(self) -> Sequence[WorkerPresence]:
        """Return the live workers."""
        return self.watcher.snapshot.workers

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
        user = self.user_of(request)
        self.admission.add(count, user)
        until_answered: ExitStack = request.scope["state"]["until_answered"]
        until_answered.callback(self._leave, request, count, user)

    def _leave(self, request: Request, count: int, user: str) -> None:
        self.admission.remove(count, user)
        self._preparing.pop(request, None)

    def user_of(self, request: Request) -> str:
        """Return a key for the user of a request."""
        state = request.scope["state"]
        user: str | None = state.get("user")
        if user is None:
            user = state["user"] = user_of(request, self.settings.token, self.settings.admin_token)
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
        timer = GenerationTimer(self.metrics, request.model or "", request.prompt_len)
        with timer, while_connected(http_request.scope):
            async with self._turn(http_request, request) as turn:
                generation = await self.rb.complete(turn.request, wait_limit=self._wait_limit(turn), raises=raises)
            timer.finished(generation)
            return generation

    def _turn(self, http_request: Request, request: bus.GenerateRequest) -> FleetTurn:
        self._preparing.pop(http_request, None)
        return self.turns.turn(self.user_of(http_request), request, http_request)

    def _wait_limit(self, turn: FleetTurn) -> WaitLimit:
        return WaitLimit(turn.arrived_at, self.settings.max_wait_s, turn.http_request.scope["state"]["waited_s"])

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
        with GenerationTimer(self.metrics, request.model or "", request.prompt_len) as progress:
            async with self._turn(http_request, request) as turn:
                wait_limit = self._wait_limit(turn) if is_limited else None
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

    def preparing(self, request: Request, body_id: str | None) -> Preparation:
        """Return a block that `abort_open` ends. It prepares the token requests of an HTTP request after `admit`.

        Args:
            body_id: the request's id in the body.

        Raises:
            InvalidRequest: the request's id is not valid.
        """
        given = given_request_id(request.headers) or (body_id and check_given_id("request_id", body_id))
        user = self.user_of(request) if given else None
        own = self._preparing[request] = Preparation(given or request.scope["state"]["new_id"], user)
        return own

    def is_for(self, request: Request, models: Sequence[str]) -> None:
        """Record the models that an HTTP request may be for, while it is prepared."""
        if (own := self._preparing.get(request)) is not None:
            own.models = tuple(models)

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
        for turn in self.turns.entered:
            stage = "queue" if turn.request.wire_id in queued else "" if turn.is_open else "turn"
            if stage and model in (None, turn.model):
                found.append(described(turn.http_request, turn.request, turn.model, stage))
        return [each for each in found if ids is None or each.request_id in ids]

    async def abort_open(self, model: str | None, ids: Collection[str] | None) -> dict[str, str]:
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
            *((turn.http_request, turn.request) for turn in self.turns.entered),
        ]
        arrived = {http_request for http_request, each in own if ids is None or each.request_id in ids}
        meant, ended, found = set[FleetTurn](), set[FleetTurn](), dict[str, str]()
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                while True:
                    for http_request in arrived & self._preparing.keys():
                        preparation = self._preparing[http_request]
                        if preparation.abort(model):
                            found[preparation.wire_id] = preparation.request_id
                            arrived.discard(http_request)
                    for turn in self.turns.entered:
                        if turn.http_request in arrived and model in (None, turn.model):
                            meant.add(turn)
                            self.turns.end_wait(turn)
                    left = (meant & self.turns.entered.keys()) - ended
                    preparing = [self._preparing[each] for each in arrived & self._preparing.keys()]
                    if not left and not any(each.may_be_for(model) for each in preparing):
                        break
                    if left:
                        aborted = await self.rb.abort([turn.request.request_id for turn in left])
                        ended.update(turn for turn in left if turn.request.request_id in aborted)
                    await asyncio.sleep(ABORT_AGAIN_S)
        return found | {turn.request.wire_id: turn.request.request_id for turn in meant}

    async def stream(
        self, request: Request, events: AsyncGenerator[bytes, None], headers: dict[str, str], ending: StreamEnd
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
