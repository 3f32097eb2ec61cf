"""Requests that wait for the worker of the first of their group: each waits once, for a bounded time."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollbus.bus.protocol.placement.followers import FOLLOW_S, Followers


def group_of(*followers: str) -> Followers[str]:
    """A group with the leader `first`, whose followers came at 0."""
    group: Followers[str] = Followers()
    group.lead("g", "first")
    for key in followers:
        group.follow("first", key, 0)
    return group


def test_followers_are_released_in_order_and_once() -> None:
    """When the leader has a token or is gone, all that follow it go on, and the group has no leader any more."""
    group = group_of("a", "b", "c")
    group.remove("b")
    assert group.release("a") == []
    assert group.release("first") == ["a", "c"]
    assert group.release("first") == []
    assert (group.leader("g"), len(group), "a" in group) == (None, 0, False)


def test_a_wait_is_bounded() -> None:
    """Nobody follows for longer than the limit; the others go on waiting."""
    group = group_of("a")
    group.follow("first", "b", 1)
    assert group.pop_late(FOLLOW_S - 0.1) == []
    assert group.pop_late(FOLLOW_S) == [("a", "first")]
    assert "b" in group
    assert group.release("first") == ["b"]


class Groups(RuleBasedStateMachine):
    """Three groups whose requests come, get tokens, go and wait too long in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.followers: Followers[int] = Followers()
        self.now = 0.0
        self.num_added = 0
        self.leaders: dict[str, int] = {}
        self.waiting: dict[int, tuple[int, float]] = {}

    @rule(group=st.sampled_from("abc"))
    def add(self, group: str) -> None:
        """A request comes: it leads its group or follows."""
        key, self.num_added = self.num_added, self.num_added + 1
        leader = self.followers.leader(group)
        assert leader == self.leaders.get(group)
        if leader is None:
            self.followers.lead(group, key)
            self.leaders[group] = key
        else:
            self.followers.follow(leader, key, self.now)
            self.waiting[key] = leader, self.now + FOLLOW_S

    @precondition(lambda self: self.leaders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A leader has a token, or is gone."""
        group = data.draw(st.sampled_from(sorted(self.leaders)))
        leader = self.leaders.pop(group)
        expected = [key for key, (other, _) in self.waiting.items() if other == leader]
        assert self.followers.release(leader) == expected
        for key in expected:
            del self.waiting[key]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """The caller of a follower leaves."""
        key = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[key]
        self.followers.remove(key)

    @rule(seconds=st.sampled_from([0.1, 0.5, FOLLOW_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        late = [(key, leader) for key, (leader, until) in self.waiting.items() if until <= self.now]
        assert self.followers.pop_late(self.now) == late
        for key, _ in late:
            del self.waiting[key]

    @invariant()
    def holds_what_waits(self) -> None:
        """Nobody is forgotten, and nobody is kept."""
        assert len(self.followers) == len(self.waiting)
        assert all(key in self.followers for key in self.waiting)


TestGroups = Groups.TestCase
