"""The statistics of a batch's tail: exact for batches of usual sizes, in bounded memory for any."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.bus.client import batch_times
from tests.support.fleet import StartServed
from tests.support.requests import sized
from tests.support.streams import all_of

PAUSES_S = st.lists(st.integers(0, 1000), min_size=1, max_size=300)
PERCENTS = st.floats(0, 100, exclude_min=True)
"""Down to the smallest number that is not 0: the share of a request is never less than one request."""


def times_of(ends: list[float]) -> rollbus.BatchTimes:
    """Of a batch that starts at 1,000 and whose requests end so long after that."""
    times = rollbus.BatchTimes()
    times.start(1000.0)
    for end in ends:
        times.add(1000.0 + end)
    return times


def ends_of(pauses: list[int]) -> list[float]:
    """Times of requests that end one behind the other."""
    return [float(sum(pauses[: index + 1])) for index in range(len(pauses))]


def number_of(ends: list[float], percent: float) -> int:
    """Which request completes a share, counted from 1."""
    return max(math.ceil(len(ends) * percent / 100), 1)


def test_the_times_of_a_hundred_requests_are_exact() -> None:
    """The time to 90 % of a hundred requests is that of the ninetieth."""
    assert times_of([float(number) for number in range(1, 101)]).percentiles() == {50: 50, 90: 90, 99: 99, 100: 100}


def test_of_few_requests_a_share_is_rounded_up() -> None:
    """Half of three requests are complete with the second one."""
    assert times_of([1.0, 2.0, 7.0]).percentiles() == {50: 2, 90: 7, 99: 7, 100: 7}


def test_without_a_complete_request_there_are_no_times() -> None:
    """An empty batch has none, nor has a batch that has just started again."""
    assert rollbus.BatchTimes().percentiles() == {}
    times = times_of([1.0, 2.0])
    times.start(2000.0)
    assert times.percentiles() == {}
    assert times.seconds_to(50) is None


def test_a_request_that_comes_late_counts_with_the_last_one() -> None:
    """Times never fall."""
    assert times_of([5.0, 3.0]).percentiles() == {50: 5, 90: 5, 99: 5, 100: 5}


@pytest.mark.parametrize("percent", [0, -1, 100.1, math.nan])
def test_a_share_out_of_range_is_refused(percent: float) -> None:
    """The error says what is allowed."""
    with pytest.raises(ValueError, match="allowed: above 0, up to 100"):
        times_of([1.0]).seconds_to(percent)


@given(PAUSES_S, PERCENTS)
def test_times_are_those_of_the_sorted_ends(pauses: list[int], percent: float) -> None:
    """Any share of any batch is complete with the request of that rank."""
    ends = ends_of(pauses)
    assert times_of(ends).seconds_to(percent) == ends[number_of(ends, percent) - 1]


@given(PAUSES_S, PERCENTS)
def test_a_batch_without_end_takes_bounded_memory(pauses: list[int], percent: float) -> None:
    """Of a batch larger than what is kept, a share's time is that of a request shortly behind; the last is exact."""
    ends = ends_of(pauses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_times, "MAX_TIMES", 16)
        times = times_of(ends)
        assert len(times._times_s) < 16
    number = number_of(ends, percent)
    # Eight times at least are kept of so many requests.
    behind = math.ceil(len(ends) / 8)
    seconds = times.seconds_to(percent)
    assert seconds is not None
    assert ends[number - 1] <= seconds <= ends[min(number + behind, len(ends)) - 1]
    assert times.seconds_to(100) == ends[-1]


async def test_complete_many_times_its_batch(one_worker: StartServed) -> None:
    """Requests that are served and requests that are refused count; a second batch starts the times anew."""
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
