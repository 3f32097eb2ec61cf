"""One round of requests, and what the rounds of one concurrency come to."""

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
    """Seconds as floats of 4 bytes: there may be one for each token of a round."""
    return array("f")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What is counted beside the figures: of one round, or of all rounds of one concurrency."""

    cached_tokens: int = 0
    """Of the prompts, what was not computed."""
    weight_versions: set[int] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    """Requests that did not end as they should, by error code, or by finish reason if they ended too early."""
    first_failure: str = ""
    """Message of the first of them."""
    retries: int = 0
    """Attempts that followed one which was given up."""
    gaps: int = 0
    """How often frames were missing, and were asked for again."""

    def fail(self, kind: str, why: str) -> None:
        """Count a request that did not end as it should."""
        self.failures[kind] += 1
        self.first_failure = self.first_failure or why

    def add_failures(self, other: "Tally") -> None:
        """Count what failed in a round, be it one to warm up."""
        self.failures += other.failures
        self.first_failure = self.first_failure or other.first_failure


@dataclass(slots=True, kw_only=True)
class Round(Tally):
    """What came of the requests of one round.

    Tokens and routing are those of the requests that ended as they should: with as many tokens as were asked for.
    """

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of this process, all threads."""
    requests: int = 0
    """Those that ended as they should."""
    tokens: int = 0
    routing_bytes: int = 0
    first_token_s: "array[float]" = field(default_factory=_times)
    """From the sending of each request to its first token; of a round that streams, like the next two."""
    chunk_s: "array[float]" = field(default_factory=_times)
    """From each chunk with tokens to the next one of the same request."""
    request_s: "array[float]" = field(default_factory=_times)
    """From the sending of each request to its end."""

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
    """Send `requests`, `concurrency` at a time, and read all that comes of them.

    Args:
        streams: read chunk by chunk with `generate` rather than results with `complete_many`.
        advance: called at the end of each request.

    Cancellation: aborts what is open.

    Raises:
        NoWorkers: none is left to serve them; alone or in a group.
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
    """Stream one request after the other, as long as `source`, from which other tasks take requests too, has any."""
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
    "routing_mb_per_s": "routing, MB/s",
}
"""What is measured, in the order in which it is shown: the name for programs, unit last, and the label for people."""


def figures_of(result: Round) -> dict[str, float]:
    """Return the figures of a round in which a request ended as it should, in the order of `FIGURES`."""
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
    """What the rounds of one concurrency gave."""

    concurrency: int
    num_requests: int
    """Of each round."""
    figures: list[dict[str, float]] = field(default_factory=list)
    """Of each round; the failures are those of the warm-up too."""

    def add(self, result: Round) -> None:
        """Count a round."""
        self.figures.append(figures_of(result))
        self.add_failures(result)
        self.weight_versions |= result.weight_versions
        self.retries += result.retries
        self.gaps += result.gaps
        self.cached_tokens += result.cached_tokens
