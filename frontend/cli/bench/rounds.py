"""One round of requests, and what the rounds of one concurrency come to."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import bus
from bus import FinishReason, GenerateRequest, Generation, NoWorkers, RequestError
from frontend.cli.figures import Spread, percentile

__all__ = ["FIGURES", "Figure", "Outcome", "Round", "measure"]


def _times() -> "array[float]":
    """Seconds as floats of 4 bytes: there may be one for each token of a round."""
    return array("f")


@dataclass(slots=True)
class Round:
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
    cached_tokens: int = 0
    """Of the prompts, what was not computed."""
    weight_versions: set[int] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    """All others, by error code; by finish reason where they ended too early without an error."""
    first_failure: str = ""
    """What the first of them said."""
    retries: int = 0
    """Attempts that followed one which was given up."""
    gaps: int = 0
    """How often frames were missing, and were asked for again."""
    first_token_s: "array[float]" = field(default_factory=_times)
    """From the sending of each request to its first token; of a round that streams, like the next two."""
    chunk_s: "array[float]" = field(default_factory=_times)
    """From each chunk with tokens to the next one of the same request."""
    request_s: "array[float]" = field(default_factory=_times)
    """From the sending of each request to its end."""

    def fail(self, kind: str, why: str) -> None:
        """Count a request that did not end as it should."""
        self.failures[kind] += 1
        self.first_failure = self.first_failure or why

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
    """Send `requests`, `concurrency` at a time, and take all that comes of them.

    Args:
        streams: take chunk by chunk with `generate` rather than results with `complete_many`.
        advance: called at the end of each request.

    Cancellation: aborts what is open.

    Raises:
        NoWorkers: none is left to serve them; alone or in a group.
    """
    taken = Round()
    before, cpu_before, started = rb.stats(), time.process_time(), time.perf_counter()
    await (_stream_all if streams else _complete_all)(rb, requests, concurrency, taken, advance)
    taken.seconds = time.perf_counter() - started
    taken.cpu_s = time.process_time() - cpu_before
    after = rb.stats()
    taken.retries = sum(after.retries.values()) - sum(before.retries.values())
    taken.gaps = after.resends_asked - before.resends_asked
    return taken


async def _complete_all(
    rb: bus.Client, requests: Iterable[GenerateRequest], concurrency: int, taken: Round, advance: Callable[[], None]
) -> None:
    async for generation in rb.complete_many(requests, max_in_flight=concurrency):
        _take(generation, taken)
        advance()


def _take(generation: Generation, taken: Round) -> None:
    error = generation.error
    if isinstance(error, NoWorkers):
        raise error
    if error is not None:
        taken.fail(error.code, str(error))
        return
    taken.weight_versions.update(set(generation.weight_versions.tolist()))
    rows = generation.routed_experts
    taken.finish(
        generation.finish_reason,
        len(generation.token_ids),
        0 if rows is None else rows.nbytes,
        generation.cached_tokens,
    )


async def _stream_all(
    rb: bus.Client, requests: Iterable[GenerateRequest], concurrency: int, taken: Round, advance: Callable[[], None]
) -> None:
    source = iter(requests)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(_stream_next(rb, source, taken, advance), name="bench.stream")


async def _stream_next(
    rb: bus.Client, source: Iterator[GenerateRequest], taken: Round, advance: Callable[[], None]
) -> None:
    """Stream one request after the other, as long as `source`, which others take from as well, has any."""
    for request in source:
        try:
            await _stream(rb, request, taken)
        except NoWorkers:
            raise
        except RequestError as exc:
            taken.fail(exc.code, str(exc))
        advance()


async def _stream(rb: bus.Client, request: GenerateRequest, taken: Round) -> None:
    sent = before = time.perf_counter()
    tokens = routing_bytes = 0
    async for chunk in rb.generate(request):
        if chunk.routed_experts is not None:
            routing_bytes += len(chunk.routed_experts.data)
        if chunk.num_tokens:
            now = time.perf_counter()
            (taken.chunk_s if tokens else taken.first_token_s).append(now - before)
            before = now
            tokens += chunk.num_tokens
            taken.weight_versions.add(chunk.weight_version)
        if chunk.end is not None:
            taken.request_s.append(time.perf_counter() - sent)
            taken.finish(chunk.end.finish_reason, tokens, routing_bytes, chunk.end.cached_tokens)


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that each round gives a number for."""

    name: str
    """For programs; the unit last."""
    label: str
    """For people."""
    of: Callable[[Round], float | None]
    """Its value in a round; None: there was nothing to measure."""


def _percentile_ms(times: Callable[[Round], "array[float]"], percent: float) -> Callable[[Round], float | None]:
    def value(taken: Round) -> float | None:
        seconds = times(taken)
        return 1000 * percentile(seconds, percent) if seconds else None

    return value


TIMES: Final[tuple[tuple[str, str, Callable[[Round], "array[float]"]], ...]] = (
    ("first_token", "time to first token", lambda taken: taken.first_token_s),
    ("chunk", "time between chunks", lambda taken: taken.chunk_s),
    ("request", "time of a request", lambda taken: taken.request_s),
)
FIGURES: Final = (
    Figure("tokens_per_s", "tokens/s", lambda taken: taken.tokens / taken.seconds),
    Figure("requests_per_s", "requests/s", lambda taken: taken.requests / taken.seconds),
    *(
        Figure(f"{name}_p{percent}_ms", f"{label}, p{percent}, ms", _percentile_ms(times, percent))
        for name, label, times in TIMES
        for percent in (50, 99)
    ),
    Figure(
        "client_cpu_ms_per_1000_tokens",
        "client CPU, ms per 1,000 tokens",
        lambda taken: 1e6 * taken.cpu_s / taken.tokens,
    ),
    Figure("routing_mb_per_s", "routing, MB/s", lambda taken: taken.routing_bytes / taken.seconds / 1e6 or None),
)
"""What is measured, in the order in which it is shown. Each needs a round of which a request ended as it should."""


@dataclass(slots=True)
class Outcome:
    """What the rounds of one concurrency gave."""

    concurrency: int
    num_requests: int
    """Of each round."""
    values: dict[str, list[float]] = field(default_factory=dict)
    """By figure: one for each round."""
    weight_versions: set[int] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    """Also those of the warm-up."""
    first_failure: str = ""
    retries: int = 0
    gaps: int = 0
    cached_tokens: int = 0

    def add_failures(self, taken: Round) -> None:
        """Count what failed in a round, be it one to warm up."""
        self.failures += taken.failures
        self.first_failure = self.first_failure or taken.first_failure

    def add(self, taken: Round) -> None:
        """Count a round."""
        for figure in FIGURES:
            value = figure.of(taken)
            if value is not None:
                self.values.setdefault(figure.name, []).append(value)
        self.add_failures(taken)
        self.weight_versions |= taken.weight_versions
        self.retries += taken.retries
        self.gaps += taken.gaps
        self.cached_tokens += taken.cached_tokens

    def spreads(self) -> dict[str, Spread]:
        """The median and range of each figure that was measured."""
        return {name: Spread.of(values) for name, values in self.values.items()}
