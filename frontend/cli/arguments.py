"""Kinds of argument values; each says what is wrong with a bad one. And how an address is shown."""

import argparse
import json
import re
from pathlib import Path

__all__ = [
    "add_otel",
    "add_tokenizer",
    "host_name",
    "json_object",
    "non_negative_int",
    "positive_float",
    "positive_int",
    "without_password",
]


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _int(text, 1)


def non_negative_int(text: str) -> int:
    """An integer of at least 0."""
    return _int(text, 0)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def json_object(text: str) -> str:
    """A JSON object, returned as it was written."""
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, such as '{\"max_model_len\": 4096}'")
    return text


def host_name(text: str) -> str:
    """The name of a host, in lower case, without a port."""
    if not re.fullmatch(r"[A-Za-z0-9_]([\w.-]*[A-Za-z0-9_])?", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a host, such as fleet.example.com")
    return text.lower()


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer."""
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        type=Path,
        help="folder of the tokenizer (default: that of a worker on this machine)",
    )


def without_password(text: str) -> str:
    """NATS addresses as they may be shown: users, passwords and tokens are left out."""
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
    """Add the option that switches tracing on."""
    parser.add_argument(
        "--otel",
        action="store_true",
        help="export spans of requests as the variables OTEL_* say; needs rollbus[otel]",
    )
