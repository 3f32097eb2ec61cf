"""Options and values that several commands have."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from .exits import CommandFailed, ExitCode

__all__ = [
    "add_tokenizer",
    "host_name",
    "refuse_options",
    "without_password",
]


def host_name(text: str) -> str:
    """Parse a host name without a port and return it in lower case."""
    if not re.fullmatch(r"[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a host name such as fleet.example.com")
    return text.lower()


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the option --tokenizer."""
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="folder of the tokenizer (default: model folder of a worker on this machine)",
    )


def refuse_options(args: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Check that the user gave none of these options.

    Args:
        names: names of the options in `args`.
        reason: continues the error: why the option has no effect here.

    Raises:
        CommandFailed: an option was given.
    """
    for name in names:
        if getattr(args, name) != args.default_of(name):
            raise CommandFailed(f"--{name.replace('_', '-')} has no effect {reason}", ExitCode.USAGE)


def without_password(text: str) -> str:
    """Return NATS addresses without user names, passwords and tokens."""
    return ",".join(re.sub(r"//.*@", "//", url) for url in re.split(r",(?=\w+://)", text))
