"""Receives presence under this worker's id, and ends this worker if another worker keeps the id."""

import logging
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from nats.aio.msg import Msg

from ...bus.logs import LOG_VARIABLE, RejectionCount
from ...schemas.errors import DuplicateWorker, RemoteProtocolError
from ...schemas.limits import MAX_NAME_CHARS
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerPresence
from .lifecycle import WorkerLifecycle

__all__ = ["HOST", "IdGuard", "log_name"]

logger = logging.getLogger(__name__)

HOST: Final = socket.gethostname()[:MAX_NAME_CHARS]
"""Name of this machine in presence."""


def log_name() -> str | None:
    """Return the log that gets the lines of this process: a file, or `journal`; None if it is unknown."""
    path = Path(os.environ.get(LOG_VARIABLE) or "/proc/self/fd/2").resolve()
    if path.is_file():
        return str(path)[-MAX_NAME_CHARS:]
    return "journal" if "JOURNAL_STREAM" in os.environ else None


class IdGuard:
    """Detects other workers that use this worker's id.

    Args:
        worker_id: id of this worker.
        on_duplicate: called once with the error that ends this worker.

    Attributes:
        duplicate: the error passed to `on_duplicate`, or None while this worker keeps its id.
        rejected: presence messages that could not be decoded.
    """

    def __init__(
        self, worker_id: str, lifecycle: WorkerLifecycle, on_duplicate: Callable[[DuplicateWorker], None]
    ) -> None:
        self._worker_id = worker_id
        self._lifecycle = lifecycle
        self._on_duplicate = on_duplicate
        self.duplicate: DuplicateWorker | None = None
        self.rejected = RejectionCount()

    def __repr__(self) -> str:
        """One line with the id."""
        return f"<IdGuard {self._worker_id} duplicate={self.duplicate}>"

    async def receive(self, message: Msg) -> None:
        """Handle presence of this worker or of another worker with its id."""
        try:
            presence = decode_presence(message.data)
        except RemoteProtocolError as exc:
            if so_far := self.rejected.add():
                logger.warning("presence.rejected subject=%s so_far=%s error=%s", message.subject, so_far, exc)
            return
        if (
            presence.worker != self._worker_id
            or self.duplicate is not None
            or not self._lifecycle.on_presence(presence)
        ):
            return
        self.duplicate = DuplicateWorker(_text(presence))
        logger.error("worker.superseded worker=%s error=%s", self._worker_id, self.duplicate)
        self._lifecycle.give_way()
        self._on_duplicate(self.duplicate)


def _text(other: WorkerPresence) -> str:
    """Return an error message that describes the worker with the id and the next step."""
    started = datetime.now(UTC) - timedelta(seconds=other.uptime_s)
    return (
        f"worker id {other.worker} is in use by another process: host {other.host or 'unknown'}, "
        f"pid {other.pid or 'unknown'}, started {started.isoformat(timespec='seconds')}; "
        "give each worker an id and credentials of its own"
    )
