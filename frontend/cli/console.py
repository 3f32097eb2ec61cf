"""Prints the output of commands: results on stdout, everything else on stderr.

On a terminal, long work shows a progress bar.
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ...schemas.weights import Staging

# The level is above all others: notes are log lines only after `log_notes`. This logger does not come from `getLogger`,
# which would make it the parent of the loggers of our modules.
_notes = logging.Logger("rollbus", logging.CRITICAL + 1)  # noqa: LOG001
_notes.parent = logging.getLogger()


def write(text: str = "", *, end: str = "\n", out: IO[str] | None = None) -> bool:
    """Write a line to `out` (default: stdout) and flush it, unless the reader closed the pipe, as `head` does.

    Returns False in that case, so that commands without an end can stop.
    """
    out = out or sys.stdout
    try:
        out.write(text + end)
        out.flush()
    except BrokenPipeError:
        # The command still ends with its own exit code. The redirect also covers what the interpreter flushes at exit.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), out.fileno())
        return False
    return True


def note(text: str, level: int = logging.INFO) -> None:
    """Write a line to stderr. After `log_notes`, log it with this level instead.

    A full disk or a closed terminal does not end the command.
    """
    if _notes.isEnabledFor(level):
        _notes.log(level, "%s", text)
    else:
        with suppress(OSError):
            write(text, out=sys.stderr)


def log_notes() -> None:
    """Make `note` log its lines from now on, because a program reads the log."""
    _notes.setLevel(logging.INFO)


def print_json(value: object) -> bool:
    """Print `value` as one line of JSON on stdout. Return False if the reader closed the pipe."""
    import msgspec

    return write(msgspec.json.encode(value).decode())


def print_result(args: argparse.Namespace, value: object, *lines: str) -> None:
    """Print the result of a command: with --json this value, else the lines."""
    if args.json:
        print_json(value)
    else:
        for line in lines:
            write(line)


def program() -> str:
    """Return the command that starts this program in the current folder, for examples that the user copies."""
    script = Path(sys.argv[0])
    if script.name != "rollbus":
        return "python -m rollbus.frontend.cli"
    return "rollbus" if shutil.which("rollbus") else os.path.relpath(script)


@contextmanager
def progress(what: str, total: int, *, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr while the body runs. The body calls the yielded function after each step.

    The bar appears only if `shown` is set and stderr is a terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show a text and the elapsed seconds on stderr while the body runs, if stderr is a terminal.

    The yielded function changes the text. It may be called on any thread.
    """
    if not sys.stderr.isatty():
        yield lambda _what: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    seconds = TextColumn("{task.elapsed:.0f} s", table_column=Column(no_wrap=True))
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), seconds)
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(what, total=None)
        yield lambda text: line.update(task, description=text)


def gib(num_bytes: float) -> str:
    """Return a size in GiB as text."""
    return f"{num_bytes / 1024**3:.1f} GiB"


def size(num_bytes: float) -> str:
    """Return a size in GiB, MiB or KiB as text."""
    if num_bytes >= 1024**3:
        return gib(num_bytes)
    if num_bytes >= 1024**2:
        return f"{num_bytes / 1024**2:.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"


def staging_text(staging: Staging) -> str:
    """Return for example `fetching 45 % of 1.2 GiB`, or only the stage if its bytes are unknown."""
    if not staging.total_bytes:
        return staging.stage
    share = 100 * min(staging.done_bytes, staging.total_bytes) // staging.total_bytes
    return f"{staging.stage} {share} % of {size(staging.total_bytes)}"
