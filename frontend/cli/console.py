"""What commands print: results on stdout, everything else on stderr.

On a terminal, tables have borders and long work shows a bar; into pipes and files goes plain text of any width.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "log_notes",
    "note",
    "plain_table",
    "print_json",
    "print_table",
    "printable",
    "program",
    "progress",
    "rich_table",
    "waiting",
    "write",
]

# Above all: notes are no log until `log_notes` says so. None of `getLogger`, which would be above our modules' loggers.
_notes = logging.Logger("rollbus", logging.CRITICAL + 1)  # noqa: LOG001
_notes.parent = logging.getLogger()


def write(text: str = "", *, end: str = "\n", out: IO[str] | None = None) -> bool:
    """Write a line on `out`, by default stdout, at once; nothing when its reader has had enough, as `head` has.

    Returns False in that case, for commands that would write for ever.
    """
    out = out or sys.stdout
    try:
        out.write(text + end)
        out.flush()
    except BrokenPipeError:
        # How the command ends says its exit code still. Also for what is written at the interpreter's end.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), out.fileno())
        return False
    return True


def note(text: str, level: int = logging.INFO) -> None:
    """Write a line on stderr; after `log_notes` as a line of the log, of this level."""
    if _notes.isEnabledFor(level):
        _notes.log(level, "%s", text)
    else:
        write(text, out=sys.stderr)


def log_notes() -> None:
    """Make what `note` is given lines of the log from here on, since something is to read them there."""
    _notes.setLevel(logging.INFO)


def print_json(value: object) -> bool:
    """Print `value` as one line of JSON on stdout; return False if nobody reads it."""
    import msgspec

    return write(msgspec.json.encode(value).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, out: IO[str] | None = None) -> None:
    """Print a table on `out`, by default stdout."""
    out = out or sys.stdout
    if not out.isatty():
        write(plain_table(columns, rows), out=out)
        return
    from rich.console import Console

    Console(file=out, markup=False, highlight=False).print(rich_table(columns, rows))


def printable(text: str) -> str:
    """Return `text` as it may go to a terminal, which would obey control characters: a peer has written it."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    """The table as it is shown on a terminal, for a console without markup."""
    from rich.table import Table

    table = Table()
    for column in columns:
        # A narrow terminal breaks long names over lines; cut off, they could not be copied.
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as lines of text, columns two spaces apart."""
    lines = [columns, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def program() -> str:
    """How this program is called where the user is, for commands to copy."""
    script = Path(sys.argv[0])
    if script.name != "rollbus":
        return "python -m rollbus.frontend.cli"
    return "rollbus" if shutil.which("rollbus") else os.path.relpath(script)


@contextmanager
def progress(what: str, total: int, *, done: int = 0, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr while the body runs; it calls what this yields once for each step done.

    Nothing is shown unless `shown` is set and stderr is a terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda: bar.advance(task)


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that something goes on, and for how many seconds; what this yields shows another text.

    It may be called on any thread.
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
