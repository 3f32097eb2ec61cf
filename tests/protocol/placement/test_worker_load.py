"""A client's estimate of a worker's load between presences, for any announced values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.load import FULL_KV, FULL_S, SILENT_S, SLOW, SLOWEST, LoadTable, WorkerLoad
from rollbus.schemas.presence import EngineStats
from tests.protocol.placement.worlds import presence


def table_of(*workers: str, free_slots: int = 8) -> LoadTable:
    """Return a table of workers that announced no requests at time 0."""
    table = LoadTable()
    for worker in workers:
        table.update(presence(worker, free_slots=free_slots), 0)
    return table


def load_of(table: LoadTable, worker: str = "a") -> WorkerLoad:
    """Return the load of a known worker."""
    load = table.get(worker)
    assert load is not None
    return load


def rates(prefill: float | None = None, decode: float | None = None, running: int = 8) -> EngineStats:
    """Return an engine's stats with these rates."""
    return EngineStats(prefill_tokens_per_s=prefill, decode_tokens_per_s=decode, running=running)


def test_placed_and_ended_requests_count_until_the_next_presence() -> None:
    """A client counts the requests that it has placed and that have ended since the last presence."""
    table = table_of("a")
    for _ in range(3):
        table.placed("a", 100, 0.5)
    assert table.free_slots("a", 0.5) == 5
    table.ended("a")
    assert table.free_slots("a", 0.5) == 6
    assert load_of(table).running == 2
    table.update(presence("a", free_slots=3, in_flight=5), 1)

    assert table.free_slots("a", 1) == 3
    assert load_of(table).running == 5


def test_a_worker_has_no_more_free_slots_than_slots() -> None:
    """A worker has at most as many free slots as slots, although its presence may precede the end of a request."""
    table = table_of("a")
    table.placed("a", 100, 0.5)
    table.update(presence("a", free_slots=7, in_flight=1), 1)
    table.ended("a")
    assert table.free_slots("a", 1) == 8
    table.ended("a")

    assert table.free_slots("a", 1) == 8


def test_estimated_free_slots_and_running_requests_are_never_negative() -> None:
    """The estimated free slots and running requests are never negative."""
    table = table_of("a", free_slots=1)
    table.placed("a", 0, 0)
    table.placed("a", 0, 0)
    assert table.free_slots("a", 0) == 0
    for _ in range(3):
        table.ended("a")

    assert load_of(table).running == 0
    assert table.free_slots("nobody", 0) == 0


def test_a_refusal_closes_a_worker_until_a_later_presence_announces_room() -> None:
    """A presence shortly after a refusal does not open the worker again, because both may have crossed."""
    table = table_of("a")
    table.placed("a", 0, 0.5)
    table.refused("a", 0.5)
    assert table.free_slots("a", 0.9) == 0
    table.refused("a", 0.95)
    table.update(presence("a"), 0.96)
    assert table.free_slots("a", 0.97) == 0

    assert table.free_slots("a", 0.96 + 2 * FULL_S) == 8


def test_a_worker_that_announces_slots_and_refuses_gets_ever_fewer_requests() -> None:
    """A worker that announces free slots ten times a second and refuses each request gets ever fewer requests."""
    table = table_of("a")
    refusals = 0
    for tick in range(600):
        now = tick / 10
        table.update(presence("a"), now)
        if table.free_slots("a", now):
            refusals += 1
            # Requests that were on their way together count as one refusal.
            for _ in range(8):
                table.placed("a", 100, now)
            for _ in range(8):
                table.refused("a", now + 0.01)

    assert refusals <= 14


def test_requests_that_are_refused_together_count_once() -> None:
    """Requests refused together count once, because they were on their way when the first was refused."""
    table = table_of("a")
    for _ in range(8):
        table.refused("a", 1)
    table.update(presence("a"), 1.01)

    assert table.free_slots("a", 1 + FULL_S) == 8


def test_an_accepted_request_resets_the_count_of_refusals() -> None:
    """After a worker has accepted a placed request, its next refusal closes it only for the shortest time."""
    table = table_of("a")
    for now in (1, 2, 3, 4):
        table.refused("a", now)
    table.admitted("a")
    table.refused("a", 5)
    table.update(presence("a"), 5.01)

    assert table.free_slots("a", 5 + FULL_S) == 8


def test_a_silent_worker_gets_no_request_for_ten_seconds() -> None:
    """A silent worker gets no request for ten seconds, regardless of its presence, also as another incarnation."""
    table = table_of("a")
    table.placed("a", 0, 1)
    table.silent("a", 2)
    for now in range(3, 12):
        table.update(presence("a", incarnation=f"i{now}"), now)
        assert table.free_slots("a", now) == 0

    assert SILENT_S == 10
    assert table.free_slots("a", 12) == 8


