"""Placement of the samples of one request and of the requests of one group."""

from collections import Counter
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.load import PIECE_TOKENS
from rollbus.bus.protocol.queue.placement import SIBLINGS_PER_PIECE, Placement, PlacementPolicy, PlacementReason
from tests.protocol.placement.worlds import fleet, loads, placement_needs, presence, prompt

QUEUED = Placement(None, PlacementReason.QUEUED)


def place(rooms: list[int], count: int, *, num_tokens: int = 2048, held_by: tuple[int, ...] = ()) -> list[Placement]:
    """Place a group on workers with these numbers of free slots; the workers `held_by` have its prompt cached."""
    workers = [f"w{i}" for i in range(len(rooms))]
    policy = fleet(*(presence(worker, free_slots=room) for worker, room in zip(workers, rooms, strict=True)))
    request = placement_needs(prompt(1, num_tokens))
    for i in held_by:
        policy.admitted(request, workers[i], 0, was_placed=True)
    return policy.place_group(request, count, loads(policy, *workers), 1)


def shares(placements: list[Placement]) -> list[int]:
    """Return the numbers of samples per worker, the largest first."""
    return sorted(Counter(each.worker for each in placements if each.worker is not None).values(), reverse=True)


def test_a_single_free_slot_is_used_where_the_prompt_is_cached() -> None:
    """A sample goes to a single free slot if its worker has the prompt cached, because that saves the prompt."""
    placements = place([1, 1, 1, 1], 4, held_by=(2,))

    assert placements == [("w2", PlacementReason.PLACED_PREFIX, 2048), QUEUED, QUEUED, QUEUED]


def test_a_group_goes_to_the_worker_with_the_cached_prompt() -> None:
    """Of the workers with room for all samples, the worker with the cached prompt gets the group."""
    assert place([9, 9, 9], 8, held_by=(2,)) == [Placement("w2", PlacementReason.PLACED_PREFIX, 2048)] * 8
    assert {each.worker for each in place([9, 9, 7], 8, held_by=(2,))} <= {"w0", "w1"}


def test_a_group_whose_prompt_most_workers_have_is_queued() -> None:
    """A group is queued if most workers have its prompt, because any worker then serves it equally well."""
    assert place([9, 9, 9], 8, held_by=(0, 1, 2)) == [QUEUED] * 8


@pytest.mark.parametrize("num_tokens", [1, PIECE_TOKENS - 1])
def test_groups_with_a_short_prompt_are_queued_or_spread_evenly(num_tokens: int) -> None:
    """Sharing a prompt below one piece saves nothing.

    The samples are queued, or spread evenly if not all workers are able to serve them.
    """
    assert place([8, 8, 8], 8, num_tokens=num_tokens) == [QUEUED] * 8
    policy = fleet(*(presence(worker, free_slots=4) for worker in "abc"))
    request = placement_needs(prompt(1, num_tokens), is_for_able_only=True)
    placements = policy.place_group(request, 9, loads(policy, "a", "b", "c"), 1)
    assert shares(placements) == [3, 3, 3]
    placements = policy.place_group(request, 14, loads(policy, "a", "b", "c"), 1)
    assert shares(placements) == [4, 4, 4]
    assert placements[12:] == [QUEUED] * 2


def test_short_prompts_of_a_session_stay_with_its_worker() -> None:
    """Samples with a short prompt go to the worker of their session while it has room, and the rest is queued."""
    policy = fleet(presence("a", free_slots=4), presence("b", free_slots=9))
    request = placement_needs(prompt(1, 40), session="s")
    policy.admitted(request, "a", 0, was_placed=True)
    placements = policy.place_group(request, 6, loads(policy, "a", "b"), 1)

    assert placements == [Placement("a", PlacementReason.PLACED_SESSION, 0)] * 4 + [QUEUED] * 2


def test_a_large_group_is_spread_by_load() -> None:
    """Siblings beyond the worth of their prompt go to further workers, unless those have no room."""
    limit = SIBLINGS_PER_PIECE * 8
    assert shares(place([256] * 8, 2 * limit)) == [limit, limit]
    assert shares(place([256] * 8, 4 * limit - 6)) == [limit - 1] * 2 + [limit - 2] * 2
    assert shares(place([256, 0, 0], 2 * limit)) == [2 * limit]


