"""W3C Trace Context of requests: the trace of a request, and the vendor data of that trace."""

import re
from typing import Final

from .checks import check_matches
from .errors import InvalidRequest

__all__ = ["MAX_TRACESTATE_CHARS", "TRACEPARENT_PATTERN", "check_traceparent", "check_tracestate", "kept_tracestate"]

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
        raise InvalidRequest(field=field, problem=f"has {len(text)} characters", allowed=_ALLOWED)
    if _members(text) is None:
        raise InvalidRequest(field=field, problem="is malformed", allowed=_ALLOWED)
    return text


def kept_tracestate(text: str) -> str | None:
    """Return the first members of `text`, as many as fit; None if the text is malformed or has no members."""
    members = _members(text)
    if members is None:
        return None
    kept = ",".join(members)
    while len(kept) > MAX_TRACESTATE_CHARS:
        kept = kept.rpartition(",")[0]
    return kept or None


def _members(text: str) -> list[str] | None:
    """Return the members of a `tracestate`, at least one; None if it is malformed."""
    members = [stripped for member in text.split(",") if (stripped := member.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {member["key"] for member in found if member is not None}
    return members if members and len(keys) == len(members) <= MAX_TRACESTATE_MEMBERS else None
