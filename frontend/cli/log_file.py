"""The log file of a fleet on this machine: of bounded size, and only the newest files are kept."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final

from ...bus.logs import TEXT, TextFormatter
from .console import note

__all__ = ["LogFile"]

MAX_BYTES: Final = 8 * 1024**2
"""Of the file and of the part before it, `NAME.1`: days of a fleet that says what is unusual, an hour with -v."""
MAX_FILES: Final = 10
"""Kept by later runs. All together take 160 MiB at most."""
PREFIX: Final = "up-"


class LogFile:
    """One run's log file.

    Args:
        folder: is made; files of earlier runs in it beyond the newest `MAX_FILES` are removed.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob(f"{PREFIX}*.log"))[: -(MAX_FILES - 1)]:
            for path in (old, old.with_name(f"{old.name}.1")):
                # Another `up` may remove it at the same time.
                path.unlink(missing_ok=True)
        self.path = folder / f"{PREFIX}{datetime.now().astimezone():%Y%m%d-%H%M%S}-{os.getpid()}.log"
        self._file = _File(self.path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")

    def write(self, process: str, line: str) -> None:
        """Append a line that a process printed."""
        if not self._file.is_broken:
            self._file.emit(logging.makeLogRecord({"msg": f"[{process}] {line}"}))

    @contextmanager
    def own_logs(self, *, also_stderr: bool) -> Iterator[None]:
        """Write what this process logs to the file while the body runs, and close the file at the end.

        Args:
            also_stderr: it goes to stderr as well.
        """
        root = logging.getLogger()
        before = root.handlers[:]
        root.handlers[:] = [*(before if also_stderr else ()), _Forward(self)]
        try:
            yield
        finally:
            root.handlers[:] = before
            with contextlib.suppress(OSError):  # a full disk has been reported
                self._file.close()


class _File(RotatingFileHandler):
    is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Say once that the file cannot be written, for example as its disk is full. The fleet goes on without it."""
        del record
        self.is_broken = True
        note(f"no log from here on: {sys.exception()}")


class _Forward(logging.Handler):
    def __init__(self, log: LogFile) -> None:
        super().__init__()
        self._log = log
        self.setFormatter(TextFormatter(TEXT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        self._log.write("rollbus", self.format(record))
