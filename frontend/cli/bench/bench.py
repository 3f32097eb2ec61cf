"""Runs all rounds of a bench in their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .... import bus
from ....bus.protocol.fleet.fleet_snapshot import FleetSnapshot
from ....schemas.presence import Capabilities, WorkerPresence
from ..console import progress
from ..exits import CommandFailed
from ..figures import in_turns
from ..serving import serving_workers
from .load import BenchLoad, refused
from .rounds import ConcurrencyResult, Round, measure

__all__ = ["MAX_CONCURRENCY", "MAX_ROUND_TOKENS", "Bench", "BenchOptions", "BenchTarget", "target_of"]

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
