"""What was found, and what to do about it."""

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Status", "fail", "ok", "warn"]


class Status(enum.StrEnum):
    """How one thing stands."""

    OK = "ok"
    WARN = "warn"
    """It works, and may not be what is wanted."""
    FAIL = "fail"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty where there is nothing to be done."""


def ok(check: str, found: str) -> Finding:
    """It is as it should be."""
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Look at it."""
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Mend it."""
    return Finding(check, Status.FAIL, found, advice)
