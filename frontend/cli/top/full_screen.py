"""The terminal while `rollbus top` has it: another screen, keys without Enter, and all as before in the end."""

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
"""Lines of the log that are written after the screen is left, the last ones."""


def is_capable() -> bool:
    """Return whether stdout is a terminal on which lines can change in place."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


class FullScreen:
    """The terminal's other screen. Entering keeps how the terminal is set; leaving sets it so again."""

    def __init__(self) -> None:
        self._console = Console(markup=False, highlight=False)
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] | None = None
        self._live: Live | None = None

    @property
    def keys(self) -> int | None:
        """The descriptor on which keys come; None: stdin is no terminal."""
        return self._keys

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        return self._console.size

    def __enter__(self) -> Self:
        """Take the terminal."""
        with ExitStack() as undo:
            undo.callback(self._give_back)
            self._take()
            undo.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        self._give_back()

    def show(self, text: Text) -> None:
        """Replace what stands there."""
        if self._live is not None:
            self._live.update(text, refresh=True)

    def suspend(self) -> None:
        """Stop this process as Ctrl-Z does, with the terminal as it was; return when it goes on."""
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
                # At once: output that a stopped terminal does not take must not keep us here.
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)


class _LogBuffer(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque(maxlen=MAX_HELD_LOGS)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def held_logs() -> Iterator[None]:
    """Keep the log back for a block if it would be written over the screen."""
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
