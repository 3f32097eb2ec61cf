"""The turns of the lanes: no lane starves another, and the rest is in strict order."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.pull_plan import STRICT, TURNS
from rollbus.schemas.request import Lane
from tests.protocol.test_pulling import EVENTS, LANES, World, play


def pull_all(published: dict[Lane, int], room: int = 1) -> list[Lane]:
    """Return the lanes of all requests in the order in which a worker with room for `room` at a time pulls them."""
    world = World(room=0)
    for lane, count in published.items():
        world.publish(lane, count)
    while any(world.waiting.values()):
        world.set_room(room)
        world.settle()
    return world.taken


@pytest.mark.parametrize("room", [1, 8, 64, 200])
def test_of_eight_requests_each_lane_gets_its_turns(room: int) -> None:
    """Of eight requests, five come from `resume` and one from each other lane, if all lanes have requests."""
    taken = pull_all(dict.fromkeys(LANES, 500), room)[: 8 * 100]

    assert {lane: taken.count(lane) / 100 for lane in LANES} == pytest.approx(
        {"resume": 5, "high": 1, "normal": 1, "low": 1}, abs=0.4
    )


@pytest.mark.parametrize("flooded", LANES)
@pytest.mark.parametrize("lane", LANES)
def test_a_flood_of_one_lane_delays_another_by_at_most_seven_requests_each(flooded: Lane, lane: Lane) -> None:
    """A lane with requests gets one of eight, although another lane has any number of them."""
    if flooded == lane:
        return
    taken = pull_all({flooded: 1000, lane: 20})
    places = [place for place, one in enumerate(taken) if one == lane]

    assert max(after - before for before, after in zip([-1, *places], places, strict=False)) <= len(TURNS)
    assert taken[:40].count(lane) >= 5


@pytest.mark.slow
@given(st.fixed_dictionaries(dict.fromkeys(LANES, st.integers(0, 40))))
def test_turns_of_an_empty_lane_go_to_the_first_lane_in_strict_order(published: dict[Lane, int]) -> None:
    """Each request is of the lane of its turn, or of the first lane in strict order if that lane has no request."""
    expected, left = [], dict(published)
    for turn in range(sum(published.values())):
        lane = next(lane for lane in (TURNS[turn % len(TURNS)], *STRICT) if left[lane])
        left[lane] -= 1
        expected.append(lane)

    assert pull_all(published) == expected


@given(st.lists(EVENTS, max_size=40))
def test_without_resumed_requests_seven_of_eight_are_strict(
    events: list[Callable[[World], None]],
) -> None:
    """After any events, seven of eight requests are of lane `normal` if lanes `normal` and `low` have requests."""
    world = World()
    play(world, events)
    world.reconnect()
    world.waiting = dict.fromkeys(LANES, 0) | {"normal": 100, "low": 100}
    world.taken.clear()
    for _ in range(80):
        world.room = 1
        world.settle()

    assert 68 <= world.taken[:80].count("normal") <= 72
