"""Which groups of answers run in a step of a trainer, and which of them it takes, stops, continues and drops.

A step begins with the groups that the step before has left, and starts new ones until `limit` are there. It is over
when `need` groups are complete: these are taken, oldest completion first, and all that run are stopped. A stopped group
stays: the next step continues it, unless it is too old by then. A group that completes while it is stopped, or beyond
`need`, belongs to the next step. So nothing that was generated is lost, except by age.

Invariant: at most `limit` groups are known at any time, and a step takes at most `need`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .states import GROUP, GroupEvent, GroupState

__all__ = ["GroupPlanner", "StepStart"]


@dataclass(frozen=True, slots=True)
class StepStart:
    """What a step does first with the groups of the step before."""

    dropped: tuple[int, ...]
    """They are older than the trainer allows; nothing of them is in flight."""
    continued: tuple[int, ...]
    """Their open answers are to be requested, in this order, before any group is started."""


class GroupPlanner:
    """The groups of one trainer, by numbers that the caller gives them.

    Args:
        need: groups that a step takes.
        limit: groups that are known at once, `need` or more.
        max_lag: by how many versions the oldest token of a group may be behind when a step begins; None: any number.
    """

    def __init__(self, *, need: int, limit: int, max_lag: int | None) -> None:
        self._need = need
        self._limit = limit
        self.max_lag = max_lag
        self._states: dict[int, GroupState] = {}
        # In the order in which they completed.
        self._complete: dict[int, None] = {}
        self._num_failed = 0
        self._is_stepping = False
        self._has_prompts = True

    def __repr__(self) -> str:
        """One line with counts."""
        states = [*self._states.values()]
        counts = " ".join(f"{state}={states.count(state)}" for state in dict.fromkeys(states))
        return f"<GroupPlanner need={self._need} limit={self._limit}{' ' if counts else ''}{counts}>"

    def having(self, *states: GroupState) -> tuple[int, ...]:
        """The groups in one of these states, in the order in which they were started."""
        return tuple(group for group, state in self._states.items() if state in states)

    def begin_step(self, lags: Mapping[int, int]) -> StepStart:
        """Begin a step, when no group is stopping; also after a step that was given up in the midst.

        Args:
            lags: of groups with tokens, how many versions the oldest of them is behind.
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
        """New groups that the step should start now, if there are prompts."""
        return self._limit - len(self._states) if self._is_stepping and self._has_prompts and not self.is_over else 0

    @property
    def is_over(self) -> bool:
        """True if the step needs to wait no longer: it has its groups, nothing more can come, or too many failed."""
        if len(self._complete) >= self._need or self._num_failed >= self._limit:
            return True
        return not self._has_prompts and len(self._complete) == len(self._states)

    def start(self, group: int) -> None:
        """Know a new group, whose requests are being sent."""
        self._states[group] = GROUP.initial

    def end_prompts(self) -> None:
        """Start no more: there are no prompts left."""
        self._has_prompts = False

    def complete(self, group: int) -> None:
        """All answers of a group that ran have ended by themselves."""
        self._move(group, GroupEvent.COMPLETED)
        self._complete[group] = None

    def interrupt(self, group: int) -> bool:
        """Nothing of a group is in flight, and some answers are open; return True if the step is to continue it now.

        So it is when the group was not stopped by a step: by a pause of the fleet that aborts, for example.
        """
        was_stopping = self._states[group] is GroupState.STOPPING
        self._move(group, GroupEvent.INTERRUPTED)
        return self._is_stepping and not was_stopping

    def resume(self, group: int) -> None:
        """The open answers of a stopped group are being requested."""
        self._move(group, GroupEvent.CONTINUED)

    def fail(self, group: int) -> None:
        """Forget a group of which an answer failed, and nothing is in flight."""
        self._move(group, GroupEvent.FAILED)
        self._num_failed += 1

    def drop(self, group: int) -> None:
        """Forget a group of which nothing is in flight."""
        self._move(group, GroupEvent.DROPPED)

    def stop(self) -> tuple[int, ...]:
        """End the step: start and continue nothing more; return the groups that run, which are now stopping."""
        self._is_stepping = False
        running = self.having(GroupState.RUNNING)
        for group in running:
            self._move(group, GroupEvent.STOPPED)
        return running

    def take(self) -> tuple[int, ...]:
        """Return the groups of the step that has ended, and forget them."""
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
