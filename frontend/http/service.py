"""State and types that the routes share: settings, open requests and routes."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import bus
from ...bus.client.client import runtime_of
from ...bus.client.presence import PresenceWatcher
from ...bus.protocol.fleet.presence import WaitLimit
from ...bus.tracing.spans import Tracer
from ...schemas.presence import WorkerPresence
from ...schemas.request import check_given_id, wire_id
from ...schemas.telemetry import WaitingRequest
from ..tokenization import Tokenizer, TokenizerUnavailable
from . import Settings
from .access import user_of
from .calls import Admission, ChunksAt, EventStream, FleetTurn, StreamEnd, Turns
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
    cancelling: int = 0

    async def __aenter__(self) -> None:
        """Begin the block that `abort` ends. A class, because a generator takes five times as long."""
        self.task = asyncio.current_task()
        self.cancelling = 0 if self.task is None else self.task.cancelling()

    async def __aexit__(self, kind: type[BaseException] | None, _error: object, _traceback: object) -> None:
        """End the block.

        Raises:
            RequestAborted: the request was aborted within the block.
        """
        task, self.task = self.task, None
        if not self.is_aborted or task is None:
            return
        # An error, or another cancellation, has precedence.
        is_only = task.uncancel() <= self.cancelling
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
