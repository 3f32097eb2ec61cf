"""Options and values that several commands have."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...schemas.install import pip_install
from .exits import CommandFailed, ExitCode

if TYPE_CHECKING:
    from ...bus import FleetState

__all__ = [
    "START_SOME",
    "add_tokenizer",
    "check_drawable",
    "check_known_model",
    "host_name",
    "no_workers",
    "refuse_options",
    "without_password",
]


START_SOME = "start some with `rollbus up` or `rollbus worker`"


def no_workers(nats_url: str, fleet: str) -> str:
    """Return the error text for a fleet without live workers."""
    return f"fleet {fleet} has no workers at {without_password(nats_url)}"


def check_known_model(state: "FleetState", model: str) -> None:
    """Check that a worker of the fleet serves this model, or has served it.

    Raises:
        CommandFailed: none has.
    """
    known = {worker.model for worker in state.workers} | state.desired.keys()
    if model not in known:
        allowed = ", ".join(sorted(known)) or "none, because no worker has served a model"
        raise CommandFailed(f"--model: fleet {state.fleet} has no model {model}; allowed: {allowed}", ExitCode.USAGE)


def check_drawable(option: str) -> None:
    """Check that matplotlib, which draws the picture of `option`, is installed.

    Raises:
        CommandFailed: it is not.
    """
    try:
        import matplotlib  # noqa: F401 - checks that it is installed
    except ImportError as exc:
        raise CommandFailed(f"{option} requires {exc.name}, which is not installed: {pip_install('rl')}") from exc


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
