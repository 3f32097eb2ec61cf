"""Checks of single values. Each check returns the value in its canonical type or raises `InvalidRequest`.

The trace of a request, and the vendor data of that trace, are those of W3C Trace Context.
"""

import math
import operator
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple, force_setattr

from . import limits
from .errors import InvalidRequest

REQUEST_ID_PATTERN = re.compile(rf"[A-Za-z0-9_:\-]{{1,{limits.MAX_REQUEST_ID_CHARS}}}")
SUBJECT_TOKEN_PATTERN = re.compile(rf"[A-Za-z0-9_\-]{{1,{limits.MAX_SUBJECT_TOKEN_CHARS}}}")
_REQUEST_ID: Final = f"1 to {limits.MAX_REQUEST_ID_CHARS} of A-Z a-z 0-9 _ : -"
_SUBJECT_TOKEN: Final = f"1 to {limits.MAX_SUBJECT_TOKEN_CHARS} of A-Z a-z 0-9 _ -"
NO_SURROGATES = re.compile("[^\ud800-\udfff]*")
"""Matches strings without lone surrogates: Python strings may hold them, but UTF-8 and the wire format cannot."""
_I4: Final = np.dtype("<i4")
NOT_IN_NAMES = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_SHOWN_CHARS = 60
"""Maximum number of characters of an invalid value in an error message: enough to recognize it, too few to leak a
prompt."""
MAX_LISTED: Final = 16
"""Largest number of names that a message lists, because other processes choose the names."""
MAX_SHOWN_BITS = 128
"""Longest integer, in bits, that messages show in full. Python refuses to print very long integers, so messages show
their size."""
TRACEPARENT_PATTERN: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""Pattern of section 3.2, without ids of only zeros and without version ff."""
MAX_TRACESTATE_CHARS: Final = 512
"""Characters that section 3.3.1.5 requires every participant to propagate. Longer values are cut at a member
boundary."""
MAX_TRACESTATE_MEMBERS: Final = 32
"""Maximum number of members, by section 3.3.1.1."""
_MEMBER: Final = re.compile(
    r"(?P<key>[a-z0-9][a-z0-9_\-*/@]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_ALLOWED: Final = (
    f"a W3C tracestate: up to {MAX_TRACESTATE_MEMBERS} different members key=value with commas between them, "
    f"{MAX_TRACESTATE_CHARS} characters together"
)


def list_names(names: Sequence[str], separator: str = ", ", limit: int = MAX_LISTED) -> str:
    """Return the first `limit` names for a message, and how many more there are."""
    num_more = len(names) - limit
    last = "; and" if separator == "; " else " and"
    return separator.join(names[:limit]) + (f"{last} {num_more:,} more" if num_more > 0 else "")


def describe(value: object) -> str:
    """Return `value` as text for an error message: short scalars in full, everything else by type and size only."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and type {value.dtype}"
    if isinstance(value, (list, tuple, dict, set, frozenset, bytes, bytearray)):
        return f"a {kind} of length {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        text = repr(str.__str__(value[:MAX_SHOWN_CHARS]))
    elif value is None or isinstance(value, (bool, int, float, np.generic)):
        text = repr(value)
    else:
        # The repr of a foreign object may be huge, raise, or show a whole prompt.
        return f"a {kind}"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


