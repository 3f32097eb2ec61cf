"""All rounds of a bench, in their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .... import bus
from ....bus.protocol.fleet.presence_table import FleetSnapshot
from ....schemas.presence import Capabilities, WorkerPresence
from ..console import progress
from ..exits import CommandFailed
from ..figures import in_turns
from ..serving import serving_workers
from .load import BenchLoad, refused
from .rounds import ConcurrencyResult, Round, measure

__all__ = ["MAX_CONCURRENCY", "MAX_ROUND_TOKENS", "Bench", "BenchOptions", "BenchTarget", "target_of"]

REQUESTS_EACH: Final = 4
"""Requests of a round for each that is open at once, where none are named: its begin and end weigh little then."""
MIN_REQUESTS: Final = 32
"""The same: of fewer, the 99th percentile says nothing."""
MAX_CONCURRENCY: Final = 65_536
"""Requests that a model's queue has room for."""
MAX_ROUND_TOKENS: Final = 50_000_000
"""Generated tokens of a round: the times of their chunks take 200 MB at most, and the fastest fleet a minute or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What is to be measured.

    Raises:
        CommandFailed: the numbers do not go together; the message names the options and what is allowed.
    """

    load: BenchLoad
    concurrencies: Sequence[int]
    rounds: int
    num_requests: int | None = None
    """Of each round; None: as many as `requests_at` says."""
    streams: bool = False
    seed: int = 0
    """Of the prompts."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        most = max(self.concurrencies)
        if most > MAX_CONCURRENCY:
            raise refused(f"--concurrency {most}", f"{MAX_CONCURRENCY}, for which a queue has room")
        if self.num_requests is not None and self.num_requests < most:
            raise refused(f"--requests {self.num_requests}", f"{most} or more, so many are open at --concurrency")
        tokens = self.requests_at(most) * self.load.output_tokens
        if tokens > MAX_ROUND_TOKENS:
            raise refused(
                f"{self.requests_at(most)} requests of {self.load.output_tokens} tokens are {tokens} in a round",
                f"{MAX_ROUND_TOKENS}, with fewer --requests or --output-tokens",
            )

    def requests_at(self, concurrency: int) -> int:
        """Requests of a round."""
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_EACH * concurrency)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model, and the workers that serve it."""

    model: str
    workers: Sequence[WorkerPresence]

    @property
    def engines(self) -> Sequence[Capabilities]:
        """What they can do."""
        return [worker.capabilities for worker in self.workers if worker.capabilities is not None]


def target_of(workers: Sequence[WorkerPresence], model: str | None, *, nats_url: str, fleet: str) -> BenchTarget:
    """What to measure, of the live workers of a fleet.

    Args:
        model: None: the fleet's only one.

    Raises:
        CommandFailed: no worker serves, or none says what it can do.
        InvalidRequest: the model was not named and there are several, or there are only others.
        NoWorkers: there are workers of this model, and none takes requests soon.
    """
    snapshot = FleetSnapshot(tuple(workers))
    if snapshot.served:
        model = snapshot.resolve_model(model)
    of_model = [worker for worker in workers if model in (None, worker.model)]
    serving = serving_workers(of_model, nats_url=nats_url, fleet=fleet)
    target = BenchTarget(serving[0].model, serving)
    if not target.engines:
        raise CommandFailed(f"the workers of {target.model} do not say what their engines can do")
    return target


@dataclass(frozen=True, slots=True)
class Bench:
    """One run over a fleet."""

    rb: bus.Client
    target: BenchTarget
    options: BenchOptions
    shows_progress: bool = True

    async def run(self) -> list[ConcurrencyResult]:
        """Warm up, then measure: the concurrencies take turns, so that what slows the machine slows all of them.

        Cancellation: aborts what is open.

        Raises:
            CommandFailed: every request of a round failed, or the engines cannot do what the options say.
            NoWorkers: none is left; alone or in a group.
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
