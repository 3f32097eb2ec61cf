"""Measures memory and file descriptors of processes, and the store, repeatedly, and detects growth."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import psutil

MIB = 1024**2
FEWEST_LOOKS = 9
"""Minimum number of measurements: three in each third of the run."""


@dataclass(frozen=True)
class Bound:
    """Maximum growth from the beginning to the end."""

    mib: float
    count: int
    what: str = "file descriptors"


BOUNDS: Mapping[str, Bound] = {
    # A client remembers the ids of its last 65,536 requests, and faults open and close its connections.
    "client": Bound(mib=24, count=6),
    "worker": Bound(mib=12, count=6),
    "service": Bound(mib=16, count=6),
    # The server's garbage collector runs at its own times, and the server stores the ids of the last two minutes.
    "server": Bound(mib=48, count=10),
    # All versions since the last anchor, the one before it, and 64 states of each model.
    "store": Bound(mib=16, count=0, what="streams and consumers"),
}
"""Limits by kind, the first word of a name."""


@dataclass(frozen=True)
class Trend:
    """Medians in the first and in the last third of the run."""

    name: str
    mib: tuple[float, float]
    counts: tuple[float, float]
    bound: Bound

    @property
    def is_flat(self) -> bool:
        """True if nothing grew by more than its limit."""
        return self.mib[1] - self.mib[0] <= self.bound.mib and self.counts[1] - self.counts[0] <= self.bound.count

    def __str__(self) -> str:
        """Return a line for the report."""
        (mib, last_mib), (count, last_count) = self.mib, self.counts
        return (
            f"{self.name}: {mib:.1f} to {last_mib:.1f} MiB (may grow by {self.bound.mib:g}), "
            f"{count:g} to {last_count:g} {self.bound.what} (by {self.bound.count})"
        )


class Meter:
    """Measures processes, which may be restarted in between, and other things that must not grow."""

    def __init__(self) -> None:
        self._looks: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)

    def look(self, pids: Mapping[str, int]) -> None:
        """Measure each process once. One that has just exited is left out.

        Args:
            pids: process ids by name, which begins with a kind of `BOUNDS`.
        """
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                self.add(name, process.memory_info().rss, process.num_fds())
            except psutil.NoSuchProcess:
                continue

    def add(self, name: str, num_bytes: int, count: int) -> None:
        """Add one measurement."""
        self._looks[name].append((num_bytes / MIB, count))

    @property
    def is_enough(self) -> bool:
        """True if everything was measured often enough for `trends`."""
        return {name.split()[0] for name in self._looks} == BOUNDS.keys() and all(
            len(looks) >= FEWEST_LOOKS for looks in self._looks.values()
        )

    def trends(self) -> list[Trend]:
        """Return all trends. Call this only if there are enough measurements."""
        return [
            Trend(name, _ends([mib for mib, _ in looks]), _ends([count for _, count in looks]), BOUNDS[name.split()[0]])
            for name, looks in sorted(self._looks.items())
        ]


def _ends(values: list[float] | list[int]) -> tuple[float, float]:
    third = len(values) // 3
    return median(values[:third]), median(values[-third:])
