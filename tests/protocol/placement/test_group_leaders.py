"""Who leads a group of requests, who follows, and what is left when one of them goes."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.placement.group_leaders import GroupLeaders


def led(*followers: str) -> GroupLeaders[str]:
    """Group 1, which `a` leads."""
    leaders: GroupLeaders[str] = GroupLeaders()
    leaders.add_leader(1, "a")
    for follower in followers:
        assert leaders.follow(1, follower, 8)
    return leaders


def test_a_leader_returns_its_followers_in_order_once() -> None:
    """When a worker has admitted it, or when it has ended."""
    leaders = led("b", "c")
    assert ("b" in leaders, "a" in leaders, leaders.leads("a"), len(leaders)) == (True, False, True, 2)
    assert leaders.remove("a") == ["b", "c"]
    assert leaders.remove("a") == []
    assert (len(leaders), "b" in leaders, leaders.follow(1, "b", 8)) == (0, False, False)


def test_a_follower_that_ends_is_forgotten() -> None:
    """The others still follow."""
    leaders = led("b", "c")
    assert leaders.remove("b") == []
    assert leaders.remove("a") == ["c"]


def test_a_leader_with_enough_followers_takes_no_more() -> None:
    """The next one leads those that come later; each leader keeps its own."""
    leaders = led("b", "c")
    assert not leaders.follow(1, "d", 2)
    leaders.add_leader(1, "d")
    assert leaders.follow(1, "e", 2)
    assert leaders.remove("a") == ["b", "c"]
    assert leaders.follow(1, "f", 2)
    assert leaders.remove("d") == ["e", "f"]


def test_other_groups_do_not_follow() -> None:
    """Each group has a leader of its own."""
    assert not led().follow(2, "x", 8)


@given(st.lists(st.tuples(st.sampled_from(["lead", "follow", "remove"]), st.integers(0, 2), st.integers(0, 9))))
def test_nobody_follows_a_leader_that_is_gone(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens, each follower is returned by its leader or was removed itself."""
    leaders: GroupLeaders[int] = GroupLeaders()
    following: set[int] = set()
    leading: set[int] = set()
    for step, group, key in steps:
        if step == "remove":
            returned = leaders.remove(key)
            assert following.issuperset(returned)
            following -= {key, *returned}
            leading.discard(key)
        elif key in following | leading:
            continue
        elif step == "lead":
            leaders.add_leader(group, key)
            leading.add(key)
        elif leaders.follow(group, key, 3):
            following.add(key)
        assert len(leaders) == len(following)
    for key in sorted(leading):
        following.difference_update(leaders.remove(key))
    assert not following
