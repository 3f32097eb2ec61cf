"""Formats the result of a bench: command, machine, fleet and figures."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .... import __version__
from ..console import write
from ..figures import as_json, cell, machine, spreads
from ..tables import print_table
from .bench import BenchOptions, BenchTarget
from .rounds import FIGURES, ConcurrencyResult

__all__ = ["Report"]

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
    is_synthetic: bool
    """True if the bench started the server and a worker with a synthetic engine."""

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
            "transport_only": self.is_synthetic,
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
        if self.is_synthetic:
            return (
                "TRANSPORT ONLY: the bench ran its own NATS server and a worker with a synthetic engine; "
                "no model was run"
            )
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
