"""Placed and queued requests take turns, so that neither a flood of requests nor an unknown queue starves a client."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.fairness import ASKED_S, MAX_CLIENTS, MAX_IN_TURN, IntakeShares
from rollbus.schemas.request import Lane

CLIENTS = ("a", "b", "c")
NORMAL: tuple[Lane, ...] = ("normal",)
EMPTY: tuple[Lane, ...] = ()
LANES = st.sampled_from(["high", "normal", "low"])
WAITING = st.sets(st.sampled_from(["resume", "high", "normal", "low"]), min_size=1).map(tuple)
asks = st.tuples(st.sampled_from(CLIENTS), LANES, WAITING)


def placed(shares: IntakeShares, client: str = "a", now: float = 0.0, *, num_free: int = 1) -> bool:
    """Try to accept a placed request of lane normal while requests of that lane wait in the queue."""
    return shares.admit_placed(client, "normal", NORMAL, num_free=num_free, now=now)


@pytest.mark.proves("P49")
@given(st.lists(st.just(None) | asks))
def test_while_queued_requests_wait_they_get_every_second_slot(
    events: list[tuple[str, Lane, tuple[Lane, ...]] | None],
) -> None:
    """At any time, at most one more placed request than queued requests was accepted, in any order of arrival."""
    shares = IntakeShares()
    num_placed = num_queued = in_turn = 0
    for event in events:
        if event is None:
            shares.count_queued(NORMAL)
            num_queued, in_turn = num_queued + 1, 0
            continue
        client, lane, waiting = event
        if shares.admit_placed(client, lane, waiting, num_free=5, now=0.0):
            num_placed, in_turn = num_placed + 1, in_turn + 1
            assert "high" not in waiting
            assert not (lane == "low" and "normal" in waiting)
        assert num_placed <= num_queued + 1
        assert in_turn <= MAX_IN_TURN


@given(st.integers(1, 40))
def test_a_flood_of_placed_requests_gets_half_of_the_slots(num_slots: int) -> None:
    """If both kinds of requests are plentiful, slots alternate between placed and queued requests."""
    shares = IntakeShares()
    given_to = []
    for _ in range(num_slots):
        if placed(shares):
            given_to.append("placed")
        else:
            shares.count_queued(NORMAL)
            given_to.append("queued")

    assert given_to == (["placed", "queued"] * num_slots)[:num_slots]


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), LANES), max_size=50))
def test_with_an_empty_queue_placed_requests_get_every_free_slot(requests: list[tuple[str, Lane]]) -> None:
    """If the queue is empty, placed requests get every free slot, regardless of the requests accepted before."""
    shares = IntakeShares()
    placed(shares)
    for client, lane in requests:
        assert shares.admit_placed(client, lane, EMPTY, num_free=1, now=0.0)


@given(st.integers(1, 64), st.integers(1, 200))
def test_while_the_queue_is_unknown_half_of_the_free_slots_stay_free(num_slots: int, num_asked: int) -> None:
    """Before a worker knows the queue, placed requests get at most half of its free slots, and at least one."""
    shares = IntakeShares()
    free = num_slots
    for _ in range(num_asked):
        if free and shares.admit_placed("a", "normal", None, num_free=free, now=0.0):
            free -= 1

    assert free == max(num_slots - num_asked, num_slots // 2)


def test_while_the_queue_is_unknown_every_second_single_slot_is_for_the_queue() -> None:
    """While the queue is unknown and one slot is free at a time, every second slot is for the queue.

    The worker then pulls and learns the queue's state.
    """
    shares = IntakeShares()
    ask: Callable[[], bool] = lambda: shares.admit_placed("a", "normal", None, num_free=1, now=0.0)  # noqa: E731

    assert [ask(), ask(), ask()] == [True, False, False]
    shares.count_queued(None)
    assert [ask(), ask()] == [True, False]
    assert shares.admit_placed("a", "normal", EMPTY, num_free=1, now=0.0)
    assert [ask(), ask()] == [True, False]


@given(st.lists(st.sampled_from(["queued", *CLIENTS, *["a"] * 5]), max_size=300))
def test_no_client_gets_more_than_its_share_of_placed_requests(events: list[str]) -> None:
    """No client gets more than one placed request more than another, however often it asks."""
    shares = IntakeShares()
    for client in CLIENTS:
        placed(shares, client)
    got: Counter[str] = Counter()
    for event in events:
        if event == "queued":
            shares.count_queued(NORMAL)
        elif placed(shares, event):
            got[event] += 1
            counts = [got[client] for client in CLIENTS]
            assert max(counts) - min(counts) <= 1


def test_a_client_without_requests_keeps_no_share_from_other_clients() -> None:
    """A client keeps its share only while it asks. After that, the other clients get all placed requests."""
    shares = IntakeShares()
    assert placed(shares, "flood")
    assert not placed(shares, "other")
    shares.count_queued(NORMAL)
    assert placed(shares, "flood")
    shares.count_queued(NORMAL)

    assert not placed(shares, "flood", ASKED_S / 2)
    assert placed(shares, "flood", ASKED_S)


def test_a_new_client_does_not_catch_up_on_earlier_requests() -> None:
    """A new client gets the same share as the others from now on, and does not catch up on earlier requests."""
    shares = IntakeShares()
    for _ in range(20):
        placed(shares, "first")
        shares.count_queued(NORMAL)
    got: Counter[str] = Counter()
    for _ in range(20):
        for client in ("new", "first"):
            got[client] += placed(shares, client)
        shares.count_queued(NORMAL)

    assert abs(got["new"] - got["first"]) <= 1


def test_the_number_of_known_clients_is_bounded() -> None:
    """The number of known clients is bounded. Removing the oldest costs no client its share."""
    shares = IntakeShares()
    for number in range(3 * MAX_CLIENTS):
        placed(shares, f"c{number}")

    assert len(shares) == MAX_CLIENTS


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
    assert IntakeShares().admit_placed("a", lane, waiting, num_free=4, now=0.0) is is_admitted
