"""The terminal while `rollbus top` runs: the alternate screen, and keys without Enter. The end restores everything."""

import logging
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["FullScreen", "held_logs", "is_capable"]

MAX_HELD_LOGS: Final = 20
"""Limit on log lines that are held until the screen is left. Older lines are discarded."""


def is_capable() -> bool:
    """Return True if stdout is a terminal on which lines can change in place."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class FullScreen:
    """The terminal's alternate screen. Entering saves the settings of the terminal, and leaving restores them."""

    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False)
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._live: Live | None = None

    @property
    def keys(self) -> int | None:
        """File descriptor of the keys; None if stdin is not a terminal."""
        return self._keys

    @property
    def size(self) -> tuple[int, int]:
        """Current columns and lines."""
        return self._console.size

    def __enter__(self) -> Self:
        """Enter the alternate screen."""
        with ExitStack() as undo:
            undo.callback(self._give_back)
            self._take()
            undo.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the terminal."""
        self._give_back()

    def show(self, text: Text) -> None:
        """Replace the text on the screen."""
        if self._live is not None:
            self._live.update(text, refresh=True)

    def suspend(self) -> None:
        """Restore the terminal and stop this process as Ctrl-Z does. Return when the process continues."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _give_back(self) -> None:
        try:
            if self._live is not None:
                self._live.stop()
        finally:
            self._live = None
            if self._keys is not None and self._before is not None:
                # TCSANOW does not wait for pending output, which a stopped terminal would not accept.
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)


class _LogBuffer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=MAX_HELD_LOGS)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def held_logs() -> Iterator[None]:
    """Hold the log while the block lasts, if stderr is a terminal. Otherwise the log would overwrite the screen."""
    if not sys.stderr.isatty():
        yield
        return
    root, held = logging.getLogger(), _LogBuffer()
    before = root.handlers[:]
    root.handlers[:] = [held]
    try:
        yield
    finally:
        root.handlers[:] = before
        for record in held.records:
            root.handle(record)
