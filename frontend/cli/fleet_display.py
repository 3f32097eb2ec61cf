"""What is shown of a fleet on this machine: how far its workers are, and where their logs go."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ...bus.logs import adopted, is_json, write_line
from ...schemas.presence import WorkerPresence, WorkerState
from .console import note
from .log_file import LogFile
from .processes import STOP_S

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

__all__ = ["FleetDisplay", "FleetObserver", "WorkerBoard"]

STARTING: Final = "starting"
"""The process runs and has not announced itself: it imports vLLM."""
LOADING: Final = "loading"
"""It has announced itself, and its engine loads or warms up."""
ENDED: Final = "ended"
REFRESH_PER_S: Final = 4
"""Of the lines in place; they count seconds."""


class FleetObserver:
    """Hears what a local fleet does, and shows its logs if asked to.

    Args:
        shows_logs: show what the workers print.
    """

    def __init__(self, *, shows_logs: bool) -> None:
        self._shows_logs = shows_logs

    def add_line(self, worker: str, line: str) -> None:
        """A worker printed a line."""
        if not self._shows_logs:
            return
        if is_json():
            write_line(adopted(line, worker))
        else:
            note(f"[{worker}] {line}")

    def add_end(self, worker: str, text: str) -> None:
        """The process of a worker ended, and this is what becomes of it."""
        self.add_line(worker, text)

    def set_workers(self, workers: Sequence[WorkerPresence]) -> None:
        """These are live; called with each announcement of one."""


@dataclass(slots=True)
class _Row:
    state: str
    since: float
    """When its process started."""
    took_s: float | None = None
    """From there until it served; None: it does not yet."""


class WorkerBoard:
    """Which state each worker is in, and for how long it has been starting. Time is passed in."""

    def __init__(self, names: Sequence[str], now: float) -> None:
        self._rows = {name: _Row(STARTING, now) for name in names}

    def set_workers(self, workers: Sequence[WorkerPresence], now: float) -> list[str]:
        """Take what the workers announce; returns a line for each one that changed its state."""
        changed = []
        for presence in workers:
            row = self._rows.get(presence.worker)
            state = LOADING if presence.state is WorkerState.STARTING else str(presence.state)
            if row is None or row.state == state:
                continue
            if row.state == ENDED:
                if presence.state is not WorkerState.STARTING:
                    # The last words of the process that ended.
                    continue
                row.since = now - presence.uptime_s
            if state == LOADING:
                row.took_s = None
            elif row.took_s is None:
                row.took_s = now - row.since
            row.state = state
            changed.append(self.line(presence.worker, now))
        return changed

    def set_ended(self, worker: str) -> None:
        """The process of a worker ended."""
        self._rows[worker].state = ENDED

    def line(self, worker: str, now: float) -> str:
        """Name, state and seconds: until it served, or so far."""
        return "  ".join(self.cells(worker, now))

    def cells(self, worker: str, now: float) -> tuple[str, str, str]:
        """The parts of its line."""
        row = self._rows[worker]
        seconds = now - row.since if row.took_s is None else row.took_s
        return worker, row.state, f"{seconds:.0f} s"

    def names(self) -> Sequence[str]:
        """All workers."""
        return tuple(self._rows)


class FleetDisplay(FleetObserver):
    """The lines of `up`: on a terminal one for each worker that changes in place, elsewhere one for each change.

    Args:
        log: where the workers' lines go; None: nowhere but to stderr.
        shows_logs: show them on stderr.
    """

    def __init__(self, names: Sequence[str], log: LogFile | None, *, shows_logs: bool) -> None:
        super().__init__(shows_logs=shows_logs)
        self._log = log
        self._board = WorkerBoard(names, time.monotonic())
        self._live: Live | None = None
        self._is_stopping = False
        self._workers: Sequence[WorkerPresence] = ()

    def __enter__(self) -> Self:
        """Show the lines, from here until `end_start`."""
        # Lines in place and logs would overwrite each other.
        if sys.stderr.isatty() and not self._shows_logs:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, markup=False, highlight=False)
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=REFRESH_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the lines as they are."""
        self.end_start()
        if isinstance(exc, Exception) and self._log is not None:
            note(f"the log of this run: {self._log.path}")

    def end_start(self) -> None:
        """From here on changes are lines of their own."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add_line(self, worker: str, line: str) -> None:
        """Write it to the log file, and show it if asked to."""
        if self._log is not None:
            self._log.write(worker, line)
        super().add_line(worker, line)

    def add_end(self, worker: str, text: str) -> None:
        """Show it, and write it to the log file."""
        self._board.set_ended(worker)
        self.add_line(worker, text)
        if not self._shows_logs:
            self._say(f"[{worker}] {text}")

    def set_workers(self, workers: Sequence[WorkerPresence]) -> None:
        """Show which of them changed."""
        self._workers = workers
        for line in self._board.set_workers(workers, time.monotonic()):
            if self._live is None:
                note(line)

    def stop(self) -> None:
        """Say what is waited for, as `up` is told to stop; the second time, that it waits no longer."""
        self.end_start()
        if self._is_stopping:
            note("killing what is left")
            return
        self._is_stopping = True
        count, requests = len(self._board.names()), sum(worker.in_flight for worker in self._workers)
        workers = f"{count} worker{'s' * (count != 1)}"
        what = f"{workers} and {requests} request{'s' * (requests != 1)} in flight" if requests else workers
        note(f"stopping: {what} ({STOP_S:g} s at most); Ctrl-C again kills")

    def _say(self, text: str) -> None:
        if self._live is None:
            note(text)
        else:
            self._live.console.print(text)

    def _table(self) -> "Table":
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column()
        table.add_column(justify="right")
        now = time.monotonic()
        for name in self._board.names():
            table.add_row(*self._board.cells(name, now))
        return table
