"""Shows the states of the workers of a fleet on this machine, and writes their logs.

The size of the log file is bounded: only the newest files are kept.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ....bus.logs import TEXT, TextFormatter, adopt_line, is_json, write_line
from ....schemas.presence import WorkerPresence, WorkerState
from ..console import note
from .processes import STOP_S

MAX_BYTES: Final = 8 * 1024**2
"""Maximum bytes of the file, and of the previous file `NAME.1`. This is days of logs, or an hour with -v."""
MAX_FILES: Final = 10
"""Number of log files that later runs keep. Together they take 160 MiB at most."""
PREFIX: Final = "up-"


class LogFile(RotatingFileHandler):
    """The log file of one run: the lines of the workers, and the logs of this process.

    Args:
        folder: created if missing. Older files beyond the newest `MAX_FILES` are deleted.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(f"{PREFIX}*.log"))[: -(MAX_FILES - 1)]:
            for path in (old, old.with_name(f"{old.name}.1")):
                # Another `up` may delete the file at the same time.
                path.unlink(missing_ok=True)
        self.path = folder / f"{PREFIX}{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}.log"
        self._is_broken = False
        super().__init__(self.path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")
        self.setFormatter(_LineFormatter(f"[rollbus] {TEXT}"))

    def write(self, process: str, line: str) -> None:
        """Append a line of the output of a process."""
        self.handle(logging.makeLogRecord({"name": "", "msg": f"[{process}] {line}"}))

    @contextmanager
    def own_logs(self, *, also_stderr: bool) -> Iterator[None]:
        """Write the logs of this process to the file while the body runs, then close the file.

        Args:
            also_stderr: write the logs to stderr as well.
        """
        root = logging.getLogger()
        before = root.handlers[:]
        root.handlers[:] = [*(before if also_stderr else ()), self]
        try:
            yield
        finally:
            root.handlers[:] = before
            with contextlib.suppress(OSError):  # `handleError` has already reported a full disk
                self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless an earlier one could not be written."""
        if not self._is_broken:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Report once that the file cannot be written, for example on a full disk. The fleet keeps running."""
        del record
        self._is_broken = True
        note(f"the log file cannot be written, logging to it stops: {sys.exception()}")


class _LineFormatter(TextFormatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a process, which comes from no logger, as it is."""
        return super().format(record) if record.name else record.getMessage()


STARTING: Final = "starting"
"""The process runs and has not published presence: it imports vLLM."""
LOADING: Final = "loading"
"""The worker has published presence. Its engine loads or warms up."""
ENDED: Final = "ended"
REFRESH_PER_S: Final = 4
"""Updates per second of the lines that change in place. These lines count seconds."""


class FleetObserver:
    """Receives the events of a local fleet, and can show the logs of its workers.

    Args:
        shows_logs: show the lines that the workers print.
    """

    def __init__(self, *, shows_logs: bool) -> None:
        self._shows_logs = shows_logs

    def add_line(self, worker: str, line: str) -> None:
        """Show a line that a worker printed, if `shows_logs` is set."""
        if not self._shows_logs:
            return
        if is_json():
            write_line(adopt_line(line, worker))
        else:
            note(f"[{worker}] {line}")

    def add_end(self, worker: str, text: str) -> None:
        """Show `text`: the process of a worker ended, and `text` states whether it is started again."""
        self.add_line(worker, text)

    def set_workers(self, workers: Sequence[WorkerPresence]) -> None:
        """Receive the live workers. This is called with each presence of a worker."""


@dataclass(slots=True)
class _Row:
    state: str
    since: float
    """Time at which the process started, or ended."""
    took_s: float | None = None
    """Seconds from `since` until the worker served. None: it does not serve yet."""


class WorkerBoard:
    """The state of each worker and its start time in seconds. Callers pass the current time."""

    def __init__(self, names: Sequence[str], now: float) -> None:
        self._rows = {name: _Row(STARTING, now) for name in names}

    def set_workers(self, workers: Sequence[WorkerPresence], now: float) -> list[str]:
        """Add the presences of the workers. Return a line for each worker that changed its state."""
        changed = []
        for presence in workers:
            row = self._rows.get(presence.worker)
            state = LOADING if presence.state is WorkerState.STARTING else str(presence.state)
            if row is None or row.state == state:
                continue
            if row.state == ENDED:
                if presence.state is not WorkerState.STARTING:
                    # The process that ended had sent this presence.
                    continue
                row.since = now - presence.uptime_s
            if state == LOADING:
                row.took_s = None
            elif row.took_s is None:
                row.took_s = now - row.since
            row.state = state
            changed.append(self.line(presence.worker, now))
        return changed

    def set_ended(self, worker: str, now: float) -> None:
        """Record that the process of a worker ended. Its seconds start again."""
        self._rows[worker] = _Row(ENDED, now)

    def is_starting(self) -> bool:
        """Return True if a worker has not served since its process, or the process before, started."""
        return any(row.took_s is None for row in self._rows.values())

    def line(self, worker: str, now: float) -> str:
        """Return name, state and start time of a worker as one line. The start time of a starting worker grows."""
        return "  ".join(self.cells(worker, now))

    def cells(self, worker: str, now: float) -> tuple[str, str, str]:
        """Return the parts of the line of a worker."""
        row = self._rows[worker]
        seconds = now - row.since if row.took_s is None else row.took_s
        return worker, row.state, f"{seconds:.0f} s"

    def names(self) -> Sequence[str]:
        """Return the names of all workers."""
        return tuple(self._rows)


class FleetDisplay(FleetObserver):
    """Shows the states of the workers for `up`.

    On a terminal each worker has one line, which changes in place. Elsewhere each change is a line.

    Args:
        log: file for the lines of the workers. None: only stderr.
        shows_logs: show the lines of the workers on stderr.
    """

    def __init__(self, names: Sequence[str], log: LogFile | None, *, shows_logs: bool) -> None:
        super().__init__(shows_logs=shows_logs)
        self._log = log
        self._board = WorkerBoard(names, time.monotonic())
        self._live: Live | None = None
        self._is_stopping = False
        self._is_restarting = False
        self._workers: Sequence[WorkerPresence] = ()

    def __enter__(self) -> Self:
        """Show the lines that change in place until `end_start`, if stderr is a terminal without logs."""
        self._show_in_place()
        return self

    def _show_in_place(self) -> None:
        # Logs and lines that change in place would overwrite each other.
        if self._live is None and sys.stderr.isatty() and not self._shows_logs:
            console = Console(stderr=True, markup=False, highlight=False)
            self._live = Live(get_renderable=self._table, console=console, refresh_per_second=REFRESH_PER_S)
            self._live.start()

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        """Stop to update the lines. After an error, name the log file."""
        self.end_start()
        if isinstance(exc, Exception) and self._log is not None:
            # The command prints it below the cause.
            exc.add_note(f"the log of this run: {self._log.path}")

    def end_start(self) -> None:
        """Print each further change as a new line, until a worker ends."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def add_line(self, worker: str, line: str) -> None:
        """Write the line of a worker to the log file, and show it if `shows_logs` is set."""
        if self._log is not None:
            self._log.write(worker, line)
        super().add_line(worker, line)

    def add_end(self, worker: str, text: str) -> None:
        """Show the end of a process, and write it to the log file."""
        self._board.set_ended(worker, time.monotonic())
        self.add_line(worker, text)
        if not self._shows_logs:
            self._say(f"[{worker}] {text}")
        if not self._is_stopping:
            self._is_restarting = True
            self._show_in_place()

    def set_workers(self, workers: Sequence[WorkerPresence]) -> None:
        """Show the workers that changed their state."""
        self._workers = workers
        for line in self._board.set_workers(workers, time.monotonic()):
            if self._live is None:
                note(line)
        if self._is_restarting and not self._board.is_starting():
            self._is_restarting = False
            self.end_start()

    def stop(self) -> None:
        """Show that `up` stops and waits for its workers. The second call shows that `up` kills them."""
        self.end_start()
        if self._is_stopping:
            note("killing the remaining workers")
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

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column()
        table.add_column(justify="right")
        now = time.monotonic()
        for name in self._board.names():
            table.add_row(*self._board.cells(name, now))
        return table
