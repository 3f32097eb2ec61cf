"""Which reads of a desired state count: in a cluster of servers a deposed leader may answer with what stood before.

A state carries the random id of its bucket, and its epoch only rises. So an older epoch of the same bucket is a stale
read: the reader keeps what it has, and reads again. Another bucket means that the one before was lost. Time is passed
in; nothing here waits.
"""

import enum
from typing import Final

from ....schemas.desired import DesiredState

__all__ = ["STALE_S", "ReadOrder", "ReadVerdict"]

STALE_S: Final = 30.0
"""A state that is older, or missing, for longer is what stands there: a store was set back, or lost and not written
since. nats-server looks every 10 s whether a leader has heard of its peers within 10 s, so a deposed one answers for
20 s at most."""


class ReadVerdict(enum.Enum):
    """What a read says about the one before it."""

    CURRENT = enum.auto()
    """It is the same state, or a later one."""
    STALE = enum.auto()
    """It is older, and says nothing."""
    LOST = enum.auto()
    """The state of before was lost: this is another one, of which nothing was handled."""


class ReadOrder:
    """Judges the reads of one desired state by one reader."""

    def __init__(self) -> None:
        self._last: DesiredState | None = None
        self._stale_since: float | None = None

    def __repr__(self) -> str:
        """One line with the last state that counted."""
        last = "nothing" if self._last is None else f"bucket={self._last.bucket or '?'} epoch={self._last.epoch}"
        return f"<ReadOrder {last} stale_since={self._stale_since}>"

    def judge(self, state: DesiredState | None, now: float) -> ReadVerdict:
        """Judge what was read; what is not stale is what later reads are compared with.

        Args:
            state: None: nothing was ever recorded there.
        """
        verdict = self._compare(state)
        if verdict is ReadVerdict.STALE:
            self._stale_since = now if self._stale_since is None else self._stale_since
            if now < self._stale_since + STALE_S:
                return verdict
            verdict = ReadVerdict.LOST
        self._last, self._stale_since = state, None
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
    # Programs of before there was an id write states without one.
    return bool(last.bucket and state.bucket) and last.bucket != state.bucket


def _is_other_history(last: DesiredState, state: DesiredState) -> bool:
    """True if some epoch has another command than before: the store was set back, and written since."""
    ids = {seen.epoch: seen.id for seen in last.seen}
    return any(ids.get(seen.epoch, seen.id) != seen.id for seen in state.seen)
