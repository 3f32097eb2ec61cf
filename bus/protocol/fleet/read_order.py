"""Decides which reads of a desired state count: in a cluster, a deposed leader may answer with an older state.

A state has the random id of its bucket, and its epoch only rises. So an older epoch of the same bucket is a stale read:
the reader keeps its state and reads again. Another bucket means that the previous bucket was lost. The caller passes in
the time; nothing here waits.
"""

import enum
from typing import Final

from ....schemas.desired import DesiredState

__all__ = ["STALE_S", "ReadOrder", "ReadVerdict"]

STALE_S: Final = 30.0
"""Seconds after which an older or missing state counts as the real state: the store was restored from a backup, or it
was lost and not written since. nats-server checks every 10 s if a leader has had contact with its peers within 10 s, so
a deposed leader answers for 20 s at most.
"""


class ReadVerdict(enum.Enum):
    """The relation of a read to the read before it."""

    CURRENT = enum.auto()
    """The read state is the same or a later one."""
    STALE = enum.auto()
    """The read state is older, so the read does not count."""
    LOST = enum.auto()
    """The previous state was lost. This state is a different one, of which nothing was handled."""


class ReadOrder:
    """Judges the reads of one desired state by one reader."""

    def __init__(self) -> None:
        self._last: DesiredState | None = None
        self._stale_since: float | None = None

    def __repr__(self) -> str:
        """Return one line with the last state that counted."""
        last = "nothing" if self._last is None else f"bucket={self._last.bucket or '?'} epoch={self._last.epoch}"
        return f"<ReadOrder {last} stale_since={self._stale_since}>"

    def judge(self, state: DesiredState | None, now: float) -> ReadVerdict:
        """Judge a read. A read that is not stale is the reference for later reads.

        Args:
            state: state that was read; None: no state was ever recorded.
        """
        verdict = self._compare(state)
        if verdict is ReadVerdict.STALE:
            self._stale_since = now if self._stale_since is None else self._stale_since
            if now < self._stale_since + STALE_S:
                return verdict
            verdict = ReadVerdict.LOST
        # Nothing is lost with a state without commands.
        self._last = None if state is None or state.is_first else state
        self._stale_since = None
        return verdict

    def _compare(self, state: DesiredState | None) -> ReadVerdict:
        last = self._last
        if last is None:
            return ReadVerdict.CURRENT
        if state is None:
            return ReadVerdict.STALE
        if _is_other_bucket(last, state) or _is_other_history(last, state):
            return ReadVerdict.LOST
        return ReadVerdict.CURRENT if state.epoch >= last.epoch else ReadVerdict.STALE


def _is_other_bucket(last: DesiredState, state: DesiredState) -> bool:
    # Earlier releases write states without a bucket id.
    return bool(last.bucket and state.bucket) and last.bucket != state.bucket


def _is_other_history(last: DesiredState, state: DesiredState) -> bool:
    """Return True if an epoch has another command than before: the store was restored and written since."""
    ids = {seen.epoch: seen.id for seen in last.seen}
    return any(ids.get(seen.epoch, seen.id) != seen.id for seen in state.seen)
