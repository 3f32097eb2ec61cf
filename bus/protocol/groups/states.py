"""The states of a group of answers as a transition table."""

import enum
from typing import Final

from ..states import StateMachine


class GroupState(enum.StrEnum):
    """The state of a group that a step has started."""

    RUNNING = "running"
    """The requests for its open answers are in flight."""
    STOPPING = "stopping"
    """A step has enough groups and aborted the requests of this group. Some requests have not ended yet."""
    STOPPED = "stopped"
    """Some of its answers are open, and none of its requests is in flight. The next step continues it."""
    COMPLETE = "complete"
    """All its answers have finished. A step returns it as soon as the step has enough complete groups."""
    TAKEN = "taken"
    """The trainer has received it."""
    DROPPED = "dropped"
    """It is too old, or the planner cannot continue it."""
    FAILED = "failed"
    """One of its answers failed."""


class GroupEvent(enum.StrEnum):
    """An event that changes the state of a group."""

    COMPLETED = "completed"
    """None of its requests is in flight, and all its answers have finished."""
    INTERRUPTED = "interrupted"
    """None of its requests is in flight, and some of its answers are open."""
    STOPPED = "stopped"
    """A step ends without it."""
    CONTINUED = "continued"
    """The caller requests its open answers again, or could not request some of them."""
    TAKEN = "taken"
    """A step ends and returns it."""
    DROPPED = "dropped"
    """The step that begins does not wait for it."""
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