def test_a_worker_with_a_full_kv_cache_has_no_room() -> None:
    """A worker with a full KV cache has no room, because a new request would take KV cache from a running request."""
    table = LoadTable()
    table.update(presence("a", engine_stats=EngineStats(kv_cache_use=FULL_KV)), 0)
    table.update(presence("b", engine_stats=EngineStats(kv_cache_use=0.5)), 0)

    assert (table.free_slots("a", 0), table.free_slots("b", 0)) == (0, 8)


def test_placed_prompts_count_as_backlog_that_falls_at_the_announced_rate() -> None:
    """A placed prompt counts as backlog until the worker has had time to compute it, also if its rate changes."""
    table = LoadTable()
    table.update(presence("a", engine_stats=rates(prefill=1000)), 0)
    table.placed("a", 2000, 0)
    table.placed("a", 1000, 1)
    assert load_of(table).backlog(1) == 2000
    table.update(presence("a", engine_stats=rates(prefill=2000)), 2)
    assert load_of(table).backlog(2) == 1000

    assert load_of(table).backlog(2.25) == 500
    assert load_of(table).backlog(9) == 0


def test_a_worker_without_a_rate_counts_with_the_median_rate() -> None:
    """A worker without a rate has just started and counts with the median rate.

    If no worker has a rate, all count with a constant.
    """
    table = LoadTable()
    for now, rate in enumerate((None, 1000, 2000, 4000)):
        table.update(presence(str(now), engine_stats=rates(prefill=rate)), now)
    table.placed("0", 24_000, 3)
    assert load_of(table, "0").backlog(4) == 16_000

    for worker in ("0", "new"):
        table.update(presence(worker), 4)
    table.placed("new", 12_000, 4)
    # The median of the other rates also applies to prompts that were placed earlier.
    assert load_of(table, "0").backlog(5) == 16_000 - 2000
    assert load_of(table, "new").backlog(5) == 12_000 - 2000
    table.update(presence("new", engine_stats=rates(prefill=500)), 5)
    assert load_of(table, "new").backlog(7) == 10_000 - 1000


@pytest.mark.parametrize(
    ("rates_of_c", "slowness"),
    [
        (rates(prefill=500, decode=50), 2),
        (rates(prefill=500), 2),
        (rates(decode=50), 2),
        # The worker finds most of each prompt cached, or computes more prompts between its steps.
        (rates(prefill=500, decode=100), 1),
        (rates(prefill=1000, decode=50), 1),
    ],
)
def test_slowness_follows_from_the_rates_of_prefill_and_decode(rates_of_c: EngineStats, slowness: float) -> None:
    """A worker with half of each announced rate counts as about twice as slow. The other workers count as equal."""
    table = LoadTable()
    stats = {"a": rates(prefill=1000, decode=100), "b": rates(prefill=1200, decode=110), "c": rates_of_c}
    for now in range(3):
        for worker, each in stats.items():
            table.update(presence(worker, engine_stats=each), now)

    assert (load_of(table, "a").slowness, load_of(table, "b").slowness) == (1, 1)
    assert load_of(table, "c").slowness == pytest.approx(slowness, abs=0.25)


def test_short_remainders_of_cached_prompts_do_not_make_a_worker_slow() -> None:
    """If a rate falls because little is left to compute, the earlier rate counts for some time."""
    table = LoadTable()
    for now in range(30):
        table.update(presence("a", engine_stats=rates(prefill=1000)), now)
        table.update(presence("b", engine_stats=rates(prefill=1000 if now < 5 else 200)), now)

    assert load_of(table, "b").slowness == 1


def test_more_running_requests_do_not_make_a_worker_slow() -> None:
    """The decode rate is compared in relation to the running requests, so many requests do not make a worker slow."""
    table = LoadTable()
    for now in range(30):
        for worker, running in (("a", 4), ("b", 64), ("c", 4)):
            decode = running / (0.01 * (1 + 0.01 * running))
            table.update(presence(worker, engine_stats=rates(decode=decode, running=running)), now)

    assert [load_of(table, worker).slowness for worker in "abc"] == [1, 1, 1]


any_rate = st.none() | st.floats(min_value=0, allow_infinity=False, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from("abc"), any_rate, any_rate, st.integers(0, 2**62)), max_size=20))
def test_slowness_and_backlog_are_finite_for_any_announced_rates(
    announced: list[tuple[str, float | None, float | None, int]],
) -> None:
    """Whatever workers announce, slowness is between 1 and its limit and each backlog is finite."""
    table = LoadTable()
    for now, (worker, prefill, decode, running) in enumerate(announced):
        table.update(presence(worker, engine_stats=rates(prefill, decode, running)), now)
        table.placed(worker, 10**6, now)
        load = load_of(table, worker)

        assert load.slowness == 1 or SLOW <= load.slowness <= SLOWEST
        assert math.isfinite(load.backlog(now))
        assert load.backlog(now + 10**7 * len(announced)) == 0
