"""What the routes share."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

import bus
from frontend.http.calls import Admission, EventStream, until_disconnect
from frontend.http.errors import HttpError
from frontend.http.metrics import Metrics
from frontend.http.settings import Settings
from frontend.tokenization import Tokenizer, TokenizerUnavailable, load_tokenizer
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
        with self.metrics.generation(wanted.model or "", wanted.prompt_len) as progress:
            generation = await until_disconnect(request.receive, self.rb.complete(wanted))
            progress.finished(generation)
            return generation

    async def chunks(self, wanted: bus.GenerateRequest) -> AsyncGenerator[bus.Chunk, None]:
        """The chunks as they come; closing aborts the request. Raises what `bus.Client.generate` raises."""
        with self.metrics.generation(wanted.model or "", wanted.prompt_len) as progress:
            async with aclosing(self.rb.generate(wanted)) as chunks:
                async for chunk in chunks:
                    progress.add(chunk)
                    yield chunk

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
