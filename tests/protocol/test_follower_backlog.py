"""The followers that wait at a worker: who may wait, in which order they begin, and for how long they wait."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.follower_backlog import MAX_FOLLOWERS, MAX_GROUPS, STALLED_S, FollowerBacklog
from rollbus.schemas.request import Lane

EMPTY = ()
HIGH: tuple[Lane, ...] = ("high",)
NORMAL: tuple[Lane, ...] = ("normal",)


def backlog(*groups: str) -> FollowerBacklog[str]:
    """A backlog where the leaders of these groups of client `c` had their turn."""
    made: FollowerBacklog[str] = FollowerBacklog()
    for group in groups:
        made.add_leader("c", group)
    return made


def test_nothing_follows_without_a_leader_that_had_its_turn() -> None:
    """Else a client would pass the queue; another client's group of the same name is another group."""
    made = backlog("g")
    assert not made.admit("c", "h", capacity=8)
    assert not made.admit("d", "g", capacity=8)
    assert made.admit("c", "g", capacity=8)


def test_a_leader_has_so_many_followers() -> None:
    """The next ones need a leader that waits for its turn again."""
    made = backlog("g", "g")
    assert sum(made.admit("c", "g", capacity=1000) for _ in range(100)) == MAX_FOLLOWERS
    made.add_leader("c", "g")
    assert made.admit("c", "g", capacity=1)


def test_a_full_backlog_takes_none() -> None:
    """What is refused for want of room is not counted: it may come again."""
    made = backlog("g")
    assert not made.admit("c", "g", capacity=0)
    assert sum(made.admit("c", "g", capacity=1000) for _ in range(100)) == MAX_FOLLOWERS


def test_leaders_are_forgotten_in_order() -> None:
    """However many groups there are, so many are remembered."""
    made = backlog(*(f"g{i}" for i in range(MAX_GROUPS + 1)))
    assert not made.admit("c", "g0", capacity=8)
    assert made.admit("c", "g1", capacity=8)


def test_followers_begin_in_order_but_behind_more_urgent_requests_of_the_queue() -> None:
    """Requests of lane high in the queue go first, and such followers do not wait for them."""
    made = backlog("g")
    for key, lane in (("low", "low"), ("normal", "normal"), ("high", "high")):
        made.add(key, lane, 0.0)  # type: ignore[arg-type]
    assert (made.num_due(HIGH), made.num_due(NORMAL), made.num_due(None), made.num_due(EMPTY)) == (1, 2, 3, 3)
    assert made.pop(HIGH, 0.0) == "high"
    assert made.pop((*HIGH, *NORMAL), 0.0) is None
    assert made.pop(NORMAL, 0.0) == "normal"
    assert made.pop(NORMAL, 0.0) is None
    assert made.pop(None, 0.0) == "low"
    assert made.pop(EMPTY, 0.0) is None


def test_followers_wait_while_others_of_them_begin() -> None:
    """Each that begins shows that slots become free; without one, those that came long ago are let go."""
    made = backlog("g")
    for i in range(3):
        made.add(f"{i}", "normal", 0.0)
    assert made.pop(EMPTY, STALLED_S - 0.1) == "0"
    made.add("late", "normal", STALLED_S)
    assert made.pop_stalled(STALLED_S + 0.1) == []
    assert made.pop_stalled(2 * STALLED_S - 0.1) == ["1", "2"]
    assert made.pop_stalled(2 * STALLED_S) == ["late"]
    assert made.pop_all() == []


def test_the_mean_of_followers_is_that_of_late() -> None:
    """Groups of eight teach it seven, and requests without a group zero."""
    made = backlog()
    for _ in range(100):
        made.add_leader("c", "g")
        for _ in range(7):
            made.admit("c", "g", capacity=8)
    assert 6 < made.mean_followers < 8
    for _ in range(100):
        made.add_leader("c", "alone")
    assert made.mean_followers < 0.1


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop", "stall"]), st.integers(0, 9)), max_size=60))
def test_each_follower_leaves_once(steps: list[tuple[str, int]]) -> None:
    """What waits begins, is let go, or is removed: one of these, and nothing else is left behind."""
    made = backlog("g")
    waiting: list[str] = []
    for number, (step, chosen) in enumerate(steps):
        now = float(number)
        match step:
            case "add":
                made.add(f"{number}", "normal", now)
                waiting.append(f"{number}")
            case "remove":
                gone = waiting[chosen : chosen + 1]
                made.remove([*gone, "unknown"])
                waiting = [key for key in waiting if key not in gone]
            case "pop":
                assert made.pop(EMPTY, now) == (waiting.pop(0) if waiting else None)
            case _:
                stalled = made.pop_stalled(now)
                assert waiting[: len(stalled)] == stalled
                del waiting[: len(stalled)]
        assert len(made) == len(waiting) == made.num_due(None)
    assert made.pop_all() == waiting
