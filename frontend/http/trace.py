"""The trace that a client's HTTP request belongs to: W3C Trace Context, section 3."""

import re
from typing import Final, NamedTuple

from starlette.datastructures import Headers

from ...schemas.trace_context import TRACEPARENT_PATTERN, kept_tracestate

__all__ = ["GivenTrace", "given_trace"]

_ANY_VERSION: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})(?P<ids>-[0-9a-f]+-[0-9a-f]+)-(?P<flags>[0-9a-f]+)(?P<more>-.*)?"
)
"""A `traceparent` of any version. Later versions append fields to the known ones."""


class GivenTrace(NamedTuple):
    """A client's trace context in the form that the service forwards."""

    traceparent: str
    """The `traceparent` in version 00."""
    tracestate: str | None


def given_trace(headers: Headers, *, is_trusted: bool) -> GivenTrace | None:
    """Return the trace context in `headers`; None if there is none, if there are several, or if it is malformed.

    If the trace is malformed, a new trace begins, as the standard requires. The request is not rejected.

    Args:
        is_trusted: the client may have its request sampled. Otherwise its flags are ignored.
    """
    given = headers.getlist("traceparent")
    if len(given) != 1:
        return None
    found = _ANY_VERSION.fullmatch(given[0].strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"] is not None):
        return None
    known = f"00{found['ids']}-{found['flags']}"
    if TRACEPARENT_PATTERN.fullmatch(known) is None:
        return None
    state = ",".join(headers.getlist("tracestate"))
    return GivenTrace(known if is_trusted else f"00{found['ids']}-00", kept_tracestate(state))
