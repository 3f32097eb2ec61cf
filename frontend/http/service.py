"""What the routes share."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.calls import Admission, EventStream, until_disconnect
from frontend.http.errors import HttpError
from frontend.http.metrics import Metrics, Progress
from frontend.http.settings import Settings
from frontend.tokenization import Tokenizer, TokenizerUnavailable, load_tokenizer
from schemas.errors import ErrorCode
from schemas.presence import WorkerPresence

__all__ = ["Handler", "RouteTable", "Service"]


@dataclass(slots=True)
class Service:
    """One HTTP service in front of a fleet."""

    rb: bus.Client
    settings: Settings
    admission: Admission
    _tokenizers: dict[Path, Tokenizer] = field(default_factory=dict)
    """By folder; a fleet serves a few models."""
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        """Begin to count."""
        self.metrics = Metrics(self.rb)

    def workers(self) -> tuple[WorkerPresence, ...]:
        """Live workers, as they were last heard."""
        return self.rb.fleet.workers

    def model(self, name: str | None) -> WorkerPresence:
        """A worker of the model, which says what it can do; without a name, of the fleet's only model.

        Raises:
            HttpError: 404 if no worker serves it, 503 if there are no workers, 400 if there are several to choose from.
        """
        workers = self.workers()
        if not workers:
            raise HttpError(503, "no workers are there", code=ErrorCode.NO_WORKERS)
        models = sorted({worker.model for worker in workers})
        if name is None and len(models) > 1:
            raise HttpError(
                400, f"model is missing; allowed: {', '.join(models)}", code=ErrorCode.INVALID_REQUEST, param="model"
            )
        wanted = models[0] if name is None else name
        for worker in workers:
            if worker.model == wanted and worker.capabilities is not None:
                self.metrics.is_for(wanted)
                return worker
        message = f"model {wanted!r} is unknown; allowed: {', '.join(models)}"
        raise HttpError(404, message, code=ErrorCode.UNKNOWN_MODEL, param="model")

    async def tokenizer(self, worker: WorkerPresence) -> Tokenizer:
        """The tokenizer of a worker's model.

        Raises:
            HttpError: 501, it is not on this machine.
        """
        folder = self.settings.tokenizer or Path(worker.model_path or "")
        # One after another: several threads that import transformers at once find it half imported.
        async with self._loading:
            if folder not in self._tokenizers:
                try:
                    self._tokenizers[folder] = await asyncio.to_thread(load_tokenizer, folder)
                except TokenizerUnavailable as exc:
                    raise HttpError(501, f"{exc}; start the service with --tokenizer DIR", code="no_tokenizer") from exc
        return self._tokenizers[folder]

    def admit(self, request: Request, count: int = 1) -> None:
        """Count an HTTP request as one for tokens, or as several, until its answer has been sent.

        Raises:
            HttpError: 429.
        """
        until_answered: ExitStack = request.state.until_answered
        until_answered.enter_context(self.admission.admitted(count))

    async def complete(self, request: Request, wanted: bus.GenerateRequest) -> bus.Generation:
        """The finished result; the request is aborted if the client leaves.

        Raises:
            ClientDisconnect: it left. And what `bus.Client.complete` raises.
        """
        with self._counted(wanted) as progress:
            generation = await until_disconnect(request.receive, self.rb.complete(wanted))
            progress.finished(generation)
            return generation

    async def chunks(self, wanted: bus.GenerateRequest) -> AsyncGenerator[bus.Chunk, None]:
        """The chunks as they come; closing aborts the request. Raises what `bus.Client.generate` raises."""
        with self._counted(wanted) as progress:
            async with aclosing(self.rb.generate(wanted)) as chunks:
                async for chunk in chunks:
                    progress.add(chunk)
                    yield chunk

    def _counted(self, wanted: bus.GenerateRequest) -> AbstractContextManager[Progress]:
        models = {worker.model for worker in self.workers()}
        model = next(iter(models)) if wanted.model is None and len(models) == 1 else wanted.model
        return self.metrics.generation(model if model in models else "", wanted.prompt_len)

    async def stream(
        self, request: Request, events: AsyncGenerator[bytes, None], headers: dict[str, str]
    ) -> EventStream:
        """Begin to stream events: once the first one is there, which may be an error with a status of its own."""
        try:
            first = await until_disconnect(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, headers)


Handler = Callable[[Service, Request], Awaitable[Response]]
"""Answers one request; errors are `HttpError` or those of the bus."""
RouteTable = dict[tuple[str, str], Handler]
"""By method and path."""
