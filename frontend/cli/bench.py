"""`rollbus bench`: measures the throughput and latency of a fleet as a trainer sees them.

All requests have the same size, and their prompts are in no prefix cache.
"""

import argparse
import asyncio
import os
import platform
import shlex
import sys
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ... import __version__, bus
from ...bus import FinishReason, GenerateRequest, Generation, NoWorkers, RequestError, SamplingParams
from ...bus.protocol.fleet.presence import FleetSnapshot
from ...schemas.presence import Capabilities, WorkerPresence
from .console import print_json, progress, write
from .exits import CommandFailed, ExitCode
from .options import without_password
from .tables import as_json, cell, in_turns, machine, percentile, print_table, spreads
from .watch.status import serving_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """The size of each request, and the data to request for each token."""

    input_tokens: int
    output_tokens: int
    logprobs: int | None = 0
    """The field `logprobs` of `SamplingParams`."""
    routing: bool | None = None
    """The field `return_routed_experts` of each request."""
    cache_salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Salt of all requests. Because of it, prefixes that an earlier run with the same seed cached are not found."""

    def check(self, engines: Sequence[Capabilities]) -> None:
        """Check that each of the engines supports this load.

        Raises:
            CommandFailed: an engine does not support it. The message has the option and the allowed values.
        """
        positions = self.input_tokens + self.output_tokens
        max_model_len = min(engine.max_model_len for engine in engines)
        if positions > max_model_len:
            raise refused(
                f"--input-tokens {self.input_tokens} and --output-tokens {self.output_tokens} are {positions} together",
                f"at most {max_model_len}, the max_model_len of the workers",
            )
        max_logprobs = min(engine.max_logprobs for engine in engines)
        if self.logprobs is not None and self.logprobs > max_logprobs:
            raise refused(
                f"--logprobs {self.logprobs}", f"none, or 0 to {max_logprobs}, the max_logprobs of the workers"
            )
        if self.routing and any(engine.routed_experts is None for engine in engines):
            raise refused("--routing", "--no-routing, because the model has no experts")

    def requests(self, model: str, vocab_size: int, count: int, rng: np.random.Generator) -> Iterator[GenerateRequest]:
        """Yield `count` requests with prompts from `rng`."""
        sampling = SamplingParams(max_tokens=self.output_tokens, ignore_eos=True, logprobs=self.logprobs)
        for _ in range(count):
            yield GenerateRequest(
                prompt_token_ids=rng.integers(vocab_size, size=self.input_tokens, dtype=np.int32),
                sampling=sampling,
                model=model,
                return_routed_experts=self.routing,
                cache_salt=self.cache_salt,
            )


def refused(what: str, allowed: str) -> CommandFailed:
    """Return the error for options that cannot be measured."""
    return CommandFailed(f"{what}; allowed: {allowed}", ExitCode.USAGE)


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


REQUESTS_EACH: Final = 4
"""Default requests of a round for each request open at once. With this number, the start and end of a round have little
effect."""
MIN_REQUESTS: Final = 32
"""Minimum default requests of a round. With fewer requests, the 99th percentile has no meaning."""
MAX_CONCURRENCY: Final = 65_536
"""Maximum number of requests in a model's queue."""
MAX_ROUND_TOKENS: Final = 50_000_000
"""Maximum generated tokens of a round. The times of their chunks take at most 200 MB. The fastest fleet needs about a
minute for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The load and the rounds of a bench.

    Raises:
        CommandFailed: the numbers conflict. The message has the options and the allowed values.
    """

    load: BenchLoad
    concurrencies: Sequence[int]
    rounds: int
    num_requests: int | None = None
    """Requests of each round. None: `requests_at` computes the number."""
    streams: bool = False
    seed: int = 0
    """Seed of the prompts."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        most = max(self.concurrencies)
        if most > MAX_CONCURRENCY:
            raise refused(f"--concurrency {most}", f"at most {MAX_CONCURRENCY}, the maximum of a queue")
        if self.num_requests is not None and self.num_requests < most:
            raise refused(f"--requests {self.num_requests}", f"{most} or more, the largest --concurrency")
        tokens = self.requests_at(most) * self.load.output_tokens
        if tokens > MAX_ROUND_TOKENS:
            raise refused(
                f"{self.requests_at(most)} requests of {self.load.output_tokens} tokens are {tokens} in a round",
                f"at most {MAX_ROUND_TOKENS}, with fewer --requests or --output-tokens",
            )

    def requests_at(self, concurrency: int) -> int:
        """Return the number of requests of a round."""
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_EACH * concurrency)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model, and the workers that serve it."""

    model: str
    workers: Sequence[WorkerPresence]

    @property
    def engines(self) -> Sequence[Capabilities]:
        """The capabilities of the workers' engines."""
        return [worker.capabilities for worker in self.workers if worker.capabilities is not None]


