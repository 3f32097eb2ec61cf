"""Types of values of command line options. Their errors state the wrong value and the allowed values."""

import argparse
import json
import math
import re
from typing import Final

__all__ = [
    "duration",
    "duration_or_zero",
    "json_object",
    "non_negative_int",
    "positive_int",
    "size",
]

SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd]))+", re.ASCII)
DURATION_PART: Final = re.compile(r"([\d.]+)(ms|[smhd])", re.ASCII)
BYTES: Final = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}
SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?((?:[kmgt]i?)?)b", re.ASCII | re.IGNORECASE)


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    return _int(text, 1)


def non_negative_int(text: str) -> int:
    """Parse an integer of at least 0."""
    return _int(text, 0)


def _int(text: str, low: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
    return number


def duration(text: str) -> float:
    """Parse a duration above 0, such as `90`, `1.5s`, `5m` or `1h30m`, and return it in seconds."""
    seconds = duration_or_zero(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration above 0, such as 90 (seconds), 5m or 1h30m")
    return seconds


def duration_or_zero(text: str) -> float:
    """Parse a duration as `duration` does, or 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if DURATION.fullmatch(text):
        seconds = sum(float(number) * SECONDS[unit] for number, unit in DURATION_PART.findall(text))
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90 (seconds), 5m or 1h30m")
    return seconds


def size(text: str) -> int:
    """Parse a number of bytes of at least 1, such as `1000000`, `100MB` or `2GiB`."""
    found = SIZE.fullmatch(text)
    try:
        number = int(text) if found is None else int(float(found[1]) * BYTES[found[2].lower()])
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of at least 1 byte, such as 1000000, 100MB or 2GiB")
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
