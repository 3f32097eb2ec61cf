"""The slots of a worker: turns of the queue and of placed requests, and the followers that share them."""

from collections import Counter, deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.fairness import (
    ASKED_S,
    FOLLOW_S,
    MAX_AHEAD,
    MAX_CLIENTS,
    MAX_FOLLOWERS,
    MAX_GROUPS,
    MAX_IN_TURN,
    MESSAGES_SEEN,
    STALLED_S,
    SlotRequest,
    SlotTurns,
    Turn,
)
from rollbus.schemas.request import Lane

CLIENTS = ("a", "b", "c")
EMPTY: tuple[Lane, ...] = ()
HIGH: tuple[Lane, ...] = ("high",)
NORMAL: tuple[Lane, ...] = ("normal",)
LANES = st.sampled_from(["high", "normal", "low"])
WAITING = st.sets(st.sampled_from(["resume", "high", "normal", "low"]), min_size=1).map(tuple)
CAPACITY = 64
SHARE = 1024
"""Number of messages that one client may have in a lane."""
FOLLOWER = SlotRequest("c", "normal", "g")


def place(
    turns: SlotTurns[str],
    client: str = "a",
    waiting: tuple[Lane, ...] | None = NORMAL,
    now: float = 0.0,
    *,
    lane: Lane = "normal",
    num_free: int = 1,
) -> bool:
    """Return True if a placed request without a group begins."""
    return turns.admit(SlotRequest(client, lane), waiting, num_free=num_free, capacity=0, now=now) == "now"


def pull(turns: SlotTurns[str], waiting: tuple[Lane, ...] | None = NORMAL, group: str = "g") -> None:
    """Let a request of client `c` from the queue have its turn. It may lead its group."""
    turns.count_queued(SlotRequest("c", "normal", group), waiting, 0.0, num_behind=0)


def led(*groups: str) -> SlotTurns[str]:
    """Return turns in which the leaders of these groups had their turn."""
    turns: SlotTurns[str] = SlotTurns()
    for group in groups:
        pull(turns, EMPTY, group)
    return turns


def follow(
    turns: SlotTurns[str],
    request: SlotRequest = FOLLOWER,
    waiting: tuple[Lane, ...] | None = EMPTY,
    now: float = 0.0,
    *,
    capacity: int = 1000,
) -> str | None:
    """Return the turn of one more follower, or None if it is rejected."""
    begins = turns.admit(request, waiting, num_free=0, capacity=capacity, now=now)
    assert begins != "now"
    return begins


def num_followers(turns: SlotTurns[str]) -> int:
    """Return how many of 100 followers may wait."""
    return sum(follow(turns) is not None for _ in range(100))


def add(turns: SlotTurns[str], key: str, lane: Lane = "normal", turn: Turn = "queued", now: float = 0.0) -> None:
    """Let an admitted follower wait."""
    turns.add(key, SlotRequest("c", lane), turn, now)


# Placed requests and the queue.


@pytest.mark.proves("P49")
@given(st.lists(st.just(None) | st.tuples(st.sampled_from(CLIENTS), LANES, WAITING)))
@example([("a", "normal", NORMAL)] * 2)
def test_while_queued_requests_wait_they_get_every_second_slot(
    events: list[tuple[str, Lane, tuple[Lane, ...]] | None],
) -> None:
    """At any time, at most one more placed request than queued requests was accepted, in any order of arrival."""
    turns: SlotTurns[str] = SlotTurns()
    num_placed = num_queued = in_turn = 0
    for event in events:
        if event is None:
            pull(turns)
            num_queued, in_turn = num_queued + 1, 0
            continue
        client, lane, waiting = event
        if place(turns, client, waiting, lane=lane, num_free=5):
            num_placed, in_turn = num_placed + 1, in_turn + 1
            assert "high" not in waiting
            assert not (lane == "low" and "normal" in waiting)
        assert num_placed <= num_queued + 1
        assert in_turn <= MAX_IN_TURN


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), LANES), max_size=50))
def test_with_an_empty_queue_placed_requests_get_every_free_slot(requests: list[tuple[str, Lane]]) -> None:
    """If the queue is empty, placed requests get every free slot, regardless of the requests accepted before."""
    turns: SlotTurns[str] = SlotTurns()
    place(turns)
    for client, lane in requests:
        assert place(turns, client, EMPTY, lane=lane)


