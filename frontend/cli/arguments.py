"""Options and values that several commands have."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

from .exits import CommandFailed, ExitCode

__all__ = [
    "START_SOME",
    "add_tokenizer",
    "check_writable",
    "host_name",
    "no_workers",
    "refuse_options",
    "without_password",
]


START_SOME = "start some with `rollbus up` or `rollbus worker`"


def no_workers(nats_url: str, fleet: str) -> str:
    """Return the error text for a fleet without live workers."""
    return f"fleet {fleet} has no workers at {without_password(nats_url)}"


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


def check_writable(option: str, folder: Path) -> None:
    """Check that files can be written into a directory. Create the directory if it is missing.

    Raises:
        CommandFailed: no file can be written.
    """
    from tempfile import TemporaryFile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise CommandFailed(f"{option} {folder} cannot be written: {exc.strerror}", ExitCode.USAGE) from exc


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
