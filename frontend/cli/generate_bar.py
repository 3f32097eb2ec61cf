"""The progress bar of `rollbus generate`: first the current step, then finished prompts, tokens/s and time left."""

import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from .tables import printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

__all__ = ["GenerateBar", "count_text", "pace_text"]

REFRESH_PER_S: Final = 4
"""Updates per second of the bar, which counts seconds."""
BAR_WIDTH: Final = 20
"""Columns of the bar. The figures fit beside it in 80 columns."""
RATE_S: Final = 10.0
"""Seconds over which the bar measures tokens per second."""


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
        self._open_tokens: Callable[[], int] = lambda: 0
        self._reason: Callable[[], str] = lambda: ""
        # Times and numbers of tokens.
        self._seen: deque[tuple[float, int]] = deque()

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

    def start_count(
        self, total: int | None, before: int, *, open_tokens: Callable[[], int], reason: Callable[[], str]
    ) -> None:
        """Start to count prompts.

        Args:
            total: number of prompts, with those of earlier runs; None: it is unknown.
            before: number of prompts that earlier runs finished.
            open_tokens: returns the number of tokens of the requests in flight. The thread of the bar calls it.
            reason: returns the reason why requests wait, or an empty string. The thread of the bar calls it.
        """
        self._what, self._since = "generating", time.monotonic()
        self._total, self._before, self._ended = total, before, before
        self._open_tokens, self._reason = open_tokens, reason

    def set_counts(self, ended: int, tokens: int) -> None:
        """Set the number of prompts that ended in this run, and the number of their tokens."""
        self._ended, self._tokens = self._before + ended, tokens

    def _line(self) -> "Group":
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = time.monotonic()
        seconds = now - self._since
        if self._what != "generating":
            text = f"{seconds:.0f} s"
        else:
            tokens = self._tokens + self._open_tokens()
            rate = self._measure(now, tokens)
            text = pace_text(self._total, self._ended, before=self._before, rate=rate, seconds=seconds)
        line = Table.grid(padding=(0, 1))
        for _ in range(3):
            line.add_column(no_wrap=True)
        # Without a total, the bar pulses.
        line.add_row(self._what, ProgressBar(total=self._total, completed=self._ended, width=BAR_WIDTH), text)
        reason = self._reason()
        return Group(line, Text(printable(reason))) if reason else Group(line)

    def _measure(self, now: float, tokens: int) -> float:
        """Return the tokens per second of the last seconds."""
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(tokens - before, 0) / (now - since) if now > since else 0.0


def count_text(done: int, failed: int, total: int | None) -> str:
    """Return the counts of a run that ends early, and how the user continues it."""
    text = (f"{done:,} done" if total is None else f"{done:,} of {total:,} done") + (
        f", {failed:,} failed" if failed else ""
    )
    return f"{text}; the same command continues"


def pace_text(total: int | None, ended: int, *, before: int, rate: float, seconds: float) -> str:
    """Return finished prompts, tokens per second and time left.

    Args:
        total: number of prompts; None: it is unknown.
        before: number of prompts that earlier runs finished. They do not count for the time left.
        rate: tokens per second.
        seconds: seconds since the start of this run.
    """
    parts = [f"{ended:,}" if total is None else f"{ended:,}/{total:,}"]
    if not rate and ended == before:
        return "  ".join([*parts, f"{seconds:.0f} s"])
    parts.append(f"{rate:,.0f} tokens/s")
    if total is not None and before < ended < total:
        left = round((total - ended) * seconds / (ended - before))
        hours, minutes = left // 3600, left // 60 % 60
        parts.append(f"{hours}:{minutes:02}:{left % 60:02} left" if hours else f"{minutes}:{left % 60:02} left")
    return "  ".join(parts)