@given(st.integers(1, 64), st.integers(1, 200))
def test_while_the_queue_is_unknown_half_of_the_free_slots_stay_free(num_slots: int, num_asked: int) -> None:
    """Before a worker knows the queue, placed requests get at most half of its free slots, and at least one."""
    turns: SlotTurns[str] = SlotTurns()
    free = num_slots
    for _ in range(num_asked):
        free -= place(turns, "a", None, num_free=free)

    assert free == max(num_slots - num_asked, num_slots // 2)


def test_while_the_queue_is_unknown_every_second_single_slot_is_for_the_queue() -> None:
    """While the queue is unknown and one slot is free at a time, every second slot is for the queue.

    The worker then pulls and learns the queue's state.
    """
    turns: SlotTurns[str] = SlotTurns()

    assert [place(turns, "a", None) for _ in range(3)] == [True, False, False]
    pull(turns, None)
    assert [place(turns, "a", None) for _ in range(2)] == [True, False]
    assert place(turns, "a", EMPTY)
    assert [place(turns, "a", None) for _ in range(2)] == [True, False]


@given(st.lists(st.sampled_from(["queued", *CLIENTS, *["a"] * 5]), max_size=300))
def test_no_client_gets_more_than_its_share_of_placed_requests(events: list[str]) -> None:
    """No client gets more than one placed request more than another, however often it asks."""
    turns: SlotTurns[str] = SlotTurns()
    for client in CLIENTS:
        place(turns, client)
    got: Counter[str] = Counter()
    for event in events:
        if event == "queued":
            pull(turns)
        elif place(turns, event):
            got[event] += 1
            counts = [got[client] for client in CLIENTS]
            assert max(counts) - min(counts) <= 1


def test_a_client_without_requests_keeps_no_share_from_other_clients() -> None:
    """A client keeps its share only while it asks. After that, the other clients get all placed requests."""
    turns: SlotTurns[str] = SlotTurns()
    assert place(turns, "flood")
    assert not place(turns, "other")
    pull(turns)
    assert place(turns, "flood")
    pull(turns)

    assert not place(turns, "flood", now=ASKED_S / 2)
    assert place(turns, "flood", now=ASKED_S)


def test_a_new_client_does_not_catch_up_on_earlier_requests() -> None:
    """A new client gets the same share as the others from now on, and does not catch up on earlier requests."""
    turns: SlotTurns[str] = SlotTurns()
    for _ in range(20):
        place(turns, "first")
        pull(turns)
    got: Counter[str] = Counter()
    for _ in range(20):
        for client in ("new", "first"):
            got[client] += place(turns, client)
        pull(turns)

    assert abs(got["new"] - got["first"]) <= 1


def test_the_number_of_known_clients_is_bounded() -> None:
    """The number of known clients is bounded, for placed requests and for those of the queue."""
    turns: SlotTurns[str] = SlotTurns()
    for number in range(3 * MAX_CLIENTS):
        place(turns, f"c{number}")
        turns.count_queued(SlotRequest(f"c{number}", "normal", "g"), NORMAL, 0.0, num_behind=MAX_AHEAD)

    assert len(turns._shares) == len(turns._slots) == MAX_CLIENTS


@pytest.mark.parametrize(
    ("lane", "waiting", "is_admitted"),
    [
        ("normal", ("high",), False),
        ("high", ("high",), False),
        ("normal", ("resume", "high"), False),
        ("low", ("normal",), False),
        ("low", ("low",), True),
        ("low", ("resume",), True),
        ("normal", ("low",), True),
        ("high", ("normal", "low"), True),
    ],
)
def test_queued_requests_of_lane_high_go_before_all_placed_requests(
    lane: Lane, waiting: tuple[Lane, ...], is_admitted: bool
) -> None:
    """Queued requests of lane high go before all placed requests.

    A placed request waits for queued requests of a higher lane.
    """
    assert place(SlotTurns(), "a", waiting, lane=lane, num_free=4) is is_admitted


# Leaders and followers.


def test_a_follower_needs_a_leader_that_had_its_turn() -> None:
    """A follower needs a leader that had its turn, so that no client bypasses the queue.

    A group belongs to one client and one lane.
    """
    turns = led("g")
    assert not follow(turns, SlotRequest("c", "normal", "h"))
    assert not follow(turns, SlotRequest("d", "normal", "g"))
    assert not follow(turns, SlotRequest("c", "high", "g"))
    assert not follow(turns, SlotRequest("c", "normal"))
    assert follow(turns) == "queued"


def test_the_number_of_followers_per_leader_is_limited() -> None:
    """The number of followers per leader is limited. More followers need a leader that has another turn.

    A follower that is rejected because too many wait does not count.
    """
    turns = led("g", "g")
    assert not follow(turns, capacity=0)
    assert num_followers(turns) == MAX_FOLLOWERS
    pull(turns)
    assert follow(turns, capacity=1)


def test_followers_of_a_leader_must_arrive_within_a_time_limit() -> None:
    """A leader's followers must arrive within a time limit, so that a client cannot save up turns."""
    turns = led("g")
    assert follow(turns, now=FOLLOW_S - 0.01)
    assert not follow(turns, now=FOLLOW_S)


def test_followers_of_placed_requests_are_accepted_only_while_the_queue_is_empty() -> None:
    """Followers of placed requests are accepted only while no request waits in the queue.

    Waiting ones use the turns of placed requests.
    """
    turns: SlotTurns[str] = SlotTurns()
    assert turns.admit(FOLLOWER, EMPTY, num_free=1, capacity=0, now=0.0) == "now"
    assert not follow(turns, waiting=NORMAL)
    assert not follow(turns, waiting=None)
    assert follow(turns) == "placed"
    for key, turn in (("placed", "placed"), ("more", "placed"), ("queued", "queued")):
        add(turns, key, turn=turn)  # type: ignore[arg-type]
    assert [turns.num_due(NORMAL, num_free) for num_free in (0, 1, 8)] == [0, 1, 2]
    assert turns.num_due(EMPTY, 8) == 3
    assert turns.pop(NORMAL, 8, 0.0) == "placed"
    assert turns.pop(NORMAL, 8, 0.0) == "queued"
    assert turns.pop(NORMAL, 8, 0.0) is None
    pull(turns)
    assert turns.pop(NORMAL, 8, 0.0) == "more"


def test_the_oldest_groups_are_removed_first() -> None:
    """A worker remembers a limited number of groups and removes the oldest."""
    turns = led(*(f"g{i}" for i in range(MAX_GROUPS + 1)))
    assert not follow(turns, SlotRequest("c", "normal", "g0"))
    assert follow(turns, SlotRequest("c", "normal", "g1"))


def test_followers_begin_in_order_but_behind_more_urgent_requests_of_the_queue() -> None:
    """Followers begin in order of lane. Requests of a higher lane in the queue go before followers of a lower lane."""
    turns = led("g")
    for lane in ("low", "normal", "high"):
        add(turns, lane, lane)
    assert [turns.num_due(waiting, 8) for waiting in (HIGH, NORMAL, None, EMPTY)] == [1, 2, 3, 3]
    popped = [turns.pop(waiting, 1, 0.0) for waiting in (HIGH, (*HIGH, *NORMAL), NORMAL, NORMAL, None, EMPTY)]
    assert popped == ["high", None, "normal", None, "low", None]


def test_followers_wait_while_other_followers_begin() -> None:
    """Followers wait as long as others begin, because this shows that slots become free.

    Without progress, the oldest are released.
    """
    turns = led("g")
    for i in range(3):
        add(turns, f"{i}")
    assert turns.pop(EMPTY, 1, STALLED_S - 0.1) == "0"
    add(turns, "late", now=STALLED_S)
    assert turns.pop_stalled(STALLED_S + 0.1) == []
    assert turns.pop_stalled(2 * STALLED_S - 0.1) == ["1", "2"]
    assert turns.pop_stalled(2 * STALLED_S) == ["late"]
    assert turns.pop_all() == []


def test_blocked_followers_are_released_although_those_of_another_lane_begin() -> None:
    """Followers that requests of a higher lane hold back are released, even if followers of another lane begin."""
    turns = led("g")
    add(turns, "low", "low")
    add(turns, "normal")
    assert turns.pop(NORMAL, 1, STALLED_S - 0.1) == "normal"
    assert turns.pop_stalled(STALLED_S) == ["low"]


def test_the_mean_number_of_followers_tracks_recent_leaders() -> None:
    """The mean number of followers tracks recent leaders: about seven for groups of eight, and zero without groups."""
    turns = led()
    for _ in range(100):
        pull(turns, EMPTY)
        for _ in range(7):
            follow(turns, capacity=8)
    assert 6 < turns.mean_followers < 8
    for _ in range(100):
        pull(turns, EMPTY, "alone")
    assert turns.mean_followers < 0.1


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop", "stall"]), st.integers(0, 9)), max_size=60))
def test_each_waiting_follower_leaves_exactly_once(steps: list[tuple[str, int]]) -> None:
    """Each waiting follower leaves exactly once: it begins, is released, or is removed."""
    turns = led("g")
    waiting: list[str] = []
    for number, (step, chosen) in enumerate(steps):
        now = float(number)
        match step:
            case "add":
                add(turns, f"{number}", now=now)
                waiting.append(f"{number}")
            case "remove":
                gone = waiting[chosen : chosen + 1]
                turns.remove([*gone, "unknown"])
                waiting = [key for key in waiting if key not in gone]
            case "pop":
                assert turns.pop(EMPTY, 1, now) == (waiting.pop(0) if waiting else None)
            case _:
                stalled = turns.pop_stalled(now)
                assert waiting[: len(stalled)] == stalled
                del waiting[: len(stalled)]
        assert len(turns) == len(waiting) == turns.num_due(None, 100)
    assert turns.pop_all() == waiting


def test_a_client_that_had_many_slots_long_ago_may_have_followers_again() -> None:
    """After enough messages of other clients, a client that had many slots may have followers again."""
    turns: SlotTurns[str] = SlotTurns()
    urgent = FOLLOWER._replace(lane="high")
    turns.count_queued(urgent, NORMAL, 0.0, num_behind=0)
    for _ in range(MESSAGES_SEEN):
        turns.count_queued(FOLLOWER, NORMAL, 0.0, num_behind=MAX_AHEAD)
        follow(turns)
    assert not follow(turns)
    assert follow(turns, urgent)
    for _ in range(MESSAGES_SEEN):
        turns.count_queued(SlotRequest("d", "normal", "h"), NORMAL, 0.0, num_behind=MAX_AHEAD)
    assert follow(turns)


# A worker with both.


class OneWorker:
    """A worker whose slots become free one by one, and a queue of messages with client and group."""

    def __init__(self, *messages: tuple[str, str]) -> None:
        self.turns: SlotTurns[tuple[str, str]] = SlotTurns()
        self.queue = deque(messages)
        self.got: list[tuple[str, str]] = []
        """Client and kind of each request that had a slot: `queue`, `placed` or `follower`."""
        self.num_offered = 0
        self.now = 0.0

    @property
    def waiting(self) -> tuple[Lane, ...]:
        """The lanes of the queue in which requests wait, as the worker knows them."""
        return NORMAL if self.queue else EMPTY

    def place(self, client: str, group: str | None, *, num_free: int) -> str | None:
        """Let a client place a request, and return the worker's answer."""
        request, left = SlotRequest(client, "normal", group), CAPACITY - len(self.turns)
        begins = self.turns.admit(request, self.waiting, num_free=num_free, capacity=left, now=self.now)
        if begins == "now":
            self.got.append((client, "placed"))
        elif begins is not None:
            self.num_offered += 1
            self.turns.add((client, f"{self.num_offered}"), request, begins, self.now)
        return begins

    def follow(self, client: str, group: str, num: int) -> None:
        """Let a client send requests that follow a group's leader."""
        while num > 0 and self.place(client, group, num_free=0) is not None:
            num -= 1

    def free_slot(self) -> tuple[str, str] | None:
        """Free a slot and give it to a follower or to the next request of the queue.

        Returns:
            Client and group of the request from the queue, or None if a follower got the slot.
        """
        self.now += 0.001
        if self.turns.num_due(self.waiting, 1):
            begun = self.turns.pop(self.waiting, 1, self.now)
            self.got.append((begun[0], "follower"))
            return None
        assert self.turns.pop(self.waiting, 1, self.now) is None
        if not self.queue:
            return None
        client, group = self.queue.popleft()
        request = SlotRequest(client, "normal", group)
        self.turns.count_queued(request, self.waiting, self.now, num_behind=len(self.queue))
        self.got.append((client, "queue"))
        return client, group


@pytest.mark.proves("P49")
@given(st.booleans(), st.sampled_from(["one", "each", "none"]))
def test_while_queued_requests_wait_placed_requests_get_every_second_slot(has_led: bool, groups: str) -> None:
    """A flood of placed requests gets one slot for each slot of the queue, regardless of its groups.

    Followers that have waited since the queue was empty use the same turns.
    """
    worker = OneWorker()
    if has_led:
        for number in range(CAPACITY):
            worker.place("m", f"g{number}", num_free=1)
            worker.follow("m", f"g{number}", 2)
    assert len(worker.turns) == (CAPACITY if has_led else 0)
    worker.got.clear()
    worker.queue.extend(("quiet", f"q{number}") for number in range(300))
    while worker.queue:
        for number in range(40):
            group = {"one": "g0", "each": f"g{number}", "none": None}[groups]
            if worker.place("m", group, num_free=0 if worker.turns else 1) == "now":
                break
        else:
            worker.free_slot()
        got = Counter(client for client, _ in worker.got)
        assert got["m"] <= got["quiet"] + 1
    assert got["m"] >= got["quiet"] - 1


def test_a_client_cannot_save_up_unused_slots_of_followers() -> None:
    """A client that led many groups without followers cannot use their follower slots later."""
    worker = OneWorker(*[("m", f"g{number}") for number in range(500)])
    while worker.queue:
        worker.free_slot()
    worker.now += FOLLOW_S
    worker.queue.append(("quiet", "q"))
    for number in range(500):
        worker.follow("m", f"g{number}", MAX_FOLLOWERS)
    assert worker.free_slot() == ("quiet", "q")


@pytest.mark.parametrize("refills", [True, False], ids=["keeps-its-share", "sends-once"])
@pytest.mark.parametrize("num_groups", [10_000, 1])
def test_followers_extend_the_full_share_of_a_client_only_a_few_times(num_groups: int, refills: bool) -> None:
    """A request behind another client's full share waits for a few times that share, not for 32 times.

    The followers of a group may be any requests: the worker counts them and does not compare their prompts.
    """
    worker = OneWorker(*[("m", f"g{number % num_groups}") for number in range(SHARE)])
    worker.queue.append(("quiet", "q"))
    for number in range(100_000):
        taken = worker.free_slot()
        if taken is None:
            continue
        client, group = taken
        if client == "quiet":
            break
        worker.follow("m", group, MAX_FOLLOWERS)
        if refills:
            worker.queue.append(("m", f"g{number % num_groups}"))
    got = Counter(worker.got)
    assert got["quiet", "queue"] == 1
    assert got["m", "queue"] == SHARE
    assert got["m", "follower"] <= (1.2 if refills else 8.5) * SHARE


@settings(max_examples=20)
@given(st.integers(1, 31), st.integers(1, 6))
def test_all_followers_of_a_client_that_counts_followers_in_its_share_are_accepted(
    num_followers: int, num_clients: int
) -> None:
    """A client that counts its followers in its share, as this library does, gets all of them accepted.

    Several such clients do not affect each other.
    """
    groups = SHARE // (1 + num_followers)
    clients = [f"c{number}" for number in range(num_clients)]
    worker = OneWorker(*[(client, f"g{number}") for number in range(groups) for client in clients])
    while worker.queue or worker.turns:
        taken = worker.free_slot()
        if taken is not None:
            worker.follow(*taken, num_followers)
    assert Counter(worker.got) == {
        (client, way): groups * (1 if way == "queue" else num_followers)
        for client in clients
        for way in ("queue", "follower")
    }


def test_rejected_followers_of_a_client_do_not_reduce_those_of_another_client() -> None:
    """A client whose followers are rejected does not reduce the followers of another client."""
    worker = OneWorker(*[("m", f"m{number}") for number in range(SHARE)])
    while len(worker.queue) > SHARE // 2:
        taken = worker.free_slot()
        if taken is not None:
            worker.follow("m", taken[1], MAX_FOLLOWERS)
    worker.queue.appendleft(("other", "g"))
    while worker.free_slot() != ("other", "g"):
        pass
    worker.follow("other", "g", 7)
    begun = [worker.free_slot() for _ in range(7)]
    assert begun == [None] * 7
    assert worker.got[-7:] == [("other", "follower")] * 7


@pytest.mark.proves("P49")
@given(st.lists(st.sampled_from(["turn", "freed", "new"]), max_size=80))
@example(["turn"] * 3 + ["freed"] * 6)
def test_waiting_turns_of_sessions_get_at_most_every_second_slot(events: list[str]) -> None:
    """While requests wait in the queue, no two slots in a row go to turns of sessions, and none is left unused."""
    turns: SlotTurns[str] = SlotTurns()
    given: list[str] = []
    for number, event in enumerate(events):
        if event == "turn":
            request = SlotRequest("a", "normal")
            if turns.keep(request, NORMAL, capacity=CAPACITY // 2 - len(turns), now=number) is not None:
                turns.add(f"{number}", request, "placed", number)
        elif event == "new":
            pull(turns)
            given.append("queue")
        elif turns.num_due(NORMAL, 1):
            assert turns.pop(NORMAL, 1, number) is not None
            given.append("session")
        else:
            assert turns.pop(NORMAL, 1, number) is None
            pull(turns)
            given.append("queue")
    for size in range(1, len(given) + 1):
        assert given[:size].count("session") <= given[:size].count("queue") + 1
    assert given.count("queue") + given.count("session") == len(events) - events.count("turn")


def test_a_turn_of_a_session_waits_only_within_its_share_and_lane() -> None:
    """A turn waits only in free places, behind no more urgent request, and if its client has no more than others."""
    turns: SlotTurns[str] = SlotTurns()
    request = SlotRequest("a", "normal")
    assert turns.keep(request, EMPTY, capacity=1, now=0) == "placed"
    assert turns.keep(request, EMPTY, capacity=0, now=0) is None
    assert turns.keep(request, HIGH, capacity=1, now=0) is None
    assert turns.keep(SlotRequest("b", "normal"), NORMAL, capacity=1, now=0) == "placed"
    assert place(turns, "a")
    assert turns.keep(request, NORMAL, capacity=1, now=0) is None
    assert turns.keep(SlotRequest("b", "normal"), NORMAL, capacity=1, now=0) == "placed"
