"""Measures one round of requests, and combines the rounds of one concurrency."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from .... import bus
from ....bus import FinishReason, GenerateRequest, Generation, NoWorkers, RequestError
from ..figures import percentile

__all__ = ["FIGURES", "ConcurrencyResult", "Round", "measure"]


def _times() -> "array[float]":
    """Return an empty array for times in seconds. Floats of 4 bytes save memory: each token may add a time."""
    return array("f")


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts beside the figures, of one round or of all rounds of one concurrency."""

    cached_tokens: int = 0
    """Prompt tokens that the engine did not compute, because they were in a prefix cache."""
    weight_versions: set[int] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failed requests by error code. A request that ended too early is counted by its finish reason."""
    first_failure: str = ""
    """Message of the first failed request."""
    retries: int = 0
    """Number of attempts that followed a lost attempt."""
    gaps: int = 0
    """How often the client requested missing frames again."""

    def fail(self, kind: str, why: str) -> None:
        """Count a failed request."""
        self.failures[kind] += 1
        self.first_failure = self.first_failure or why

    def add_failures(self, other: "Tally") -> None:
        """Add the failures of a round. This includes the warm-up round."""
        self.failures += other.failures
        self.first_failure = self.first_failure or other.first_failure


@dataclass(slots=True, kw_only=True)
class Round(Tally):
    """The result of one round.

    `tokens` and `routing_bytes` count only the requests that succeeded with the requested number of tokens.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of all threads of this process."""
    requests: int = 0
    """Number of requests that succeeded."""
    tokens: int = 0
    routing_bytes: int = 0
    first_token_s: "array[float]" = field(default_factory=_times)
    """Seconds from the sending of each request to its first token. This list and the next two are empty without
    streams."""
    chunk_s: "array[float]" = field(default_factory=_times)
    """Seconds from each chunk with tokens to the next chunk of the same request."""
    request_s: "array[float]" = field(default_factory=_times)
    """Seconds from the sending of each request to its end."""

    def finish(self, reason: FinishReason, tokens: int, routing_bytes: int, cached_tokens: int | None) -> None:
        """Count a request that ended without an error."""
        if reason is not FinishReason.LENGTH:
            self.fail(reason, f"a request ended as {reason} after {tokens} tokens")
            return
        self.requests += 1
        self.tokens += tokens
        self.routing_bytes += routing_bytes
        self.cached_tokens += cached_tokens or 0


async def measure(
    rb: bus.Client,
    requests: Iterable[GenerateRequest],
    concurrency: int,
    *,
    streams: bool,
    advance: Callable[[], None] = lambda: None,
) -> Round:
    """Send `requests`, `concurrency` at a time, and read all results.

    Args:
        streams: True: read chunks with `generate`. False: read results with `complete_many`.
        advance: called at the end of each request.

    Cancellation: aborts the open requests.

    Raises:
        NoWorkers: no worker is left. The error is raised alone or in a group.
    """
    result = Round()
    before, cpu_before, started = rb.stats(), time.process_time(), time.perf_counter()
    await (_stream_all if streams else _complete_all)(rb, requests, concurrency, result, advance)
    result.seconds = time.perf_counter() - started
    result.cpu_s = time.process_time() - cpu_before
    after = rb.stats()
    result.retries = sum(after.retries.values()) - sum(before.retries.values())
    result.gaps = after.resends_asked - before.resends_asked
    return result


async def _complete_all(
    rb: bus.Client, requests: Iterable[GenerateRequest], concurrency: int, result: Round, advance: Callable[[], None]
) -> None:
    async for generation in rb.complete_many(requests, max_in_flight=concurrency):
        _add_generation(generation, result)
        advance()


def _add_generation(generation: Generation, result: Round) -> None:
    error = generation.error
    if isinstance(error, NoWorkers):
        raise error
    if error is not None:
        result.fail(error.code, str(error))
        return
    result.weight_versions.update(set(generation.weight_versions.tolist()))
    rows = generation.routed_experts
    result.finish(
        generation.finish_reason,
        len(generation.token_ids),
        0 if rows is None else rows.nbytes,
        generation.cached_tokens,
    )


async def _stream_all(
    rb: bus.Client, requests: Iterable[GenerateRequest], concurrency: int, result: Round, advance: Callable[[], None]
) -> None:
    source = iter(requests)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(_stream_next(rb, source, result, advance), name="bench.stream")


async def _stream_next(
    rb: bus.Client, source: Iterator[GenerateRequest], result: Round, advance: Callable[[], None]
) -> None:
    """Stream requests of `source` one after the other until it is empty. Other tasks read the same `source`."""
    for request in source:
        try:
            await _stream(rb, request, result)
        except NoWorkers:
            raise
        except RequestError as exc:
            result.fail(exc.code, str(exc))
        advance()


async def _stream(rb: bus.Client, request: GenerateRequest, result: Round) -> None:
    sent = before = time.perf_counter()
    tokens = routing_bytes = 0
    async for chunk in rb.generate(request):
        if chunk.routed_experts is not None:
            routing_bytes += len(chunk.routed_experts.data)
        if chunk.num_tokens:
            now = time.perf_counter()
            (result.chunk_s if tokens else result.first_token_s).append(now - before)
            before = now
            tokens += chunk.num_tokens
            result.weight_versions.add(chunk.weight_version)
        if chunk.end is not None:
            result.request_s.append(time.perf_counter() - sent)
            result.finish(chunk.end.finish_reason, tokens, routing_bytes, chunk.end.cached_tokens)


FIGURES: Final = {
    "tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "first_token_p50_ms": "time to first token, p50, ms",
    "first_token_p99_ms": "time to first token, p99, ms",
    "chunk_p50_ms": "time between chunks, p50, ms",
    "chunk_p99_ms": "time between chunks, p99, ms",
    "request_p50_ms": "time of a request, p50, ms",
    "request_p99_ms": "time of a request, p99, ms",
    "client_cpu_ms_per_1000_tokens": "client CPU, ms per 1,000 tokens",
    "routing_mb_per_s": "routed experts, MB/s",
}
"""The figures in the order of the table: JSON name with its unit at the end, and label."""


def figures_of(result: Round) -> dict[str, float]:
    """Return the figures of a round in the order of `FIGURES`. At least one request must have succeeded."""
    figures = {"tokens_per_s": result.tokens / result.seconds, "requests_per_s": result.requests / result.seconds}
    times = {"first_token": result.first_token_s, "chunk": result.chunk_s, "request": result.request_s}
    for name, seconds in times.items():
        if seconds:
            figures |= {f"{name}_p{percent}_ms": 1000 * percentile(seconds, percent) for percent in (50, 99)}
    figures["client_cpu_ms_per_1000_tokens"] = 1e6 * result.cpu_s / result.tokens
    if result.routing_bytes:
        figures["routing_mb_per_s"] = result.routing_bytes / result.seconds / 1e6
    return figures


@dataclass(slots=True)
class ConcurrencyResult(Tally):
    """The result of all rounds of one concurrency. The failures include the warm-up round."""

    concurrency: int
    num_requests: int
    """Requests of each round."""
    figures: list[dict[str, float]] = field(default_factory=list)
    """Figures of each round without the warm-up round."""

    def add(self, result: Round) -> None:
        """Add a round."""
        self.figures.append(figures_of(result))
        self.add_failures(result)
        self.weight_versions |= result.weight_versions
        self.retries += result.retries
        self.gaps += result.gaps
        self.cached_tokens += result.cached_tokens
