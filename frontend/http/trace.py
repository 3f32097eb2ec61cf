"""The trace that a client's HTTP request belongs to: W3C Trace Context, section 3.2."""

import re
from typing import Final

from starlette.datastructures import Headers

from ...schemas.request import TRACEPARENT_PATTERN

__all__ = ["traceparent_of"]

_ANY_VERSION: Final = re.compile(r"(?P<version>[0-9a-f]{2})(?P<known>(?:-[0-9a-f]+){3})(?P<more>-.*)?")
"""Later versions append fields to those that are known."""


def traceparent_of(headers: Headers) -> str | None:
    """The trace context in `headers`, as version 00; None without one, with several, and where it is malformed.

    Refusing a request because of its trace is not what the standard wants: the trace begins anew.
    """
    given = headers.getlist("traceparent")
    if len(given) != 1:
        return None
    found = _ANY_VERSION.fullmatch(given[0].strip(" \t"))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"] is not None):
        return None
    known = f"00{found['known']}"
    return known if TRACEPARENT_PATTERN.fullmatch(known) else None
