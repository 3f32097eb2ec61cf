"""All rounds of a bench, in their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

import bus
from bus.protocol.fleet_view import FleetSnapshot
from frontend.cli.bench.load import Load
from frontend.cli.bench.rounds import Outcome, Round, measure
from frontend.cli.console import progress
from frontend.cli.exits import CommandFailed, ExitCode
from frontend.cli.serving import serving_workers
from schemas.presence import Capabilities, WorkerPresence

__all__ = ["MAX_CONCURRENCY", "MAX_ROUND_TOKENS", "Bench", "Target", "Wanted", "target_of"]

REQUESTS_EACH: Final = 4
"""Requests of a round for each that is open at once, where none are named: its begin and end weigh little then."""
MIN_REQUESTS: Final = 32
"""The same: of fewer, the 99th percentile says nothing."""
MAX_CONCURRENCY: Final = 65_536
"""Requests that a model's queue has room for."""
MAX_ROUND_TOKENS: Final = 50_000_000
"""Generated tokens of a round: the times of their chunks take 200 MB at most, and the fastest fleet a minute or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be measured.

    Raises:
        CommandFailed: the numbers do not go together; the message names the options and what is allowed.
    """

    load: Load
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
            raise _refused(f"--concurrency {most}", f"{MAX_CONCURRENCY}, for which a queue has room")
        if self.num_requests is not None and self.num_requests < most:
            raise _refused(f"--requests {self.num_requests}", f"{most} or more, so many are open at --concurrency")
        tokens = self.requests_at(most) * self.load.output_tokens
        if tokens > MAX_ROUND_TOKENS:
            raise _refused(
                f"{self.requests_at(most)} requests of {self.load.output_tokens} tokens are {tokens} in a round",
                f"{MAX_ROUND_TOKENS}, with fewer --requests or --output-tokens",
            )

    def requests_at(self, concurrency: int) -> int:
        """Requests of a round."""
        return self.num_requests or max(MIN_REQUESTS, REQUESTS_EACH * concurrency)


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and the workers that serve it."""

    model: str
    workers: Sequence[WorkerPresence]

    @property
    def engines(self) -> Sequence[Capabilities]:
        """What they can do."""
        return [worker.capabilities for worker in self.workers if worker.capabilities is not None]


def target_of(workers: Sequence[WorkerPresence], model: str | None, *, nats_url: str, fleet: str) -> Target:
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
    target = Target(serving[0].model, serving)
    if not target.engines:
        raise CommandFailed(f"the workers of {target.model} do not say what their engines can do")
    return target


@dataclass(frozen=True, slots=True)
class Bench:
    """One run over a fleet."""

    rb: bus.Client
    target: Target
    wanted: Wanted
    shows_progress: bool = True

    async def run(self) -> list[Outcome]:
        """Warm up, then measure: the concurrencies take turns, so that what slows the machine slows all of them.

        Cancellation: aborts what is open.

        Raises:
            CommandFailed: every request of a round failed, or the engines cannot do what is wanted.
            NoWorkers: none is left; alone or in a group.
        """
        wanted = self.wanted
        wanted.load.check(self.target.engines)
        outcomes = [Outcome(concurrency, wanted.requests_at(concurrency)) for concurrency in wanted.concurrencies]
        total = sum(outcome.concurrency + wanted.rounds * outcome.num_requests for outcome in outcomes)
        rng = np.random.default_rng(wanted.seed)
        with progress("measuring", total, shown=self.shows_progress) as advance:
            for outcome in outcomes:
                outcome.add_failures(await self._round(outcome, outcome.concurrency, rng, advance))
            for _ in range(wanted.rounds):
                for outcome in outcomes:
                    outcome.add(await self._round(outcome, outcome.num_requests, rng, advance))
        return outcomes

    async def _round(
        self, outcome: Outcome, count: int, rng: np.random.Generator, advance: Callable[[], None]
    ) -> Round:
        vocab_size = min(engine.vocab_size for engine in self.target.engines)
        requests = self.wanted.load.requests(self.target.model, vocab_size, count, rng)
        taken = await measure(self.rb, requests, outcome.concurrency, streams=self.wanted.streams, advance=advance)
        if not taken.requests:
            raise CommandFailed(f"all {count} requests of a round failed; the first: {taken.first_failure}")
        return taken


def _refused(what: str, allowed: str) -> CommandFailed:
    return CommandFailed(f"{what}; allowed: {allowed}", ExitCode.USAGE)
