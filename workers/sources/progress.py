"""The progress of staging one source."""

import threading
from collections.abc import Callable
from typing import Final

from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import Staging, WeightSource

__all__ = ["Progress", "Report"]

Report = Callable[[str], None]
"""Called with the stage that a command has reached, for display to users."""


class Progress:
    """Counts the bytes of each stage.

    Args:
        source: the source that is staged.
        report: called when a stage begins.
    """

    def __init__(self, source: WeightSource, report: Report) -> None:
        self._source: Final = str(source)[:MAX_ERROR_CHARS]
        self._report = report
        self._stage = ""
        self._done = 0
        self._total = 0
        # Two threads add bytes.
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        """The bytes received over the network, in all stages."""
        self.on_move: Callable[[], None] | None = None
        """Called when a stage begins and when bytes are added, on any thread."""

    def __repr__(self) -> str:
        """One line with the stage."""
        return f"<Progress {self._source} {self._stage} {self._done}/{self._total}>"

    @property
    def staging(self) -> Staging:
        """The current stage with its bytes."""
        done = min(self._done, self._total)
        return Staging(source=self._source, stage=self._stage, done_bytes=done, total_bytes=self._total)

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Begin a stage of `total_bytes`."""
        with self._lock:
            self._done, self._total = 0, total_bytes
        if stage != self._stage:
            self._stage = stage
            self._report(stage)
        self._move()

    def add(self, num_bytes: int) -> None:
        """Add bytes to the current stage. Any thread may call this."""
        with self._lock:
            self._done += num_bytes
        self._move()

    def add_fetched(self, num_bytes: int) -> None:
        """Add bytes that were received over the network."""
        self.fetched_bytes += num_bytes
        self.add(num_bytes)

    def _move(self) -> None:
        if (on_move := self.on_move) is not None:
            on_move()
