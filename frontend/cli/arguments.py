"""Types of argument values. Their errors state the wrong value and the allowed values.

Also removes passwords from addresses.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path

from .exits import CommandFailed, ExitCode

__all__ = [
    "add_otel",
    "add_tokenizer",
    "host_name",
    "json_object",
    "non_negative_int",
    "positive_float",
    "positive_int",
    "refuse_options",
    "without_password",
]


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _int(text, 1)


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _int(text, 0)


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def json_object(text: str) -> str:
    """Check that `text` is a JSON object and return it unchanged."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, such as '{\"max_model_len\": 4096}'")
    return text


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


def _int(text: str, low: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
    return number


def add_otel(parser: argparse.ArgumentParser) -> None:
    """Add the option that enables tracing."""
    parser.add_argument(
        "--otel",
        action="store_true",
        help="export spans of requests, configured by the variables OTEL_*; needs rollbus[otel]",
    )
