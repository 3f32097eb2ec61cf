"""The states of a group of answers as a table."""

import enum
from typing import Final

from ..states import StateMachine

__all__ = ["GROUP", "GroupEvent", "GroupState"]


class GroupState(enum.StrEnum):
    """Where a group is that a step has begun."""

    RUNNING = "running"
    """Its open answers are requests in flight."""
    STOPPING = "stopping"
    """Its requests were aborted, because a step has what it needs; some have not ended yet."""
    STOPPED = "stopped"
    """Some of its answers are open, and nothing of it is in flight: the next step continues it."""
    COMPLETE = "complete"
    """All its answers ended by themselves: it is taken as soon as a step has enough of them."""
    TAKEN = "taken"
    """The trainer has it."""
    DROPPED = "dropped"
    """It is too old, or cannot be continued."""
    FAILED = "failed"
    """One of its answers failed."""


class GroupEvent(enum.StrEnum):
    """What moves a group."""

    COMPLETED = "completed"
    """Nothing of it is in flight, and all its answers ended by themselves."""
    INTERRUPTED = "interrupted"
    """Nothing of it is in flight, and some of its answers are open."""
    STOPPED = "stopped"
    """A step ends without it."""
    CONTINUED = "continued"
    """Its open answers are requested again, or some of them could not be requested at all."""
    TAKEN = "taken"
    """A step ends with it."""
    DROPPED = "dropped"
    """The step that begins is not to wait for it."""
    FAILED = "failed"
    """One of its answers failed."""


_LIVE: Final = [GroupState.RUNNING, GroupState.STOPPING, GroupState.STOPPED]
GROUP = StateMachine(
    "group",
    GroupState.RUNNING,
    frozenset({GroupState.TAKEN, GroupState.DROPPED, GroupState.FAILED}),
    {
        (GroupState.RUNNING, GroupEvent.COMPLETED): GroupState.COMPLETE,
        (GroupState.RUNNING, GroupEvent.INTERRUPTED): GroupState.STOPPED,
        (GroupState.RUNNING, GroupEvent.STOPPED): GroupState.STOPPING,
        (GroupState.STOPPING, GroupEvent.COMPLETED): GroupState.COMPLETE,
        (GroupState.STOPPING, GroupEvent.INTERRUPTED): GroupState.STOPPED,
        (GroupState.STOPPED, GroupEvent.CONTINUED): GroupState.RUNNING,
        (GroupState.STOPPED, GroupEvent.DROPPED): GroupState.DROPPED,
        (GroupState.COMPLETE, GroupEvent.DROPPED): GroupState.DROPPED,
        (GroupState.COMPLETE, GroupEvent.TAKEN): GroupState.TAKEN,
        **{(state, GroupEvent.FAILED): GroupState.FAILED for state in _LIVE},
    },
)
