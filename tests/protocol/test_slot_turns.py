"""The share of a worker's slots that a client can get with placed requests and followers while others wait."""

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.fairness import (
    FOLLOW_S,
    MAX_AHEAD,
    MAX_CLIENTS,
    MAX_FOLLOWERS,
    MESSAGES_SEEN,
    FollowerShares,
    SlotRequest,
    SlotTurns,
)
from rollbus.schemas.request import Lane

NORMAL: tuple[Lane, ...] = ("normal",)
EMPTY: tuple[Lane, ...] = ()
CAPACITY = 64
SHARE = 1024
"""Number of messages that one client may have in a lane."""


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
        request = SlotRequest(client, "normal", group)
        left = CAPACITY - len(self.turns.backlog)
        begins = self.turns.admit_placed(request, self.waiting, num_free=num_free, capacity=left, now=self.now)
        if begins == "now":
            self.got.append((client, "placed"))
        elif begins is not None:
            self.num_offered += 1
            self.turns.backlog.add((client, f"{self.num_offered}"), client, "normal", begins, self.now)
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
            assert begun is not None
            self.got.append((begun[0], "follower"))
            return None
        assert self.turns.pop(self.waiting, 1, self.now) is None
        if not self.queue:
            return None
        client, group = self.queue.popleft()
        self.turns.shares.count_queued(self.waiting)
        self.turns.backlog.add_queued(client, group, "normal", self.now, num_waiting=len(self.queue))
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
    assert len(worker.turns.backlog) == (CAPACITY if has_led else 0)
    worker.got.clear()
    worker.queue.extend(("quiet", f"q{number}") for number in range(300))
    while worker.queue:
        for number in range(40):
            group = {"one": "g0", "each": f"g{number}", "none": None}[groups]
            if worker.place("m", group, num_free=0 if worker.turns.backlog else 1) == "now":
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
    while worker.queue or worker.turns.backlog:
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


def test_the_number_of_known_clients_is_bounded() -> None:
    """The number of known clients is bounded, and the client without a slot for the longest time is removed first."""
    shares = FollowerShares()
    for number in range(3 * MAX_CLIENTS):
        shares.count_message(f"c{number}", "normal", MAX_AHEAD)
    assert len(shares) == MAX_CLIENTS


def test_a_client_that_had_many_slots_long_ago_may_have_followers_again() -> None:
    """After enough messages of other clients, a client that had many slots may have followers again."""
    shares = FollowerShares()
    for _ in range(MESSAGES_SEEN):
        shares.count_message("c", "normal", MAX_AHEAD)
        shares.count_follower("c")
    assert not shares.may_follow("c", "normal")
    assert shares.may_follow("c", "high")
    for _ in range(MESSAGES_SEEN):
        shares.count_message("d", "normal", MAX_AHEAD)
    assert shares.may_follow("c", "normal")
