"""Findings of the checks, with remedies."""

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Status", "fail", "ok", "warn"]


class Status(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """The checked thing works, but possibly not as intended."""
    FAIL = "fail"
    """The checked thing prevents something from working."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """Remedy; empty if there is nothing to do."""


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Return a finding that may be a problem."""
    return Finding(check, Status.WARN, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Return a finding that is a problem."""
    return Finding(check, Status.FAIL, found, advice)
