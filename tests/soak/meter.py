"""Measures memory and file descriptors of processes repeatedly, and detects growth."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import psutil

MIB = 1024**2
FEWEST_LOOKS = 9
"""Minimum number of measurements: three in each third of the run."""


@dataclass(frozen=True)
class Bound:
    """Maximum growth of a process from the beginning to the end."""

    rss_mib: float
    num_fds: int


BOUNDS: Mapping[str, Bound] = {
    # The client stores ids of earlier requests, and faults open and close its connections.
    "client": Bound(rss_mib=10, num_fds=4),
    "worker": Bound(rss_mib=6, num_fds=2),
    # The server's garbage collector runs at its own times, and the server stores the ids of the last two minutes.
    "server": Bound(rss_mib=32, num_fds=4),
}
"""Limits by kind of process."""


@dataclass(frozen=True)
class Trend:
    """Medians of one process in the first and in the last third of the run."""

    name: str
    rss_mib: tuple[float, float]
    num_fds: tuple[float, float]
    bound: Bound

    @property
    def is_flat(self) -> bool:
        """True if the process grew by no more than its limit."""
        rss_growth = self.rss_mib[1] - self.rss_mib[0]
        return rss_growth <= self.bound.rss_mib and self.num_fds[1] - self.num_fds[0] <= self.bound.num_fds

    def __str__(self) -> str:
        """Return a line for the report."""
        (rss, last_rss), (fds, last_fds) = self.rss_mib, self.num_fds
        return (
            f"{self.name}: {rss:.1f} to {last_rss:.1f} MiB (may grow by {self.bound.rss_mib:g}), "
            f"{fds:g} to {last_fds:g} file descriptors (by {self.bound.num_fds})"
        )


class Meter:
    """Measures processes.

    Args:
        pids: process ids by name, which begins with a kind of `BOUNDS`.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._rss: dict[str, list[float]] = {name: [] for name in pids}
        self._fds: dict[str, list[int]] = {name: [] for name in pids}

    def look(self) -> None:
        """Measure each process once.

        Raises:
            psutil.NoSuchProcess: a process has exited.
        """
        for name, process in self._processes.items():
            self._rss[name].append(process.memory_info().rss / MIB)
            self._fds[name].append(process.num_fds())

    def trends(self) -> list[Trend]:
        """Return the trend of each process.

        Raises:
            ValueError: there are too few measurements.
        """
        return [
            Trend(name, _ends(self._rss[name]), _ends(self._fds[name]), BOUNDS[name.split()[0]])
            for name in self._processes
        ]


def _ends(values: list[float] | list[int]) -> tuple[float, float]:
    if len(values) < FEWEST_LOOKS:
        raise ValueError(f"{len(values)} looks; needed are {FEWEST_LOOKS}")
    third = len(values) // 3
    return median(values[:third]), median(values[-third:])
