"""The declarations of subcommands: their options, their help, and the function that runs them.

A declaration imports no heavy package. Thus `rollbus --help` is fast and works without the extras. The module of a
command is imported when the command runs.
"""

import argparse
import importlib
import inspect
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...schemas.options import duration, positive_int, size

Option = Callable[[Any], object]
"""Adds one or more options to a parser, or to a group of one."""
Run = Callable[[argparse.Namespace], int | Coroutine[object, object, int]]
"""Runs a subcommand and returns its exit code, or returns a coroutine that returns it."""
Declared = Callable[..., object]

TYPES: Final[dict[object, Callable[[str], object]]] = {
    "N": positive_int,
    "TIME": duration,
    "SIZE": size,
    "DIR": Path,
    "FILE": Path,
}
"""The type of a value, by its placeholder in the help. Values with other placeholders are texts."""


def arg(name: str, value: str | Collection[str] | None, text: str, **settings: Any) -> Option:
    """Return an argument or an option with a value.

    Args:
        value: placeholder of the value in the help, or the allowed values.
        text: its help.
        settings: further settings of `argparse`; `type` replaces the type of the placeholder.
    """
    if isinstance(value, str):
        settings = {"metavar": value, "type": TYPES.get(value), **settings}
    elif value is not None:
        settings["choices"] = value
    return lambda parser: parser.add_argument(name, help=text, **settings)


def workers_option(text: str) -> Option:
    """Return the option that names workers. It may be repeated."""
    return arg("--worker", "ID", text, dest="only_workers", action="append")


def flag(name: str, text: str, **settings: Any) -> Option:
    """Return an option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=text, **settings)


def group(title: str, *options: Option) -> Option:
    """Return options that stand under a title of their own in the help."""

    def add(parser: argparse.ArgumentParser) -> None:
        add_options(parser.add_argument_group(title), options)

    return add


def one_of(*options: Option) -> Option:
    """Return options that exclude each other."""

    def add(parser: argparse.ArgumentParser) -> None:
        add_options(parser.add_mutually_exclusive_group(), options)

    return add


def add_options(parser: Any, options: Sequence[Option]) -> None:
    """Add options to a parser, or to a group of one."""
    for option in options:
        option(parser)


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
    summary: str,
    run: str | Callable[[Declared], Run],
    *options: Option,
    reads_no_credentials: bool = False,
) -> Callable[[Declared], Declared]:
    """Declare a subcommand: the function has its name, and its docstring is the help, with examples as last section.

    Args:
        run: module below `frontend/cli` and function that runs the subcommand, for example `watch.status:run`, or a
            function that makes one from the declared function.
    """

    def declare(declared: Declared) -> Declared:
        name = declared.__name__.replace("_", "-")
        text, _, examples = inspect.cleandoc(declared.__doc__ or "").partition("\n\nExamples:\n")
        COMMANDS[name] = CliCommand(
            name=name,
            summary=summary,
            text=text,
            examples=inspect.cleandoc(examples).splitlines(),
            options=options,
            run=imported(run) if isinstance(run, str) else run(declared),
            reads_no_credentials=reads_no_credentials,
        )
        return declared

    return declare


def imported(place: str) -> Run:
    """Return a function that imports `module:function` below `frontend/cli` when it is called, and calls it."""

    def run(args: argparse.Namespace) -> int | Coroutine[object, object, int]:
        module, _, function = place.partition(":")
        chosen: Run = getattr(importlib.import_module(f".{module}", __package__), function)
        return chosen(args)

    return run
