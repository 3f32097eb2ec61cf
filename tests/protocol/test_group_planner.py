"""Which groups a step takes, interrupts, continues and drops, under any order of events."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollbus.bus.protocol.groups import GROUP, GroupEvent, GroupPlanner, GroupState
from rollbus.schemas.errors import LocalProtocolError

RUNNING, STOPPING, STOPPED, COMPLETE = (
    GroupState.RUNNING,
    GroupState.STOPPING,
    GroupState.STOPPED,
    GroupState.COMPLETE,
)


class GroupPlannerMachine(RuleBasedStateMachine):
    """A trainer that runs steps while its groups end, fail and are interrupted at any time."""

    @initialize(need=st.integers(1, 4), more=st.integers(0, 4), max_lag=st.none() | st.integers(0, 2))
    def begin(self, need: int, more: int, max_lag: int | None) -> None:
        self.planner = GroupPlanner(need=need, limit=need + more, max_lag=max_lag)
        self.need, self.limit, self.max_lag = need, need + more, max_lag
        self.num_started = 0
        self.ended = Counter[str]()
        self.completed: list[int] = []
        self.is_stepping = False
        self.has_prompts = True

    def any_of(self, data: st.DataObject, *states: GroupState) -> int:
        groups: tuple[int, ...] = self.planner.having(*states)
        group: int = data.draw(st.sampled_from(groups))
        return group

    @precondition(lambda self: not self.planner.having(STOPPING))
    @rule(data=st.data())
    def begin_step(self, data: st.DataObject) -> None:
        idle = self.planner.having(STOPPED, COMPLETE)
        lags = {group: data.draw(st.integers(0, 4)) for group in idle}
        start = self.planner.begin_step(lags)
        self.is_stepping = True
        old = {group for group in idle if self.max_lag is not None and lags[group] > self.max_lag}
        assert set(start.dropped) == old
        self.ended["dropped"] += len(old)
        self.completed = [group for group in self.completed if group not in old]
        # A step that starts with enough complete groups continues no group.
        stopped = () if len(self.completed) >= self.need else self.planner.having(STOPPED)
        assert start.continued == stopped
        for group in start.continued:
            self.planner.resume(group)

    @precondition(lambda self: self.planner.num_to_start)
    @rule()
    def start(self) -> None:
        assert self.is_stepping
        assert self.has_prompts
        self.planner.start(self.num_started)
        self.num_started += 1

    @precondition(lambda self: self.planner.having(RUNNING, STOPPING))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        group = self.any_of(data, RUNNING, STOPPING)
        self.planner.complete(group)
        self.completed.append(group)

    @precondition(lambda self: self.planner.having(RUNNING, STOPPING))
    @rule(data=st.data())
    def interrupt(self, data: st.DataObject) -> None:
        group = self.any_of(data, RUNNING, STOPPING)
        was_running = group in self.planner.having(RUNNING)
        assert self.planner.interrupt(group) == (was_running and self.is_stepping)

    @precondition(lambda self: self.planner.having(STOPPED))
    @rule(data=st.data())
    def continue_one(self, data: st.DataObject) -> None:
        if self.is_stepping:
            self.planner.resume(self.any_of(data, STOPPED))

    @precondition(lambda self: self.planner.having(RUNNING, STOPPING, STOPPED))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.planner.fail(self.any_of(data, RUNNING, STOPPING, STOPPED))
        self.ended["failed"] += 1

    @rule()
    def end_prompts(self) -> None:
        self.planner.end_prompts()
        self.has_prompts = False

    @precondition(lambda self: self.is_stepping)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        running = self.planner.having(RUNNING)
        assert self.planner.stop() == running
        self.is_stepping = False
        completes = data.draw(st.booleans())
        if running and completes:
            # A group completes at the moment of the stop.
            self.planner.complete(running[0])
            self.completed.append(running[0])
        taken = self.planner.pop_step()
        assert list(taken) == self.completed[: self.need]
        del self.completed[: self.need]
        self.ended["taken"] += len(taken)

    @invariant()
    def each_started_group_is_counted_once(self) -> None:
        """Assert that each started group is known, or was taken, dropped or failed exactly once."""
        if not hasattr(self, "planner"):
            return
        known = self.planner.having(*GroupState)
        assert len(known) <= self.limit
        assert len(known) + sum(self.ended.values()) == self.num_started
        assert sorted(self.planner.having(COMPLETE)) == sorted(self.completed)

    @invariant()
    def an_unfinished_step_has_a_next_action(self) -> None:
        """Assert that a step that is not over can start, run or continue a group."""
        if hasattr(self, "planner") and self.is_stepping and not self.planner.is_over:
            assert self.planner.num_to_start or self.planner.having(RUNNING, STOPPING, STOPPED)


TestGroupPlanner = GroupPlannerMachine.TestCase


def test_without_further_prompts_a_step_waits_for_all_running_groups() -> None:
    """Without further prompts, a step waits for all running groups, and the next step is empty."""
    planner = GroupPlanner(need=3, limit=4, max_lag=None)
    planner.begin_step({})
    planner.start(0)
    planner.start(1)
    planner.end_prompts()
    planner.complete(0)
    was_over = planner.is_over
    planner.complete(1)
    assert (was_over, planner.is_over) == (False, True)
    assert (planner.stop(), planner.pop_step()) == ((), (0, 1))
    planner.begin_step({})
    assert planner.is_over


def test_as_many_failures_as_concurrent_groups_end_a_step() -> None:
    """As many failures as groups may run at once end a step, so that prompts that always fail cannot block it."""
    planner = GroupPlanner(need=1, limit=2, max_lag=None)
    planner.begin_step({})
    for group in range(2):
        assert not planner.is_over
        planner.start(group)
        planner.fail(group)
    assert planner.is_over
    planner.begin_step({})
    assert planner.num_to_start == 2


def test_a_complete_group_cannot_be_continued_failed_or_interrupted() -> None:
    """A complete group cannot be continued, failed or interrupted."""
    for event in (GroupEvent.CONTINUED, GroupEvent.FAILED, GroupEvent.INTERRUPTED):
        with pytest.raises(LocalProtocolError):
            GROUP.next(COMPLETE, event)
