"""Decides which groups of answers run in a step of a trainer, and which groups a step returns, stops or drops.

A step begins with the groups that the previous step has left, and starts new groups until `limit` groups exist. The
step is over when `need` groups are complete. It returns these groups, in the order of their completion, and stops all
running groups. The next step continues a stopped group, unless the group is too old by then. A group that completes
while it is stopped, or beyond `need`, belongs to the next step. So generated tokens are lost only through age.

Invariant: at most `limit` groups are known at any time, and a step returns at most `need`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .states import GROUP, GroupEvent, GroupState


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
        """Return one line with counts."""
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
