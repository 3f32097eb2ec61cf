"""The declarations of subcommands: their options, their help, and the function that runs them.

A declaration imports no heavy package. Thus `rollbus --help` is fast and works without the extras. The module of a
command is imported when the command runs.
"""

import argparse
import atexit
import gc
import importlib
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Final, NamedTuple

from ...schemas.options import Option, add_options, arg

Run = Callable[[argparse.Namespace], int | Coroutine[object, object, int]]
"""Runs a subcommand and returns its exit code, or returns a coroutine that returns it."""
Declared = Callable[[], None]


def workers_option(text: str) -> Option:
    """Return the option that names workers. It may be repeated."""
    return arg("--worker", "ID", text, dest="only_workers", action="append")


def group(title: str, *options: Option) -> Option:
    """Return options that stand under a title of their own in the help."""
    return lambda parser: add_options(parser.add_argument_group(title), options)


def one_of(*options: Option) -> Option:
    """Return options that exclude each other."""
    return lambda parser: add_options(parser.add_mutually_exclusive_group(), options)


class CliCommand(NamedTuple):
    """A subcommand."""

    name: str
    summary: str
    """The line for `rollbus --help`."""
    text: str
    """The help of the subcommand."""
    examples: Sequence[str]
    """Two to four command lines at the end of the help. Each works without changes."""
    options: Sequence[Option]
    run: Run
    reads_no_credentials: bool
    """True if the subcommand reads `--creds` and `--fleet` itself."""


COMMANDS: Final[dict[str, CliCommand]] = {}
"""The declared subcommands by name."""


def command(
    summary: str, run: str, *options: Option, reads_no_credentials: bool = False
) -> Callable[[Declared], Declared]:
    """Declare a subcommand: the function has its name, and its docstring is the help, with examples as last section.

    Args:
        run: module below `frontend/cli` and function that runs the subcommand, for example `watch.status:run`.
    """

    def declare(declared: Declared) -> Declared:
        name = declared.__name__.rstrip("_").replace("_", "-")
        text, _, examples = inspect.cleandoc(declared.__doc__ or "").partition("\n\nExamples:\n")
        lines = inspect.cleandoc(examples).splitlines()
        COMMANDS[name] = CliCommand(name, summary, text, lines, options, _imported(run), reads_no_credentials)
        return declared

    return declare


def _imported(place: str) -> Run:
    """Return a function that imports `module:function` below `frontend/cli` when it is called, and calls it."""

    def run(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
        module, _, function = place.partition(":")
        # Garbage collections of what stays take a quarter of the time of a short command: in imports, and at the exit.
        gc.disable()
        try:
            chosen: Run = getattr(importlib.import_module(f".{module}", __package__), function)
        finally:
            gc.freeze()
            gc.enable()
        atexit.register(gc.freeze)
        return chosen(args)

    return run