def target_of(workers: Sequence[WorkerPresence], model: str | None, *, nats_url: str, fleet: str) -> BenchTarget:
    """Return the model to measure and its serving workers.

    Args:
        workers: the live workers of the fleet.
        model: name of the model. None: the only model of the fleet.

    Raises:
        CommandFailed: no worker serves, or no worker has published its capabilities.
        InvalidRequest: `model` is None and the fleet has several models, or the fleet has only other models.
        NoWorkers: the model has workers, but none of them will accept requests soon.
    """
    snapshot = FleetSnapshot(tuple(workers))
    if snapshot.served:
        model = snapshot.resolve_model(model)
    of_model = [worker for worker in workers if model in (None, worker.model)]
    serving = serving_workers(of_model, nats_url=nats_url, fleet=fleet)
    target = BenchTarget(serving[0].model, serving)
    if not target.engines:
        raise CommandFailed(f"the workers of {target.model} have not published the capabilities of their engines")
    return target


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench of a fleet."""

    rb: bus.Client
    target: BenchTarget
    options: BenchOptions
    shows_progress: bool = True

    async def run(self) -> list[ConcurrencyResult]:
        """Run a warm-up round and the measured rounds of each concurrency.

        The concurrencies take turns, so that a slow phase of the machine affects all of them.

        Cancellation: aborts the open requests.

        Raises:
            CommandFailed: all requests of a round failed, or the engines do not support the options.
            NoWorkers: no worker is left. The error is raised alone or in a group.
        """
        options = self.options
        options.load.check(self.target.engines)
        outcomes = [
            ConcurrencyResult(concurrency, options.requests_at(concurrency)) for concurrency in options.concurrencies
        ]
        total = sum(outcome.concurrency + options.rounds * outcome.num_requests for outcome in outcomes)
        rng = np.random.default_rng(options.seed)
        with progress("measuring", total, shown=self.shows_progress) as advance:
            for outcome in outcomes:
                outcome.add_failures(await self._round(outcome, outcome.concurrency, rng, advance))
            for outcome in in_turns(options.rounds, outcomes):
                outcome.add(await self._round(outcome, outcome.num_requests, rng, advance))
        return outcomes

    async def _round(
        self, outcome: ConcurrencyResult, count: int, rng: np.random.Generator, advance: Callable[[], None]
    ) -> Round:
        vocab_size = min(engine.vocab_size for engine in self.target.engines)
        requests = self.options.load.requests(self.target.model, vocab_size, count, rng)
        result = await measure(self.rb, requests, outcome.concurrency, streams=self.options.streams, advance=advance)
        if not result.requests:
            raise CommandFailed(f"all {count} requests of a round failed; the first: {result.first_failure}")
        return result


NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one bench."""

    command: str
    """Command line as the user typed it, without passwords."""
    fleet: str
    target: BenchTarget
    options: BenchOptions
    outcomes: Sequence[ConcurrencyResult]

    @property
    def failures(self) -> Counter[str]:
        """Number of failed requests by error code."""
        return sum((outcome.failures for outcome in self.outcomes), Counter[str]())

    def failure(self) -> str | None:
        """Return one line about the failed requests, or None if no request failed."""
        failures = self.failures
        if not failures:
            return None
        first = next(outcome.first_failure for outcome in self.outcomes if outcome.first_failure)
        return f"failed requests: {_counted(failures)}; the first: {first}"

    def show(self) -> None:
        """Print the result as text and a table."""
        write(self.command)
        write(f"rollbus {__version__}; {machine()}")
        write(self._fleet_line())
        write(self._load_line())
        print_table(("at once", *(str(outcome.concurrency) for outcome in self.outcomes)), self.rows())
        if not self.options.streams:
            write("Use --stream to measure the times to the first token and between chunks.")

    def rows(self) -> list[list[str]]:
        """Return the rows of the table: one for each figure and count. Each concurrency has a column."""
        found = [spreads(outcome.figures) for outcome in self.outcomes]
        rows = [
            [label, *(cell(one.get(name, NONE)) for one in found)]
            for name, label in FIGURES.items()
            if any(name in one for one in found)
        ]
        counts = (
            ("attempts after the first", lambda outcome: str(outcome.retries)),
            ("gaps in frames", lambda outcome: str(outcome.gaps)),
            ("failed requests", lambda outcome: _counted(outcome.failures) or "0"),
            ("weight versions", lambda outcome: ", ".join(map(str, sorted(outcome.weight_versions)))),
        )
        return rows + [[label, *map(text, self.outcomes)] for label, text in counts]

    def as_json(self) -> Mapping[str, object]:
        """Return the result as a JSON object. The names of figures end with their unit."""
        load = self.options.load
        return {
            "command": self.command,
            "rollbus": __version__,
            "machine": {
                "platform": f"{platform.system()} {platform.machine()}",
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "fleet": self.fleet,
            "model": self.target.model,
            "engines": self._engines(),
            "workers": [worker.worker for worker in self.target.workers],
            "input_tokens": load.input_tokens,
            "output_tokens": load.output_tokens,
            "logprobs": load.logprobs,
            "routing": load.routing,
            "stream": self.options.streams,
            "seed": self.options.seed,
            "rounds": self.options.rounds,
            "results": [_outcome_as_json(outcome) for outcome in self.outcomes],
        }

    def _engines(self) -> list[str]:
        return sorted({f"{engine.engine} {engine.engine_version}" for engine in self.target.engines})

    def _fleet_line(self) -> str:
        num_workers = len(self.target.workers)
        workers = f"{num_workers} worker{'s' * (num_workers > 1)}"
        return f"fleet {self.fleet}: {self.target.model} on {workers}, {', '.join(self._engines())}"

    def _load_line(self) -> str:
        load = self.options.load
        has_routing = load.routing is not False and any(engine.routed_experts for engine in self.target.engines)
        extras = [
            "no logprobs" if load.logprobs is None else f"logprobs {load.logprobs}",
            "routed experts" if has_routing else "no routed experts",
            "chunk by chunk" if self.options.streams else "complete results",
            f"median of {self.options.rounds} rounds (lowest to highest)",
        ]
        return f"{load.input_tokens} tokens in, {load.output_tokens} out; {', '.join(extras)}"


def _outcome_as_json(outcome: ConcurrencyResult) -> dict[str, object]:
    return {
        "concurrency": outcome.concurrency,
        "requests": outcome.num_requests,
        **{name: as_json(spread) for name, spread in spreads(outcome.figures).items()},
        "retries": outcome.retries,
        "gaps": outcome.gaps,
        "failures": dict(outcome.failures),
        "cached_tokens": outcome.cached_tokens,
        "weight_versions": sorted(outcome.weight_versions),
    }


def _counted(failures: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.most_common())


def run(args: argparse.Namespace) -> Coroutine[object, object, int]:
    """Measure and print the result."""
    load = BenchLoad(
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        logprobs=args.logprobs,
        routing=args.routing,
    )
    options = BenchOptions(
        load=load,
        concurrencies=list(dict.fromkeys(args.concurrency)),
        rounds=args.rounds,
        num_requests=args.requests,
        streams=args.stream,
        seed=args.seed,
    )
    return _bench(args, options)


async def _bench(args: argparse.Namespace, options: BenchOptions) -> int:

    async with bus.connect(args.nats, fleet=args.fleet) as rb:
        workers = (await rb.fleet.state()).workers
        target = target_of(workers, args.model, nats_url=args.nats, fleet=args.fleet)
        outcomes = await Bench(rb, target, options, shows_progress=not args.json).run()
    report = Report(
        command=shlex.join(["rollbus", *map(without_password, sys.argv[1:])]),
        fleet=args.fleet,
        target=target,
        options=options,
        outcomes=outcomes,
    )
    if args.json:
        print_json(report.as_json())
    else:
        report.show()
    failure = report.failure()
    if failure is not None:
        raise CommandFailed(failure)
    return ExitCode.OK