def test_a_group_of_one_sample_is_placed_like_a_request() -> None:
    """A group of one sample is placed like a request: it is queued if its prompt is unknown."""
    assert place([8, 8], 1) == [QUEUED]
    assert place([8, 8], 1, held_by=(1,)) == [Placement("w1", PlacementReason.PLACED_PREFIX, 2048)]
    assert PlacementPolicy().place_group(placement_needs(prompt(1)), 3, [], 1) == [QUEUED] * 3


rooms_of_workers = st.lists(st.integers(0, 12), min_size=1, max_size=6)


@given(rooms_of_workers, st.integers(1, 30), st.integers(1, 8), st.sets(st.integers(0, 5), max_size=3))
def test_no_worker_gets_more_samples_than_slots_and_shares_are_even(
    rooms: list[int], count: int, pieces: int, holders: set[int]
) -> None:
    """No worker gets more samples than it has slots, and the fewest possible workers compute an unknown prompt.

    The shares are even.
    """
    held_by = tuple(sorted(i for i in holders if i < len(rooms)))
    num_tokens = pieces * PIECE_TOKENS + 3
    placements = place(rooms, count, num_tokens=num_tokens, held_by=held_by)
    share_of = Counter(each.worker for each in placements)
    num_queued = share_of.pop(None, 0)

    assert len(placements) == count
    assert placements[count - num_queued :] == [QUEUED] * num_queued
    assert len([worker for worker, _ in groupby(each.worker for each in placements)]) == len(share_of) + bool(
        num_queued
    )
    assert all(share <= rooms[int((worker or "")[1:])] for worker, share in share_of.items())
    # All samples after the first of a worker find the prompt in its cache.
    for worker in share_of:
        cached = [each.cached_tokens for each in placements if each.worker == worker]
        assert cached[1:] == [pieces * PIECE_TOKENS] * (len(cached) - 1)
    if held_by or count == 1:
        return
    limit = SIBLINGS_PER_PIECE * pieces
    usable = sorted((min(room, limit) for room in rooms), reverse=True)
    if sum(usable) < count:
        usable = sorted(rooms, reverse=True)
    usable = [room for room in usable if room > 1]
    fewest = next((n for n in range(len(usable) + 1) if sum(usable[:n]) >= count), len(usable))
    assert len(share_of) == fewest
    assert num_queued == max(count - sum(usable), 0)
    full = [share for worker, share in share_of.items() if share == rooms[int((worker or "")[1:])]]
    others = [share for share in share_of.values() if share not in full]
    assert not others or max(others) - min(others) <= 1


@pytest.mark.parametrize(("size", "num_tokens"), [(4, 256), (8, 512), (8, 2048), (16, 1024), (32, 2048)])
def test_separate_requests_of_a_group_go_to_one_worker(size: int, num_tokens: int) -> None:
    """A group computes its prompt once, even if its requests are placed one by one before any answer."""
    workers = [f"w{i}" for i in range(4)]
    policy = fleet(*(presence(worker, free_slots=64) for worker in workers))
    able = loads(policy, *workers)
    homes: dict[int, set[str | None]] = {}
    for group in range(64 * 4 // size):
        for _ in range(size):
            request = placement_needs(prompt(group, num_tokens), group=f"g{group}")
            placement = policy.place(request, able, group)
            policy.placed(request, placement, group)
            homes.setdefault(group, set()).add(placement.worker)

    assert all(len(each) == 1 for each in homes.values())
    assert set().union(*homes.values()) == set(workers)
    assert [policy.loads.free_slots(worker, 99) for worker in workers] == [0] * 4


def test_separate_requests_of_a_group_go_to_another_worker_if_the_first_is_full() -> None:
    """If the first worker is full, the next requests of a group go to another worker.

    If only single slots are free, they go to the queue.
    """
    policy = fleet(presence("a", free_slots=5), presence("b", free_slots=3), presence("c", free_slots=1))
    able = loads(policy, "a", "b", "c")
    request = placement_needs(prompt(1), group="g")
    chosen = []
    for _ in range(10):
        placement = policy.place(request, able, 1)
        policy.placed(request, placement, 1)
        chosen.append(placement.worker)

    assert chosen == ["a"] * 5 + ["b"] * 3 + [None] * 2


def test_separate_requests_of_a_group_whose_prompt_most_workers_have_are_queued() -> None:
    """Requests of a group are queued if most workers have the prompt, because any worker serves them equally well."""
    policy = fleet(*(presence(worker) for worker in "abc"))
    for worker in "abc":
        policy.admitted(placement_needs(prompt(1)), worker, 0, was_placed=True)

    assert policy.place(placement_needs(prompt(1), group="g"), loads(policy, "a", "b", "c"), 1) == QUEUED
