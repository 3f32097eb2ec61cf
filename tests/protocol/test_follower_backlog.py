"""The followers that wait at a worker: which followers may wait, their order, and their maximum wait."""

from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.fairness import FOLLOW_S, MAX_FOLLOWERS, MAX_GROUPS, STALLED_S, Begun, FollowerBacklog
from rollbus.schemas.request import Lane

EMPTY = ()
HIGH: tuple[Lane, ...] = ("high",)
NORMAL: tuple[Lane, ...] = ("normal",)


def lead(made: FollowerBacklog[str], group: str) -> None:
    """Let a request of client `c` lead a group from a queue without further requests."""
    made.add_queued("c", group, "normal", 0.0, num_waiting=0)


def backlog(*groups: str) -> FollowerBacklog[str]:
    """Return a backlog in which the leaders of these groups had their turn."""
    made: FollowerBacklog[str] = FollowerBacklog()
    for group in groups:
        lead(made, group)
    return made


def admits(  # noqa: PLR0913
    made: FollowerBacklog[str],
    client: str = "c",
    group: str = "g",
    *,
    lane: Lane = "normal",
    waiting: tuple[Lane, ...] | None = EMPTY,
    now: float = 0.0,
    capacity: int = 1000,
) -> bool:
    """Return True if the backlog accepts one more follower."""
    return made.admit(client, group, lane, waiting, now, capacity=capacity) is not None


def popped(made: FollowerBacklog[str], waiting: tuple[Lane, ...] | None, now: float = 0.0) -> str | None:
    """Return the follower that gets a slot reserved for requests of the queue."""
    begun = made.pop(waiting, 0, now)
    return None if begun is None else begun.key


def test_a_follower_needs_a_leader_that_had_its_turn() -> None:
    """A follower needs a leader that had its turn, so that no client bypasses the queue.

    A group belongs to one client and one lane.
    """
    made = backlog("g")
    assert not admits(made, group="h")
    assert not admits(made, "d")
    assert not admits(made, lane="high")
    assert admits(made)


def test_the_number_of_followers_per_leader_is_limited() -> None:
    """The number of followers per leader is limited. More followers need a leader that has another turn."""
    made = backlog("g", "g")
    assert sum(admits(made) for _ in range(100)) == MAX_FOLLOWERS
    lead(made, "g")
    assert admits(made, capacity=1)


def test_a_follower_that_a_full_backlog_rejects_may_return() -> None:
    """A follower rejected by a full backlog does not count towards its leader's limit and may return."""
    made = backlog("g")
    assert not admits(made, capacity=0)
    assert sum(admits(made) for _ in range(100)) == MAX_FOLLOWERS


def test_followers_of_a_leader_must_arrive_within_a_time_limit() -> None:
    """A leader's followers must arrive within a time limit, so that a client cannot save up turns."""
    made = backlog("g")
    assert admits(made, now=FOLLOW_S - 0.01)
    assert not admits(made, now=FOLLOW_S)


def test_followers_of_placed_requests_are_accepted_only_while_the_queue_is_empty() -> None:
    """Followers of placed requests are accepted only while no request waits in the queue.

    Waiting ones use the turns of placed requests.
    """
    made = backlog()
    made.add_placed("c", "g", "normal", 0.0)
    assert not admits(made, waiting=NORMAL)
    assert not admits(made, waiting=None)
    assert admits(made, waiting=EMPTY)
    for key, turn in (("placed", "placed"), ("more", "placed"), ("queued", "queued")):
        made.add(key, "c", "normal", turn, 0.0)  # type: ignore[arg-type]
    assert [made.num_due(NORMAL, turns) for turns in (0, 1, 2, 8)] == [1, 2, 3, 3]
    assert made.pop(NORMAL, 0, 0.0) == Begun("queued", "c", "queued")
    assert made.pop(NORMAL, 0, 0.0) is None
    assert made.pop(NORMAL, 1, 0.0) == Begun("placed", "c", "placed")


def test_the_backlog_removes_the_oldest_groups_first() -> None:
    """The backlog remembers a limited number of groups and removes the oldest."""
    made = backlog(*(f"g{i}" for i in range(MAX_GROUPS + 1)))
    assert not admits(made, group="g0")
    assert admits(made, group="g1")


def test_followers_begin_in_order_but_behind_more_urgent_requests_of_the_queue() -> None:
    """Followers begin in order of lane. Requests of a higher lane in the queue go before followers of a lower lane."""
    made = backlog("g")
    for key, lane in (("low", "low"), ("normal", "normal"), ("high", "high")):
        made.add(key, "c", lane, "queued", 0.0)  # type: ignore[arg-type]
    assert [made.num_due(waiting, 0) for waiting in (HIGH, NORMAL, None, EMPTY)] == [1, 2, 3, 3]
    assert popped(made, HIGH) == "high"
    assert popped(made, (*HIGH, *NORMAL)) is None
    assert popped(made, NORMAL) == "normal"
    assert popped(made, NORMAL) is None
    assert popped(made, None) == "low"
    assert popped(made, EMPTY) is None


def test_followers_wait_while_other_followers_begin() -> None:
    """Followers wait as long as others begin, because this shows that slots become free.

    Without progress, the oldest are released.
    """
    made = backlog("g")
    for i in range(3):
        made.add(f"{i}", "c", "normal", "queued", 0.0)
    assert popped(made, EMPTY, STALLED_S - 0.1) == "0"
    made.add("late", "c", "normal", "queued", STALLED_S)
    assert made.pop_stalled(STALLED_S + 0.1) == []
    assert made.pop_stalled(2 * STALLED_S - 0.1) == ["1", "2"]
    assert made.pop_stalled(2 * STALLED_S) == ["late"]
    assert made.pop_all() == []


def test_blocked_followers_are_released_although_those_of_another_lane_begin() -> None:
    """Followers that requests of a higher lane hold back are released, even if followers of another lane begin."""
    made = backlog("g")
    made.add("low", "c", "low", "queued", 0.0)
    made.add("normal", "c", "normal", "queued", 0.0)
    assert popped(made, NORMAL, STALLED_S - 0.1) == "normal"
    assert made.pop_stalled(STALLED_S) == ["low"]


def test_the_mean_number_of_followers_tracks_recent_leaders() -> None:
    """The mean number of followers tracks recent leaders: about seven for groups of eight, and zero without groups."""
    made = backlog()
    for _ in range(100):
        lead(made, "g")
        for _ in range(7):
            admits(made, capacity=8)
    assert 6 < made.mean_followers < 8
    for _ in range(100):
        lead(made, "alone")
    assert made.mean_followers < 0.1


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop", "stall"]), st.integers(0, 9)), max_size=60))
def test_each_waiting_follower_leaves_exactly_once(steps: list[tuple[str, int]]) -> None:
    """Each waiting follower leaves exactly once: it begins, is released, or is removed."""
    made = backlog("g")
    waiting: list[str] = []
    for number, (step, chosen) in enumerate(steps):
        now = float(number)
        match step:
            case "add":
                made.add(f"{number}", "c", "normal", "queued", now)
                waiting.append(f"{number}")
            case "remove":
                gone = waiting[chosen : chosen + 1]
                made.remove([*gone, "unknown"])
                waiting = [key for key in waiting if key not in gone]
            case "pop":
                assert popped(made, EMPTY, now) == (waiting.pop(0) if waiting else None)
            case _:
                stalled = made.pop_stalled(now)
                assert waiting[: len(stalled)] == stalled
                del waiting[: len(stalled)]
        assert len(made) == len(waiting) == made.num_due(None, 0)
    assert made.pop_all() == waiting
