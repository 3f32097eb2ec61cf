"""The open requests of a worker and what is on its way to their clients: plain state, no I/O.

Invariant: a request that was admitted or rejected here gets exactly one terminal chunk, in order behind its others.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bus.protocol.chunking import ChunkWriter
from bus.protocol.outbox import Outbox
from bus.protocol.step import RequestStep
from schemas.chunk import ChunkError
from schemas.errors import ErrorCode, InvalidRequest, LocalProtocolError, RequestError
from schemas.messages import RequestKey
from schemas.presence import Capabilities
from schemas.request import GenerateRequest

__all__ = ["OpenRequest", "StreamStats", "Streams", "engine_key"]

logger = logging.getLogger(__name__)

PART_BYTES = 256 * 1024
"""Routing is sent in parts of this size, so that it holds up nobody's tokens for long."""
FRAME_MARGIN_BYTES = 4096
"""Room below `max_payload` for what a frame holds besides its chunks."""


def engine_key(client: str, key: RequestKey) -> str:
    """The name of a request inside the engine: ids are unique per client only."""
    return f"{client}/{key.request_id}/{key.attempt}/{key.child}"


@dataclass(slots=True)
class OpenRequest:
    """A request that this worker has admitted and not ended."""

    client: str
    writer: ChunkWriter


@dataclass(slots=True)
class StreamStats:
    """Counters since the worker was started."""

    admitted: int = 0
    rejected: int = 0
    ended: int = 0
    """Ended by the engine: stopped, full, aborted or failed."""
    failed: int = 0
    """Ended by the worker with an error."""
    late_steps: int = 0
    """Engine output of requests that had ended."""


class Streams:
    """Open requests and one outbox for each client.

    Args:
        incarnation: of the worker.
        max_payload: of the NATS server, in bytes; no frame exceeds it.
        weight_version: stamped on every chunk.
    """

    def __init__(self, incarnation: str, *, max_payload: int, weight_version: int) -> None:
        self._incarnation = incarnation
        self._max_frame_bytes = max_payload - FRAME_MARGIN_BYTES
        # A chunk holds at most a part of routing, a part of prompt logprobs and its tokens.
        self._part_bytes = min(PART_BYTES, self._max_frame_bytes // 3)
        self._weight_version = weight_version
        self._open: dict[str, OpenRequest] = {}
        self._outboxes: dict[str, Outbox] = {}
        # Those that may hold something to be sent: few of all that a worker has ever had.
        self._touched: dict[str, Outbox] = {}
        self.stats = StreamStats()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Streams {self._incarnation} open={len(self._open)} clients={len(self._outboxes)}>"

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    def __contains__(self, name: str) -> bool:
        """Whether the request of this engine key is open."""
        return name in self._open

    def admit(self, client: str, key: RequestKey, request: GenerateRequest, capabilities: Capabilities) -> str:
        """Open a stream and tell the client; returns the request's engine key, which must not be open."""
        name = engine_key(client, key)
        routing = None if request.return_routed_experts is False else capabilities.routed_experts
        self._open[name] = OpenRequest(
            client,
            ChunkWriter(
                key,
                prompt_len=request.prompt_len,
                routing=routing,
                start=request.routed_experts_prompt_start,
                part_bytes=self._part_bytes,
            ),
        )
        self._outbox(client).admit(key)
        self.stats.admitted += 1
        return name

    def reject(self, client: str, key: RequestKey, error: RequestError) -> None:
        """Answer a request that is not open with its terminal chunk."""
        writer = ChunkWriter(key, prompt_len=0, routing=None, start=0, part_bytes=self._part_bytes)
        self._outbox(client).add(writer.fail(_chunk_error(error), self._weight_version))
        self.stats.rejected += 1

    def take(self, steps: Iterable[RequestStep]) -> list[str]:
        """Turn engine output into chunks; returns engine keys that must be aborted, whose output made no sense."""
        broken: list[str] = []
        for step in steps:
            request = self._open.get(step.key)
            if request is None:
                self.stats.late_steps += 1
                continue
            try:
                chunks = request.writer.write(step, self._weight_version)
            except LocalProtocolError as exc:
                logger.error("request.broken key=%s error=%s", step.key, exc)
                self.fail(step.key, RequestError(code=ErrorCode.PROTOCOL_ERROR, message=str(exc)))
                broken.append(step.key)
                continue
            outbox = self._outbox(request.client)
            for chunk in chunks:
                outbox.add(chunk)
            if step.finish_reason is not None:
                del self._open[step.key]
                self.stats.ended += 1
        return broken

    def fail(self, name: str, error: RequestError) -> None:
        """End an open request with `error`."""
        request = self._open.pop(name)
        self._outbox(request.client).add(request.writer.fail(_chunk_error(error), self._weight_version))
        self.stats.failed += 1

    def fail_all(self, code: ErrorCode, message: str) -> list[str]:
        """End every open request with an error; returns their engine keys."""
        names = list(self._open)
        for name in names:
            self.fail(name, RequestError(code=code, message=message))
        return names

    def seal(self) -> list[tuple[str, bytes]]:
        """Everything to be sent, as (client, frame) in order of each client."""
        touched, self._touched = self._touched, {}
        return [(client, frame) for client, outbox in touched.items() for frame in outbox.seal()]

    def open_names(self, client: str, keys: Sequence[RequestKey]) -> list[str]:
        """Engine keys of those of a client's requests that are open."""
        return [name for name in (engine_key(client, key) for key in keys) if name in self._open]

    def restart(self, incarnation: str) -> list[str]:
        """Forget everything and start new links; returns the engine keys of what was open, to be aborted."""
        names = list(self._open)
        self.stats.failed += len(names)
        self._incarnation = incarnation
        self._open.clear()
        self._outboxes.clear()
        self._touched.clear()
        return names

    def _outbox(self, client: str) -> Outbox:
        outbox = self._outboxes.get(client)
        if outbox is None:
            outbox = self._outboxes[client] = Outbox(self._incarnation, self._max_frame_bytes)
        self._touched[client] = outbox
        return outbox


def _chunk_error(error: RequestError) -> ChunkError:
    if isinstance(error, InvalidRequest):
        return ChunkError(error.code, error.message, error.field, error.problem, error.allowed)
    return ChunkError(error.code, error.message)
