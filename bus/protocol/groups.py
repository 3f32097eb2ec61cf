"""Decides which groups of answers run in a step of a trainer, and which groups a step returns, stops or drops.

A step begins with the groups that the previous step has left, and starts new groups until `limit` groups exist. The
step is over when `need` groups are complete. It returns these groups, in the order of their completion, and stops all
running groups. The next step continues a stopped group, unless the group is too old by then. A group that completes
while it is stopped, or beyond `need`, belongs to the next step. So generated tokens are lost only through age.

Invariant: at most `limit` groups are known at any time, and a step returns at most `need`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .states import StateMachine


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


@dataclass(frozen=True, slots=True)
class StepStart:
    """The first actions of a step for the groups of the previous step."""

    dropped: tuple[int, ...]
    """Groups that are older than the trainer allows; none of their requests is in flight."""
    continued: tuple[int, ...]
    """Groups whose open answers the caller requests, in this order, before it starts any group."""


class GroupPlanner:
    """The groups of one trainer, by numbers that the caller assigns.

    Args:
        need: groups that a step returns.
        limit: groups that exist at the same time, `need` or more.
        max_lag: the maximum number of versions that the oldest token of a group may be behind when a step begins; None:
            no limit.
    """

    def __init__(self, *, need: int, limit: int, max_lag: int | None) -> None:
        self._need = need
        self._limit = limit
        self.max_lag = max_lag
        self._states: dict[int, GroupState] = {}
        # In the order of completion.
        self._complete: dict[int, None] = {}
        self._num_failed = 0
        self._is_stepping = False
        self._has_prompts = True

    def __repr__(self) -> str:
        """Return one line with counts, which a trainer reads in that of its `GroupSampler`."""
        states = [*self._states.values()]
        counts = " ".join(f"{state}={states.count(state)}" for state in dict.fromkeys(states))
        return f"<GroupPlanner need={self._need} limit={self._limit}{' ' if counts else ''}{counts}>"

    def having(self, *states: GroupState) -> tuple[int, ...]:
        """Return the groups in one of these states, in the order in which they were started."""
        return tuple(group for group, state in self._states.items() if state in states)

    def begin_step(self, lags: Mapping[int, int]) -> StepStart:
        """Begin a step. No group may be stopping. The step before may have been cancelled.

        Args:
            lags: for each group with tokens, the number of versions that its oldest token is behind.
        """
        self._is_stepping = True
        self._num_failed = 0
        dropped = tuple(
            group
            for group in self.having(GroupState.STOPPED, GroupState.COMPLETE)
            if self.max_lag is not None and lags.get(group, 0) > self.max_lag
        )
        for group in dropped:
            self.drop(group)
        if self.is_over:
            return StepStart(dropped, ())
        return StepStart(dropped, self.having(GroupState.STOPPED))

    @property
    def num_to_start(self) -> int:
        """The number of new groups that the step should start now, if there are prompts."""
        return self._limit - len(self._states) if self._is_stepping and self._has_prompts and not self.is_over else 0

    @property
    def is_over(self) -> bool:
        """True if the step is over: it has its groups, no more groups can complete, or too many failed."""
        if len(self._complete) >= self._need or self._num_failed >= self._limit:
            return True
        return not self._has_prompts and len(self._complete) == len(self._states)

    def start(self, group: int) -> None:
        """Add a new group whose requests the caller sends."""
        self._states[group] = GROUP.initial

    def end_prompts(self) -> None:
        """Start no more groups, because no prompts are left."""
        self._has_prompts = False

    def complete(self, group: int) -> None:
        """Record that all answers of a running group have finished."""
        self._move(group, GroupEvent.COMPLETED)
        self._complete[group] = None

    def interrupt(self, group: int) -> bool:
        """Record that no request of a group is in flight and some answers are open.

        Return True if the step continues the group now. This is the case if a step did not stop the group: for
        example, if a pause of the fleet aborted its requests.
        """
        was_stopping = self._states[group] is GroupState.STOPPING
        self._move(group, GroupEvent.INTERRUPTED)
        return self._is_stepping and not was_stopping

    def resume(self, group: int) -> None:
        """Record that the caller requests the open answers of a stopped group."""
        self._move(group, GroupEvent.CONTINUED)

    def fail(self, group: int) -> None:
        """Remove a group with a failed answer. None of its requests is in flight."""
        self._move(group, GroupEvent.FAILED)
        self._num_failed += 1

    def drop(self, group: int) -> None:
        """Remove a group. None of its requests is in flight."""
        self._move(group, GroupEvent.DROPPED)

    def stop(self) -> tuple[int, ...]:
        """End the step: start and continue no more groups. Return the running groups, which are stopping now."""
        self._is_stepping = False
        running = self.having(GroupState.RUNNING)
        for group in running:
            self._move(group, GroupEvent.STOPPED)
        return running

    def pop_step(self) -> tuple[int, ...]:
        """Return the groups of the step that has ended, and remove them."""
        taken = tuple(self._complete)[: self._need]
        for group in taken:
            self._move(group, GroupEvent.TAKEN)
        return taken

    def _move(self, group: int, event: GroupEvent) -> None:
        state = GROUP.next(self._states[group], event)
        self._complete.pop(group, None)
        self._states[group] = state
        if state in GROUP.final:
            del self._states[group]