class FieldChecks:
    """The checks of all fields of a struct. A value that is the default needs no check.

    Args:
        prefix: begins the names of fields in errors.
        checks: by field, in the order of the fields.
    """

    def __init__(
        self, kind: type[msgspec.Struct], prefix: str, checks: Mapping[str, Callable[[str, Any], object]]
    ) -> None:
        names, defaults = kind.__struct_fields__, kind.__struct_defaults__
        self._defaults = (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults
        self._checks = [(name, partial(checks[name], prefix + name)) for name in names]

    def apply(self, struct: msgspec.Struct) -> None:
        """Check all fields and convert them to their canonical types."""
        # Most fields are defaults, which C code skips.
        values = astuple(struct)
        changed = compress(zip(self._checks, values, strict=True), map(operator.is_not, values, self._defaults))
        for (name, check), value in changed:
            checked = check(value)
            if checked is not value:
                force_setattr(struct, name, checked)


def check_bool(field: str, value: object) -> bool:
    """Accept only True and False."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(field, f"is {describe(value)}, not a bool", "true or false")
    return bool(value)


def check_int(field: str, value: object, low: int, high: int) -> int:
    """Accept integers in [low, high], including numpy integers but not bools."""
    # Fast path: nearly every value is valid, so the text of the allowed range is built only for the others.
    if type(value) is int and low <= value <= high:
        return value
    allowed = f"an integer from {low} to {high}"
    if isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(field, f"is the bool {value}", allowed)
    try:
        number = int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(field, f"is {describe(value)}, not an integer", allowed) from None
    if not low <= number <= high:
        raise InvalidRequest(field, f"is {describe(number)}", allowed)
    return number


def check_float(field: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """Accept finite numbers in [low, high], or in (low, high] if `above` is set."""
    # Fast path as in `check_int`. A NaN fails every comparison, so it never takes this path.
    if type(value) is float and low <= value <= high < math.inf and not (above and value == low):
        return value
    allowed = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidRequest(field, f"is {describe(value)}, not a number", allowed)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    return number


def check_matches(field: str, value: object, pattern: re.Pattern[str], allowed: str) -> str:
    """Accept strings that `pattern` matches completely."""
    if not isinstance(value, str) or pattern.fullmatch(value) is None:
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    # Convert subclasses of str to str, because msgspec refuses to encode them.
    return str.__str__(value)


def check_request_id(field: str, value: object) -> str:
    """Accept ids that are valid in a Nats-Msg-Id header and in log lines."""
    return check_matches(field, value, REQUEST_ID_PATTERN, _REQUEST_ID)


def check_subject_token(field: str, value: object) -> str:
    """Accept names that are valid as a subject token without encoding: names of fleets, clients and workers."""
    return check_matches(field, value, SUBJECT_TOKEN_PATTERN, _SUBJECT_TOKEN)


def check_name(field: str, value: object, max_chars: int = limits.MAX_NAME_CHARS) -> str:
    """Accept non-empty strings of up to `max_chars` characters without control characters and lone surrogates."""
    if not isinstance(value, str) or not 1 <= len(value) <= max_chars or NOT_IN_NAMES.search(value):
        raise InvalidRequest(
            field,
            f"is {describe(value)}" + (f" of {len(value)} characters" if isinstance(value, str) else ""),
            f"1 to {max_chars} characters, none a control character",
        )
    return str.__str__(value)


def check_token_ids(field: str, value: object, *, min_length: int, max_length: int) -> npt.NDArray[np.int32]:
    """Accept a flat sequence or array of token ids from 0 to `MAX_TOKEN_ID`, and return a read-only `<i4` array.

    The array is a copy unless `value` is already such an array and owns its data, or has all data of a `bytes` object.
    This function does not check the model's vocabulary; `check_prompt` and `check_sampling` do.
    """
    if type(value) is np.ndarray and _is_packed(value) and min_length <= len(value) <= max_length:
        return value
    allowed = f"a flat list of {min_length} to {max_length} token ids from 0 to {limits.MAX_TOKEN_ID}"
    if type(value) is list and min_length <= len(value) <= max_length and (ids := _pack_ids(value)) is not None:
        return ids
    array = _make_array(field, value, max_length, allowed)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(field, f"is {describe(array)}", allowed)
    if not min_length <= len(array) <= max_length:
        raise InvalidRequest(field, f"has {len(array)} entries", allowed)
    if _is_packed(array):
        return array
    # Not `array.min()`, which takes three times as long for a short prompt.
    if len(array) and (np.minimum.reduce(array) < 0 or np.maximum.reduce(array) > limits.MAX_TOKEN_ID):
        at = int(np.flatnonzero((array < 0) | (array > limits.MAX_TOKEN_ID))[0])
        raise InvalidRequest(f"{field}[{at}]", f"is {int(array[at])}", allowed)
    copied = array.astype(_I4, copy=True)
    copied.flags.writeable = False
    return copied


def _is_packed(array: npt.NDArray[Any]) -> bool:
    """Return True for `<i4` token ids to which nobody can write, and which keep no other data in memory."""
    if array.dtype != _I4 or array.ndim != 1 or array.flags.writeable:
        return False
    base: object = array.base
    if base is not None and (type(base) is not bytes or len(base) != array.nbytes):
        return False
    # No i4 is above `MAX_TOKEN_ID`.
    return not len(array) or bool(np.minimum.reduce(array) >= 0)


def _make_array(field: str, value: object, max_length: int, allowed: str) -> npt.NDArray[Any]:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        if len(value) > max_length:
            raise InvalidRequest(field, f"has {len(value)} entries", allowed)
        return _make_int64(field, value)
    if not hasattr(value, "__array__"):
        raise InvalidRequest(field, f"is {describe(value)}", allowed)
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as exc:
        # Tensors on another device raise these errors.
        raise InvalidRequest(field, f"is {describe(value)} and cannot become an array", allowed) from exc


def _pack_ids(value: Sequence[object]) -> npt.NDArray[np.int32] | None:
    """Return token ids as an array, faster than numpy's own conversion does; None if an item is not a token id."""
    # `struct` would convert True to 1.
    if set(map(type, value)) != {int}:
        return None
    try:
        data = struct.pack(f"<{len(value)}i", *value)
    except struct.error:
        return None
    # The last byte of a negative number is not ASCII.
    return np.frombuffer(data, _I4) if data[3::4].isascii() else None


def _make_int64(field: str, value: Sequence[object]) -> npt.NDArray[np.int64]:
    # numpy would convert True to 1 and make a float array for 2.0. A check of each entry names the wrong entry.
    if set(map(type, value)) == {int}:
        with suppress(OverflowError):
            return np.array(value, np.int64)
    ids = [check_int(f"{field}[{i}]", item, 0, limits.MAX_TOKEN_ID) for i, item in enumerate(value)]
    return np.array(ids, np.int64)


def check_json(field: str, value: object, depth: int = limits.MAX_EXTRA_DEPTH) -> object:
    """Accept a JSON value that msgpack can encode, nested at most `depth` levels deep; return a copy."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return check_matches(field, value, NO_SURROGATES, "a string that UTF-8 can carry: no lone surrogates")
    if isinstance(value, int):
        return check_int(field, value, -(2**63), 2**64 - 1)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field, f"is {value}", "a finite number")
        return float(value)
    if not isinstance(value, (list, tuple, Mapping)):
        raise InvalidRequest(field, f"is {describe(value)}", "a value of JSON's types")
    if depth == 0:
        raise InvalidRequest(field, "is nested too deeply", f"values nested {limits.MAX_EXTRA_DEPTH} deep at most")
    if isinstance(value, Mapping):
        return {
            check_name(f"{field} (a name)", name): check_json(f"{field}.{name}", item, depth - 1)
            for name, item in value.items()
        }
    return [check_json(f"{field}[{i}]", item, depth - 1) for i, item in enumerate(value)]


def check_traceparent(field: str, value: object) -> str:
    """Accept a `traceparent` of any version that has the form of version 00.

    Raises:
        InvalidRequest: the value has another form.
    """
    return check_matches(field, value, TRACEPARENT_PATTERN, "a W3C traceparent, 55 lower-case characters")


def check_tracestate(field: str, value: object) -> str:
    """Accept a `tracestate` that can be propagated unchanged.

    Raises:
        InvalidRequest: the value is malformed or too long.
    """
    text = check_matches(field, value, re.compile(r"[\x20-\x7e]+"), _ALLOWED)
    if len(text) > MAX_TRACESTATE_CHARS:
        raise InvalidRequest(field, f"has {len(text)} characters", _ALLOWED)
    if _split_members(text) is None:
        raise InvalidRequest(field, "is malformed", _ALLOWED)
    return text


def trim_tracestate(text: str) -> str | None:
    """Return the first members of `text`, as many as fit; None if the text is malformed or has no members."""
    members = _split_members(text)
    if members is None:
        return None
    kept = ",".join(members)
    while len(kept) > MAX_TRACESTATE_CHARS:
        kept = kept.rpartition(",")[0]
    return kept or None


def _split_members(text: str) -> list[str] | None:
    """Return the members of a `tracestate`, at least one; None if it is malformed."""
    members = [stripped for member in text.split(",") if (stripped := member.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {member["key"] for member in found if member is not None}
    return members if members and len(keys) == len(members) <= MAX_TRACESTATE_MEMBERS else None


def unique_names(field: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return each name once. Reject a plain string, whose letters would become names."""
    if isinstance(names, str | bytes | Mapping) or not isinstance(names, Iterable):
        raise InvalidRequest(field, f"is {describe(names)}", "a list of ids")
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise InvalidRequest(field, f"has {describe(name)}", "a list of ids")
        found[name] = None
    return tuple(found)
