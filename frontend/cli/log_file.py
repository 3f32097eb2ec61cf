"""The log file of a fleet on this machine. Its size is bounded, and only the newest files are kept."""

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
"""Maximum bytes of the file, and of the previous file `NAME.1`. This is days of logs, or an hour with -v."""
MAX_FILES: Final = 10
"""Number of log files that later runs keep. Together they take 160 MiB at most."""
PREFIX: Final = "up-"


class LogFile:
    """The log file of one run.

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
        self._file = _File(self.path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")

    def write(self, process: str, line: str) -> None:
        """Append a line of the output of a process."""
        if not self._file.is_broken:
            self._file.emit(logging.makeLogRecord({"msg": f"[{process}] {line}"}))

    @contextmanager
    def own_logs(self, *, also_stderr: bool) -> Iterator[None]:
        """Write the logs of this process to the file while the body runs, then close the file.

        Args:
            also_stderr: write the logs to stderr as well.
        """
        root = logging.getLogger()
        before = root.handlers[:]
        root.handlers[:] = [*(before if also_stderr else ()), _Forward(self)]
        try:
            yield
        finally:
            root.handlers[:] = before
            with contextlib.suppress(OSError):  # `handleError` has already reported a full disk
                self._file.close()


class _File(RotatingFileHandler):
    is_broken = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Report once that the file cannot be written, for example on a full disk. The fleet keeps running."""
        del record
        self.is_broken = True
        note(f"the log file cannot be written, logging to it stops: {sys.exception()}")


class _Forward(logging.Handler):
    def __init__(self, log: LogFile) -> None:
        super().__init__()
        self._log = log
        self.setFormatter(TextFormatter(TEXT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to the log file."""
        self._log.write("rollbus", self.format(record))
