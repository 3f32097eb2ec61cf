"""What a bench says: how it was called, where, of what fleet, and its figures."""

import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from frontend.cli.bench.bench import Target, Wanted
from frontend.cli.bench.rounds import FIGURES, Outcome
from frontend.cli.console import print_table, say

__all__ = ["Report"]

NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of one bench."""

    command: str
    """As it was typed, without passwords."""
    fleet: str
    target: Target
    wanted: Wanted
    outcomes: Sequence[Outcome]
    is_synthetic: bool
    """Server and worker are the bench's own, and its engine makes tokens up."""

    @property
    def failures(self) -> Counter[str]:
        """Requests that did not end as they should, by error code."""
        return sum((outcome.failures for outcome in self.outcomes), Counter[str]())

    def failure(self) -> str | None:
        """What to say of them in one line; None: there were none."""
        failures = self.failures
        if not failures:
            return None
        first = next(outcome.first_failure for outcome in self.outcomes if outcome.first_failure)
        return f"requests that failed: {_counted(failures)}; the first: {first}"

    def show(self) -> None:
        """Print it for people."""
        say(self.command)
        say(f"rollbus {_version()}; {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
        say(self._fleet_line())
        say(self._load_line())
        print_table(("at once", *(str(outcome.concurrency) for outcome in self.outcomes)), self.rows())
        if not self.wanted.streams:
            say("Times to the first token and between chunks: --stream.")

    def rows(self) -> list[list[str]]:
        """The table: a row for each figure and count, a column for each concurrency."""
        spreads = [outcome.spreads() for outcome in self.outcomes]
        rows = [
            [figure.label, *(one[figure.name].text() if figure.name in one else NONE for one in spreads)]
            for figure in FIGURES
            if any(figure.name in one for one in spreads)
        ]
        counts = (
            ("attempts above the first", lambda outcome: str(outcome.retries)),
            ("gaps in frames", lambda outcome: str(outcome.gaps)),
            ("requests that failed", lambda outcome: _counted(outcome.failures) or "0"),
            ("weight versions", lambda outcome: ", ".join(map(str, sorted(outcome.weight_versions)))),
        )
        return rows + [[label, *map(text, self.outcomes)] for label, text in counts]

    def as_json(self) -> Mapping[str, object]:
        """The same for programs; names of figures end with their unit."""
        load = self.wanted.load
        return {
            "command": self.command,
            "rollbus": _version(),
            "machine": _machine(),
            "fleet": self.fleet,
            "model": self.target.model,
            "engines": sorted({f"{engine.engine} {engine.engine_version}" for engine in self.target.engines}),
            "workers": [worker.worker for worker in self.target.workers],
            "transport_only": self.is_synthetic,
            "input_tokens": load.input_tokens,
            "output_tokens": load.output_tokens,
            "logprobs": load.logprobs,
            "routing": load.routing,
            "stream": self.wanted.streams,
            "seed": self.wanted.seed,
            "rounds": self.wanted.rounds,
            "results": [_outcome_as_json(outcome) for outcome in self.outcomes],
        }

    def _fleet_line(self) -> str:
        engines = ", ".join(sorted({f"{engine.engine} {engine.engine_version}" for engine in self.target.engines}))
        if self.is_synthetic:
            return (
                "TRANSPORT ONLY: a NATS server and a worker of this bench's own, whose engine makes its tokens up; "
                "no model was run"
            )
        num_workers = len(self.target.workers)
        workers = f"{num_workers} worker{'s' * (num_workers > 1)}"
        return f"fleet {self.fleet}: {self.target.model} on {workers}, {engines}"

    def _load_line(self) -> str:
        load = self.wanted.load
        has_routing = load.routing is not False and any(engine.routed_experts for engine in self.target.engines)
        extras = [
            "no logprobs" if load.logprobs is None else f"logprobs {load.logprobs}",
            "routing" if has_routing else "no routing",
            "chunk by chunk" if self.wanted.streams else "complete results",
            f"median of {self.wanted.rounds} rounds (lowest to highest)",
        ]
        return f"{load.input_tokens} tokens in, {load.output_tokens} out; {', '.join(extras)}"


def _outcome_as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "concurrency": outcome.concurrency,
        "requests": outcome.num_requests,
        **{name: asdict(spread) for name, spread in outcome.spreads().items()},
        "retries": outcome.retries,
        "gaps": outcome.gaps,
        "failures": dict(outcome.failures),
        "cached_tokens": outcome.cached_tokens,
        "weight_versions": sorted(outcome.weight_versions),
    }


def _counted(failures: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in failures.most_common())


def _version() -> str:
    try:
        return importlib.metadata.version("rollbus")
    except importlib.metadata.PackageNotFoundError:
        return "of a folder"


def _machine() -> dict[str, object]:
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
