"""The rates of workers, from the counters in their presence, and their points of the last hour."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.telemetry.rates import (
    FIELDS,
    MAX_MODELS,
    MAX_SERIES,
    NUM_POINTS,
    RATE_STEP_S,
    SERIES_BYTES,
    WINDOW_S,
    FleetRates,
    History,
    Point,
    Rates,
)
from rollbus.schemas import limits
from rollbus.schemas.presence import EngineStats, WorkerCounters, WorkerPresence
from tests.support.fleet import presence

ANY_COUNT = st.integers(0, limits.MAX_COUNT) | st.integers(0, 1_000)
ANY_SECONDS = st.floats(0, allow_nan=False, allow_infinity=False)
COUNTERS = st.builds(
    WorkerCounters,
    requests=ANY_COUNT,
    generated_tokens=ANY_COUNT,
    first_tokens=ANY_COUNT,
    first_tokens_s=ANY_SECONDS,
    next_tokens=ANY_COUNT,
    next_tokens_s=ANY_SECONDS,
)
STATS = st.builds(EngineStats, prefix_cache_queries=st.none() | ANY_COUNT, prefix_cache_hits=st.none() | ANY_COUNT)
ANNOUNCEMENTS = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["1", "2"]),
    st.sampled_from(["m", "n"]),
    st.none() | COUNTERS,
    st.none() | STATS,
    st.floats(0, 20),
)
GROWTH = st.tuples(*[st.integers(0, 1_000)] * 8)


def announced(worker: str, totals: tuple[int, ...], **fields: str) -> WorkerPresence:
    """Return a worker's presence with these totals, in the order of the first line."""
    tokens, requests, first, first_ms, following, following_ms, lookups, hits = totals
    counters = WorkerCounters(
        generated_tokens=tokens,
        requests=requests,
        first_tokens=first,
        first_tokens_s=first_ms / 1000,
        next_tokens=following,
        next_tokens_s=following_ms / 1000,
    )
    stats = EngineStats(prefix_cache_queries=lookups, prefix_cache_hits=hits)
    return presence(worker=worker, counters=counters, engine_stats=stats, **fields)


def counting(rates: FleetRates, worker: str, per_s: tuple[int, ...], seconds: int, **fields: str) -> None:
    """Let a worker's counters grow evenly and announce them each second."""
    for now in range(seconds + 1):
        rates.observe(announced(worker, tuple(now * count for count in per_s), **fields), float(now))


def test_before_the_second_presence_and_for_idle_workers_there_are_no_means() -> None:
    """Before the second presence and for idle workers, rates are 0 and means are None."""
    rates = FleetRates()
    rates.observe(announced("a", (500,) * 8), 0.0)
    assert rates.of("a") == rates.of("nobody") == Rates()
    rates.observe(announced("a", (500,) * 8), 1.0)
    found = rates.of("a")

    assert found == rates.of_fleet() == Rates()
    assert (found.first_token_s, found.between_tokens_s, found.prefix_hit) == (None, None, None)


def test_after_an_outage_the_rate_is_the_mean_of_the_whole_outage() -> None:
    """After an outage, the rate is the mean of the whole outage, so a minute's tokens do not count as one second's."""
    rates = FleetRates()
    rates.observe(announced("a", (0,) * 8), 0.0)
    rates.observe(announced("a", (600,) * 8), 60.0)
    assert rates.of("a").tokens_per_s == 10
    rates.observe(announced("a", (600,) * 8), 60.1)
    assert rates.of("a").tokens_per_s == pytest.approx(10, rel=0.01)
    rates.observe(announced("a", (620,) * 8), 61.0)
    assert rates.of("a").tokens_per_s == 20


@pytest.mark.parametrize("change", [{"incarnation": "2"}, {"model": "n"}])
def test_counters_of_another_incarnation_are_not_compared_with_earlier_counters(change: dict[str, str]) -> None:
    """The counters of another incarnation or model are not compared with the earlier ones, even if higher."""
    rates = FleetRates()
    counting(rates, "a", (10,) * 8, 3)
    rates.observe(announced("a", (10_000,) * 8, **change), 4.0)
    assert rates.of("a") == Rates()
    rates.observe(announced("a", (10_005,) * 8, **change), 5.0)
    assert rates.of("a").tokens_per_s == 5


def test_rates_restart_if_counters_fall() -> None:
    """If counters fall, the rates restart, because a restarted engine counts from 0."""
    rates = FleetRates()
    counting(rates, "a", (10,) * 8, 3)
    rates.observe(announced("a", (40, 40, 40, 40, 40, 40, 0, 0)), 4.0)
    assert rates.of("a") == Rates()
    rates.observe(announced("a", (45, 40, 40, 40, 40, 40, 8, 6)), 5.0)
    assert (rates.of("a").tokens_per_s, rates.of("a").prefix_hit) == (5, 0.75)


