"""The progress bar of `rollbus generate`: first the current step, then finished prompts, tokens/s and time left."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

__all__ = ["GenerateBar", "count_text", "pace_text"]

REFRESH_PER_S: Final = 4
"""Updates per second of the bar, which counts seconds."""
BAR_WIDTH: Final = 20
"""Columns of the bar. The figures fit beside it in 80 columns."""


class GenerateBar:
    """One line on stderr that changes in place and disappears at the end. Its methods may be called on any thread.

    Args:
        is_shown: show the bar if stderr is a terminal. False: never show it.
    """

    def __init__(self, *, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._live: Live | None = None
        self._what = "starting"
        self._since = time.monotonic()
        self._total: int | None = None
        self._before = 0
        self._ended = 0
        self._tokens = 0

    def __enter__(self) -> Self:
        """Show the bar."""
        if self._is_shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, markup=False, highlight=False)
            self._live = Live(
                get_renderable=self._line, console=console, refresh_per_second=REFRESH_PER_S, transient=True
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()

    def show(self, what: str) -> None:
        """Show a step of the run that comes before the generation."""
        self._what = what
        if self._live is not None:
            self._live.refresh()

    def start_count(self, total: int, before: int) -> None:
        """Start to count prompts. `total` includes the `before` prompts that earlier runs finished."""
        self._what, self._since = "generating", time.monotonic()
        self._total, self._before, self._ended = total, before, before

    def set_counts(self, ended: int, tokens: int) -> None:
        """Set the number of prompts that ended in this run, and the number of their tokens."""
        self._ended, self._tokens = self._before + ended, tokens

    def _line(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        seconds = time.monotonic() - self._since
        if self._total is None:
            text = f"{seconds:.0f} s"
        else:
            text = pace_text(self._total, self._ended, before=self._before, tokens=self._tokens, seconds=seconds)
        line = Table.grid(padding=(0, 1))
        for _ in range(3):
            line.add_column(no_wrap=True)
        # Without a total, the bar pulses.
        line.add_row(self._what, ProgressBar(total=self._total, completed=self._ended, width=BAR_WIDTH), text)
        return line


def count_text(done: int, failed: int, total: int) -> str:
    """Return the counts of a run that ends early, and how the user continues it."""
    text = f"{done:,} of {total:,} done" + (f", {failed:,} failed" if failed else "")
    return f"{text}; the same command continues"


def pace_text(total: int, ended: int, *, before: int, tokens: int, seconds: float) -> str:
    """Return finished prompts, tokens per second and time left.

    Speed and time left come from the average of this run, without the prompts of earlier runs.
    """
    parts = [f"{ended:,}/{total:,}"]
    if ended == before or seconds <= 0:
        return "  ".join([*parts, f"{seconds:.0f} s"])
    parts.append(f"{tokens / seconds:,.0f} tokens/s")
    if ended < total:
        left = round((total - ended) * seconds / (ended - before))
        hours, minutes = left // 3600, left // 60 % 60
        parts.append(f"{hours}:{minutes:02}:{left % 60:02} left" if hours else f"{minutes}:{left % 60:02} left")
    return "  ".join(parts)
