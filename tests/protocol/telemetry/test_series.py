"""The last hour of a fleet's values."""

import math

import pytest

from rollbus.bus.protocol.telemetry.rates import (
    FIELDS,
    MAX_MODELS,
    MAX_SERIES,
    NUM_POINTS,
    SERIES_BYTES,
    History,
    Point,
)


def point(value: float) -> Point:
    """Return a point with the same value in each field."""
    return Point(*[value] * len(FIELDS))


def test_points_after_a_number_are_returned_in_order() -> None:
    """Points after a number are returned in order, unknown values are None, and only the last hour is kept."""
    history = History()
    assert history.fleet() == {field: [] for field in FIELDS}
    for number in range(1, NUM_POINTS + 11):
        history.add(number, point(number), {"m": point(2 * number)}, {"w": point(math.nan)})
    assert history.fleet()["waiting"] == [float(number) for number in range(11, NUM_POINTS + 11)]
    assert history.fleet(since=NUM_POINTS + 8)["tokens_per_s"] == [NUM_POINTS + 9, NUM_POINTS + 10]
    assert history.fleet(since=history.number)["tokens_per_s"] == []
    assert history.models(since=NUM_POINTS + 9) == {"m": {field: [2 * (NUM_POINTS + 10)] for field in FIELDS}}
    worker = history.worker("w", since=NUM_POINTS + 8)
    assert worker is not None
    assert worker["in_flight"] == [None, None]
    assert history.worker("x") is None


def test_a_viewer_with_the_number_of_an_earlier_incarnation_gets_all_points() -> None:
    """A viewer with the number of an earlier incarnation of the service receives all points."""
    history = History()
    history.add(1, point(5), {}, {})
    assert history.fleet(since=400)["waiting"] == [5.0]


@pytest.mark.parametrize("skipped", [1, NUM_POINTS - 1, NUM_POINTS, 10 * NUM_POINTS])
def test_steps_without_a_point_are_none(skipped: int) -> None:
    """Steps without a point are None. If more than an hour is missing, no older point is returned as new."""
    history = History()
    for number in range(1, NUM_POINTS + 1):
        history.add(number, point(number), {}, {"w": point(number)})
    last = NUM_POINTS + skipped + 1
    history.add(last, point(7), {}, {"w": point(7)})
    history.add(last - 1, point(9), {}, {})
    found = history.fleet(since=max(NUM_POINTS, last - NUM_POINTS))["waiting"]
    assert found == [*[None] * (min(skipped, NUM_POINTS - 1)), 7.0]
    assert len(history.fleet()["waiting"]) == NUM_POINTS


def test_points_of_a_lost_worker_are_removed_after_an_hour() -> None:
    """The points of a lost worker are kept for an hour.

    Then they are removed, and another worker can use the memory.
    """
    history = History()
    history.add(1, point(1), {"m": point(1)}, {"w": point(1)})
    history.add(NUM_POINTS, point(1), {}, {})
    gone = history.worker("w")
    assert gone is not None
    assert gone["waiting"][0] == 1.0
    before = history.num_bytes
    history.add(NUM_POINTS + 1, point(1), {}, {"v": point(1)})
    assert (history.worker("w"), history.models()) == (None, {})
    assert history.num_bytes == before - SERIES_BYTES


def test_memory_is_bounded_for_any_names() -> None:
    """Memory is bounded for any names: models and workers beyond the limits have no points."""
    history = History()
    for number in range(1, 4):
        names = [f"{number}-{index}" for index in range(MAX_SERIES)]
        history.add(number, point(1), dict.fromkeys(names, point(1)), dict.fromkeys(names, point(1)))
    assert history.num_bytes == (1 + MAX_MODELS + MAX_SERIES) * SERIES_BYTES
    assert history.worker("2-0") is None
    assert history.worker("1-0") is not None