def test_models_and_the_fleet_weigh_means_by_requests() -> None:
    """Models and the fleet weigh means by requests: two of 100 ms and one of 400 ms have a mean of 200 ms.

    A removed worker does not count.
    """
    rates = FleetRates()
    counting(rates, "a", (500, 0, 2, 200, 0, 0, 0, 0), 5)
    counting(rates, "b", (100, 0, 1, 400, 0, 0, 0, 0), 5)
    counting(rates, "c", (50, 0, 1, 1_000, 0, 0, 0, 0), 5, model="n")
    models = rates.of_models()

    assert (models["m"].tokens_per_s, models["n"].tokens_per_s) == (600, 50)
    assert models["m"].first_token_s == pytest.approx(0.2)
    assert rates.of_fleet().tokens_per_s == 650
    rates.forget("a")
    rates.forget("c")
    rates.forget("nobody")
    assert set(rates.of_models()) == {"m"}
    assert rates.of_fleet() == rates.of("b")


def test_workers_without_counters_have_no_rates() -> None:
    """Workers of earlier releases have no counters, so they have no rates and take no entry."""
    rates = FleetRates()
    for now in range(3):
        rates.observe(presence(worker="old"), float(now))

    assert rates.of_models() == {}
    assert rates.of("old") == Rates()


@given(st.lists(ANNOUNCEMENTS, max_size=60))
def test_rates_are_finite_and_not_negative_for_any_presences(announcements: list[tuple[object, ...]]) -> None:
    """For any presences, rates are finite and not negative, and sums equal those of the workers.

    The stored history is bounded.
    """
    rates, now = FleetRates(), 0.0
    for worker, incarnation, model, counters, stats, later in announcements:
        now += float(str(later))
        rates.observe(
            presence(worker=worker, incarnation=incarnation, model=model, counters=counters, engine_stats=stats), now
        )
    models = rates.of_models()
    each = [rates.of(worker) for worker in "abc"]
    for found in (*each, *models.values(), rates.of_fleet()):
        means = (found.first_token_s, found.between_tokens_s, found.prefix_hit)
        assert all(math.isfinite(value) and value >= 0 for value in (*found, *means) if value is not None)
        assert (found.prefix_hit or 0) <= 1

    for sums in (rates.of_fleet(), Rates.sum(models.values())):
        assert sums == pytest.approx(Rates.sum(each))
    assert all(len(known.counted) <= WINDOW_S / RATE_STEP_S + 3 for known in rates._workers.values())


@given(
    growth=st.lists(st.tuples(GROWTH, st.floats(RATE_STEP_S, WINDOW_S)), min_size=2, max_size=40),
)
def test_rates_are_the_growth_over_the_window(growth: list[tuple[tuple[int, ...], float]]) -> None:
    """Rates equal the growth since the earliest presence within the window."""
    rates, now, everything = FleetRates(), 0.0, []
    total: tuple[int, ...] = (0,) * 8
    for more, later in growth:
        now, total = now + later, tuple(a + b for a, b in zip(total, more, strict=True))
        everything.append((now, total))
        rates.observe(announced("a", total), now)
    began, before = min((one for one in everything[:-1] if now - one[0] <= WINDOW_S), default=everything[-2])
    found = rates.of("a")

    assert found.tokens_per_s == pytest.approx((total[0] - before[0]) / (now - began))
    assert found.requests_per_s == pytest.approx((total[1] - before[1]) / (now - began))
    if first := total[2] - before[2]:
        assert found.first_token_s == pytest.approx((total[3] - before[3]) / 1000 / first)
    if following := total[4] - before[4]:
        assert found.between_tokens_s == pytest.approx((total[5] - before[5]) / 1000 / following)
    if lookups := total[6] - before[6]:
        assert found.prefix_hit == pytest.approx(min((total[7] - before[7]) / lookups, 1))


@given(gaps=st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_frequent_presences_do_not_change_the_rates(gaps: list[float]) -> None:
    """Frequent presences do not change a worker's rates, and the stored history stays bounded."""
    rates, now = FleetRates(), 0.0
    for later in gaps:
        now += later
        rates.observe(announced("a", tuple([int(now * 1_000_000)] * 8)), now)
        assert len(rates._workers["a"].counted) <= WINDOW_S / RATE_STEP_S + 3
    if now - gaps[0] >= RATE_STEP_S:
        assert rates.of("a").tokens_per_s == pytest.approx(1_000_000, rel=0.001)


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
