"""Which requests of a group lead, follow or wait, and what happens when one of them ends."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.placement import GroupLeaders


def led(*followers: str) -> GroupLeaders[str]:
    """Return a table in which `a` leads group 1."""
    leaders: GroupLeaders[str] = GroupLeaders()
    leaders.add_leader(1, "a", "normal")
    for follower in followers:
        assert not leaders.add(1, follower, "normal", 8)
    return leaders


def test_a_leader_returns_its_followers_in_order_once() -> None:
    """A removed leader returns its followers once and in order.

    A leader is removed when a worker has accepted it or when it has ended.
    """
    leaders = led("b", "c")
    assert ("b" in leaders, "a" in leaders, leaders.leads("a"), len(leaders)) == (True, False, True, 2)
    assert leaders.remove("a") == ["b", "c"]
    assert leaders.remove("a") == []
    assert (len(leaders), "b" in leaders, leaders.add(1, "b", "normal", 8)) == (0, False, True)


def test_the_request_after_the_last_follower_of_a_leader_is_the_next_leader() -> None:
    """If a leader has its maximum of followers, the next request leads later requests.

    Each leader keeps its own followers.
    """
    leaders = led("b", "c")
    assert leaders.add(1, "d", "normal", 2)
    assert not leaders.add(1, "e", "normal", 2)
    assert leaders.remove("a") == ["b", "c"]
    assert not leaders.add(1, "f", "normal", 2)
    assert leaders.remove("d") == ["e", "f"]


def test_each_group_has_its_own_leader() -> None:
    """Each group has its own leader."""
    assert led().add(2, "x", "normal", 8)


def test_followers_count_towards_the_limit_of_requests_ahead_in_a_lane() -> None:
    """Followers count towards the limit of requests ahead in a lane.

    Groups beyond the limit wait in order until requests are removed. Other lanes are not affected.
    """
    leaders: GroupLeaders[str] = GroupLeaders(max_ahead=3)
    assert [leaders.add(1, key, "normal", 8) for key in ("a1", "a2", "a3", "a4")] == [True, False, False, False]
    assert [leaders.add(2, key, "normal", 8) for key in ("b1", "b2")] == [False, False]
    assert leaders.add(3, "c1", "normal", 8) is False
    assert leaders.add(4, "d1", "high", 8)
    assert (len(leaders), leaders.has_due, leaders.pop_due(), "b1" in leaders) == (6, False, [], True)

    assert leaders.remove("b2") == []
    assert leaders.remove("a1") == ["a2", "a3", "a4"]
    assert (leaders.has_due, leaders.pop_due()) == (True, ["b1", "c1"])
    assert (len(leaders), leaders.leads("b1"), leaders.has_due) == (0, True, False)


Steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "pop"]), st.integers(0, 2), st.integers(0, 9)), max_size=60
)


@given(Steps, st.integers(1, 6))
def test_every_request_leads_follows_or_waits_and_is_returned_exactly_once(
    steps: list[tuple[str, int, int]], most: int
) -> None:
    """After any steps, a lane has at most `most` leaders. Finally every request is returned exactly once."""
    leaders: GroupLeaders[int] = GroupLeaders(most)
    leading: set[int] = set()
    others: set[int] = set()
    for step, group, key in steps:
        if step == "remove":
            returned = leaders.remove(key)
            assert others.issuperset(returned)
            others -= {key, *returned}
            leading.discard(key)
        elif step == "pop":
            due = leaders.pop_due()
            assert others.issuperset(due)
            others -= set(due)
            leading |= set(due)
        elif key not in leading | others:
            (leading if leaders.add(group, key, "normal", 3) else others).add(key)
        assert len(leaders) == len(others)
        assert len(leading) <= most
    while leading or others:
        for key in sorted(leading):
            others.difference_update(leaders.remove(key))
        leading = set(leaders.pop_due())
        others -= leading
    assert (len(leaders), leaders.has_due) == (0, False)
