"""Statistics of a batch's slowest requests: exact for usual sizes, and in bounded memory for any size."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.bus.client import times as batch_times
from tests.support.fleet import StartServed
from tests.support.requests import sized
from tests.support.streams import all_of

PAUSES_S = st.lists(st.integers(0, 1000), min_size=1, max_size=300)
PERCENTS = st.floats(0, 100, exclude_min=True)
"""Percentages above 0. A share of a batch is at least one request, however small the percentage is."""


def times_of(ends: list[float]) -> rollbus.BatchTimes:
    """Return the times of a batch that starts at 1,000 s and whose requests end after these seconds."""
    times = rollbus.BatchTimes()
    times.start(1000.0)
    for end in ends:
        times.add(1000.0 + end)
    return times


def ends_of(pauses: list[int]) -> list[float]:
    """Return the end times of requests that run one after the other."""
    return [float(sum(pauses[: index + 1])) for index in range(len(pauses))]


def number_of(ends: list[float], percent: float) -> int:
    """Return the rank of the request that completes a share of the batch, counted from 1."""
    return max(math.ceil(len(ends) * percent / 100), 1)


def test_a_batch_without_a_complete_request_has_no_times() -> None:
    """An empty batch and a batch that has just restarted have no times."""
    assert rollbus.BatchTimes().percentiles() == {}
    times = times_of([1.0, 2.0])
    times.start(2000.0)
    assert times.percentiles() == {}
    assert times.seconds_to(50) is None


@pytest.mark.parametrize("percent", [0, -1, 100.1, math.nan])
def test_a_share_out_of_range_is_refused(percent: float) -> None:
    """`seconds_to` rejects a percentage that is out of range, and the error states the allowed range."""
    with pytest.raises(ValueError, match="allowed: above 0, up to 100"):
        times_of([1.0]).seconds_to(percent)


@given(PAUSES_S, PERCENTS)
def test_times_of_any_batch_equal_the_sorted_ends_of_its_requests(pauses: list[int], percent: float) -> None:
    """The time of any share of any batch is the end of the request with that rank."""
    ends = ends_of(pauses)
    assert times_of(ends).seconds_to(percent) == ends[number_of(ends, percent) - 1]


@given(PAUSES_S, PERCENTS)
def test_an_endless_batch_uses_bounded_memory(pauses: list[int], percent: float) -> None:
    """In a batch beyond the memory limit, the time of a share is that of a slightly later request.

    The last time is exact.
    """
    ends = ends_of(pauses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_times, "MAX_TIMES", 16)
        times = times_of(ends)
        assert len(times._times_s) < 16
    number = number_of(ends, percent)
    # After thinning, the batch still stores at least 8 times, so the rank is off by at most an eighth.
    behind = math.ceil(len(ends) / 8)
    seconds = times.seconds_to(percent)
    assert seconds is not None
    assert ends[number - 1] <= seconds <= ends[min(number + behind, len(ends)) - 1]
    assert times.seconds_to(100) == ends[-1]


async def test_complete_many_measures_the_times_of_its_batch(one_worker: StartServed) -> None:
    """`complete_many` counts both served and rejected requests. A second batch resets the times."""
    twice = sized(request_id="twice")
    requests = [sized(request_id=f"r{number}") for number in range(8)]
    times = rollbus.BatchTimes()
    async with one_worker() as (rb, *_):
        results = await all_of(rb.complete_many([twice, twice, *requests], times=times))
        assert [result.error is None for result in results].count(False) == 1
        assert times.num_complete == 10
        percentiles = times.percentiles()
        assert 0 < percentiles[50] <= percentiles[90] <= percentiles[99] <= percentiles[100]
        await all_of(rb.complete_many(requests[:3], times=times))
        assert times.num_complete == 3
