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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np

from ... import __version__, bus
from ...bus import FinishReason, GenerateRequest, Generation, NoWorkers, RequestError, SamplingParams
from ...bus.protocol.fleet.presence import FleetSnapshot
from ...schemas.presence import Capabilities, WorkerPresence
from .console import print_json, progress, write
from .exits import CommandFailed, ExitCode, WrongUsage
from .options import connect, without_password
from .tables import NONE, as_json, cell, in_turns, machine, percentile, print_table, spreads
from .watch.status import serving_workers

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


def refused(what: str, allowed: str) -> CommandFailed:
    """Return the error for options that cannot be measured."""
    return WrongUsage(f"{what}; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The size and the data of each request, and the rounds of a bench.

    Raises:
        CommandFailed: the numbers conflict. The message has the options and the allowed values.
    """

    input_tokens: int
    output_tokens: int
    logprobs: int | None = 0
    """The field `logprobs` of `SamplingParams`."""
    routing: bool | None = None
    """The field `return_routed_experts` of each request."""
    cache_salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Salt of all requests. Because of it, prefixes that an earlier run with the same seed cached are not found."""
    concurrencies: Sequence[int] = (1,)
    rounds: int = 1
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
        tokens = self.requests_at(most) * self.output_tokens
        if tokens > MAX_ROUND_TOKENS:
            raise refused(
                f"{self.requests_at(most)} requests of {self.output_tokens} tokens are {tokens} in a round",
                f"at most {MAX_ROUND_TOKENS}, with fewer --requests or --output-tokens",
            )

    def check(self, engines: Sequence[Capabilities]) -> None:
        """Check that each of the engines supports these requests.

        Raises:
            CommandFailed: an engine does not support them. The message has the option and the allowed values.
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

    def requests_at(self, concurrency: int) -> int:
        """Return the number of requests of a round."""
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_EACH * concurrency)

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


def _times() -> "array[float]":
    """Return an empty array for times in seconds. Floats of 4 bytes save memory: each token may add a time."""
    return array("f")


@dataclass(slots=True, kw_only=True)
class Round:
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

    def finish(self, reason: FinishReason, tokens: int, routing_bytes: int, cached_tokens: int | None) -> None:
        """Count a request that ended without an error."""
        if reason is not FinishReason.LENGTH:
            self.fail(reason, f"a request ended as {reason} after {tokens} tokens")
            return
        self.requests += 1
        self.tokens += tokens
        self.routing_bytes += routing_bytes
        self.cached_tokens += cached_tokens or 0

    def figures(self) -> dict[str, float]:
        """Return the figures of the round in the order of `FIGURES`. At least one request must have succeeded."""
        figures = {"tokens_per_s": self.tokens / self.seconds, "requests_per_s": self.requests / self.seconds}
        times = {"first_token": self.first_token_s, "chunk": self.chunk_s, "request": self.request_s}
        for name, seconds in times.items():
            if seconds:
                figures |= {f"{name}_p{percent}_ms": 1000 * percentile(seconds, percent) for percent in (50, 99)}
        figures["client_cpu_ms_per_1000_tokens"] = 1e6 * self.cpu_s / self.tokens
        if self.routing_bytes:
            figures["routing_mb_per_s"] = self.routing_bytes / self.seconds / 1e6
        return figures


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
    if streams:
        source = iter(requests)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(_stream_all(rb, source, result, advance), name="bench.stream")
    else:
        async for generation in rb.complete_many(requests, max_in_flight=concurrency):
            _add_generation(generation, result)
            advance()
    result.seconds = time.perf_counter() - started
    result.cpu_s = time.process_time() - cpu_before
    after = rb.stats()
    result.retries = sum(after.retries.values()) - sum(before.retries.values())
    result.gaps = after.resends_asked - before.resends_asked
    return result


def _add_generation(generation: Generation, result: Round) -> None:
    error = generation.error
    if isinstance(error, NoWorkers):
        raise error
    if error is not None:
        result.fail(error.code, str(error))
        return
    result.weight_versions.update(generation.weight_versions.tolist())
    rows = generation.routed_experts
    routing_bytes = 0 if rows is None else rows.nbytes
    result.finish(generation.finish_reason, len(generation.token_ids), routing_bytes, generation.cached_tokens)


async def _stream_all(
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


@dataclass(slots=True)
class ConcurrencyResult:
    """The result of all rounds of one concurrency."""

    concurrency: int
    num_requests: int
    """Requests of each round."""
    figures: list[dict[str, float]] = field(default_factory=list)
    """Figures of each round without the warm-up round."""
    total: Round = field(default_factory=Round)
    """The counts of all rounds. Its failures include the warm-up round."""

    def add_failures(self, result: Round) -> None:
        """Add the failures of a round. This includes the warm-up round."""
        self.total.failures += result.failures
        self.total.first_failure = self.total.first_failure or result.first_failure

    def add(self, result: Round) -> None:
        """Add a round."""
        self.figures.append(result.figures())
        self.add_failures(result)
        self.total.weight_versions |= result.weight_versions
        self.total.retries += result.retries
        self.total.gaps += result.gaps
        self.total.cached_tokens += result.cached_tokens


def workers_to_measure(
    workers: Sequence[WorkerPresence], model: str | None, *, nats_url: str, fleet: str
) -> list[WorkerPresence]:
    """Return the serving workers of the model to measure.

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
    if not engines_of(serving):
        raise CommandFailed(f"the workers of {serving[0].model} have not published the capabilities of their engines")
    return serving


def engines_of(workers: Sequence[WorkerPresence]) -> list[Capabilities]:
    """Return the capabilities of the workers' engines."""
    return [worker.capabilities for worker in workers if worker.capabilities is not None]


async def run_rounds(
    rb: bus.Client, options: BenchOptions, workers: Sequence[WorkerPresence], *, shows_progress: bool
) -> list[ConcurrencyResult]:
    """Run a warm-up round and the measured rounds of each concurrency.

    The concurrencies take turns, so that a slow phase of the machine affects all of them.

    Cancellation: aborts the open requests.

    Raises:
        CommandFailed: all requests of a round failed, or the engines do not support the options.
        NoWorkers: no worker is left. The error is raised alone or in a group.
    """
    engines = engines_of(workers)
    options.check(engines)
    model, vocab_size = workers[0].model, min(engine.vocab_size for engine in engines)
    outcomes = [
        ConcurrencyResult(concurrency, options.requests_at(concurrency)) for concurrency in options.concurrencies
    ]
    total = sum(outcome.concurrency + options.rounds * outcome.num_requests for outcome in outcomes)
    rng = np.random.default_rng(options.seed)

    async def run_round(concurrency: int, count: int) -> Round:
        requests = options.requests(model, vocab_size, count, rng)
        result = await measure(rb, requests, concurrency, streams=options.streams, advance=advance)
        if not result.requests:
            raise CommandFailed(f"all {count} requests of a round failed; the first: {result.first_failure}")
        return result

    with progress("measuring", total, shown=shows_progress) as advance:
        for outcome in outcomes:
            outcome.add_failures(await run_round(outcome.concurrency, outcome.concurrency))
        for outcome in in_turns(options.rounds, outcomes):
            outcome.add(await run_round(outcome.concurrency, outcome.num_requests))
    return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one bench."""

    command: str
    """Command line as the user typed it, without passwords."""
    fleet: str
    workers: Sequence[WorkerPresence]
    options: BenchOptions
    outcomes: Sequence[ConcurrencyResult]

    def failure(self) -> str | None:
        """Return one line about the failed requests, or None if no request failed."""
        totals = [outcome.total for outcome in self.outcomes]
        failures = sum((total.failures for total in totals), Counter[str]())
        if not failures:
            return None
        first = next(total.first_failure for total in totals if total.first_failure)
        return f"failed requests: {_format_counts(failures)}; the first: {first}"

    def show(self) -> None:
        """Print the result as text and a table."""
        options, engines = self.options, engines_of(self.workers)
        num_workers = f"{len(self.workers)} worker{'s' * (len(self.workers) > 1)}"
        has_routing = options.routing is not False and any(engine.routed_experts for engine in engines)
        extras = (
            "no logprobs" if options.logprobs is None else f"logprobs {options.logprobs}",
            "routed experts" if has_routing else "no routed experts",
            "chunk by chunk" if options.streams else "complete results",
            f"median of {options.rounds} rounds (lowest to highest)",
        )
        write(self.command)
        write(f"rollbus {__version__}; {machine()}")
        write(f"fleet {self.fleet}: {self.workers[0].model} on {num_workers}, {', '.join(self._engines())}")
        write(f"{options.input_tokens} tokens in, {options.output_tokens} out; {', '.join(extras)}")
        print_table(("at once", *(str(outcome.concurrency) for outcome in self.outcomes)), self.rows())
        if not options.streams:
            write("Use --stream to measure the times to the first token and between chunks.")

    def rows(self) -> list[list[str]]:
        """Return the rows of the table: one for each figure and count. Each concurrency has a column."""
        found = [spreads(outcome.figures) for outcome in self.outcomes]
        totals = [outcome.total for outcome in self.outcomes]
        return [
            *(
                [label, *(cell(one.get(name, NONE)) for one in found)]
                for name, label in FIGURES.items()
                if any(name in one for one in found)
            ),
            ["attempts after the first", *(str(total.retries) for total in totals)],
            ["gaps in frames", *(str(total.gaps) for total in totals)],
            ["failed requests", *(_format_counts(total.failures) or "0" for total in totals)],
            ["weight versions", *(", ".join(map(str, sorted(total.weight_versions))) for total in totals)],
        ]

    def as_json(self) -> Mapping[str, object]:
        """Return the result as a JSON object. The names of figures end with their unit."""
        options = self.options
        return {
            "command": self.command,
            "rollbus": __version__,
            "machine": {
                "platform": f"{platform.system()} {platform.machine()}",
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "fleet": self.fleet,
            "model": self.workers[0].model,
            "engines": self._engines(),
            "workers": [worker.worker for worker in self.workers],
            **{name: getattr(options, name) for name in ("input_tokens", "output_tokens", "logprobs", "routing")},
            "stream": options.streams,
            "seed": options.seed,
            "rounds": options.rounds,
            "results": [
                {
                    "concurrency": outcome.concurrency,
                    "requests": outcome.num_requests,
                    **{name: as_json(spread) for name, spread in spreads(outcome.figures).items()},
                    "retries": outcome.total.retries,
                    "gaps": outcome.total.gaps,
                    "failures": dict(outcome.total.failures),
                    "cached_tokens": outcome.total.cached_tokens,
                    "weight_versions": sorted(outcome.total.weight_versions),
                }
                for outcome in self.outcomes
            ],
        }

    def _engines(self) -> list[str]:
        return sorted({f"{engine.engine} {engine.engine_version}" for engine in engines_of(self.workers)})


def _format_counts(failures: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.most_common())


async def run(args: argparse.Namespace) -> int:
    """Measure and print the result."""
    given = {each.name: getattr(args, each.name) for each in fields(BenchOptions) if hasattr(args, each.name)}
    options = BenchOptions(**given, concurrencies=list(dict.fromkeys(args.concurrency)))
    async with connect(args) as rb:
        present = (await rb.fleet.state()).workers
        workers = workers_to_measure(present, args.model, nats_url=args.nats, fleet=args.fleet)
        outcomes = await run_rounds(rb, options, workers, shows_progress=not args.json)
    command = shlex.join(["rollbus", *map(without_password, sys.argv[1:])])
    report = Report(command=command, fleet=args.fleet, workers=workers, options=options, outcomes=outcomes)
    if args.json:
        print_json(report.as_json())
    else:
        report.show()
    failure = report.failure()
    if failure is not None:
        raise CommandFailed(failure)
    return ExitCode.OK
