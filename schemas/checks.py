"""Checks of single values: each returns the value in its canonical type or raises `InvalidRequest`."""

import math
import operator
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from schemas import limits
from schemas.errors import InvalidRequest

__all__ = [
    "check_bool",
    "check_float",
    "check_int",
    "check_int_list",
    "check_matches",
    "check_name",
    "check_request_id",
    "check_token_ids",
    "describe",
]

REQUEST_ID_PATTERN = re.compile(rf"[A-Za-z0-9_:\-]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")
MAX_SHOWN_CHARS = 60
"""Of a bad value in an error message: enough to recognize it, too little to leak a prompt."""


def describe(value: object) -> str:
    """Show `value` for an error message, shortened; containers by type and length only."""
    if isinstance(value, (list, tuple, dict, set, bytes, bytearray, np.ndarray)):
        return f"{type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


def check_bool(field: str, value: object) -> bool:
    """Accept True and False only."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(field=field, problem=f"is {describe(value)}, not a bool", allowed="true or false")
    return bool(value)


def check_int(field: str, value: object, low: int, high: int) -> int:
    """Accept integers (numpy's too, bools not) in [low, high]."""
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(field=field, problem=f"is the bool {value}", allowed=allowed)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(field=field, problem=f"is {describe(value)}, not an integer", allowed=allowed) from None
    if not low <= number <= high:
        raise InvalidRequest(field=field, problem=f"is {describe(number)}", allowed=allowed)
    return number


def check_float(field: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Accept finite numbers in [low, high], or in (low, high] when `above`."""
    allowed = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidRequest(field=field, problem=f"is {describe(value)}, not a number", allowed=allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise InvalidRequest(field=field, problem=f"is {describe(value)}", allowed=allowed)
    return number


def check_int_list(field: str, value: object, low: int, high: int, max_length: int) -> list[int]:
    """Accept up to `max_length` integers in [low, high]; an empty list is fine."""
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise InvalidRequest(
            field=field, problem=f"is {describe(value)}, not a list", allowed=f"a list of up to {max_length} integers"
        )
    items = list(value)
    if len(items) > max_length:
        raise InvalidRequest(
            field=field, problem=f"has {len(items)} entries", allowed=f"a list of up to {max_length} integers"
        )
    return [check_int(f"{field}[{i}]", item, low, high) for i, item in enumerate(items)]


def check_matches(field: str, value: object, pattern: re.Pattern[str], allowed: str) -> str:
    """Accept strings that `pattern` matches as a whole."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise InvalidRequest(field=field, problem=f"is {describe(value)}", allowed=allowed)
    return value


def check_request_id(field: str, value: object) -> str:
    """Accept ids that can stand in a NATS subject and in a Nats-Msg-Id header."""
    return check_matches(field, value, REQUEST_ID_PATTERN, f"1 to {limits.MAX_REQUEST_ID_CHARS} of A-Z a-z 0-9 _ : -")


def check_name(field: str, value: object, max_chars: int = limits.MAX_NAME_CHARS) -> str:
    """Accept non-empty printable strings of up to `max_chars` characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars or CONTROL_CHARACTERS.search(value):
        raise InvalidRequest(
            field=field,
            problem=f"is {describe(value)}",
            allowed=f"1 to {max_chars} characters, none a control character",
        )
    return value


def check_token_ids(field: str, value: object, *, min_length: int, max_length: int) -> npt.NDArray[np.int32]:
    """Accept a flat sequence of token ids, 0 to `MAX_TOKEN_ID`; returns a read-only `<i4` array of its own.

    The model's vocabulary is checked later, where it is known.
    """
    allowed = f"a flat list of {min_length} to {max_length} token ids from 0 to {limits.MAX_TOKEN_ID}"
    if isinstance(value, (str, bytes, dict)):
        raise InvalidRequest(field=field, problem=f"is {describe(value)}", allowed=allowed)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequest(field=field, problem="is not a flat list of integers", allowed=allowed) from None
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            field=field, problem=f"is of {array.ndim} dimensions and type {array.dtype}", allowed=allowed
        )
    if not min_length <= len(array) <= max_length:
        raise InvalidRequest(field=field, problem=f"has {len(array)} entries", allowed=allowed)
    bad = np.flatnonzero((array < 0) | (array > limits.MAX_TOKEN_ID))
    if len(bad):
        at = int(bad[0])
        raise InvalidRequest(field=f"{field}[{at}]", problem=f"is {int(array[at])}", allowed=allowed)
    ids = array.astype("<i4", copy=True)
    ids.flags.writeable = False
    return ids
