"""What is known of a worker's load, between announcements and whatever they say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.fleet.presence_table import MAX_WORKERS
from rollbus.bus.protocol.placement.worker_load import FULL_KV, FULL_S, SILENT_S, SLOW, SLOWEST, LoadTable, WorkerLoad
from rollbus.schemas.presence import EngineStats
from tests.protocol.placement.worlds import presence


def table_of(*workers: str, free_slots: int = 8) -> LoadTable:
    """Workers that announced at 0 that they run nothing."""
    table = LoadTable()
    for worker in workers:
        table.update(presence(worker, free_slots=free_slots), 0)
    return table


def load_of(table: LoadTable, worker: str = "a") -> WorkerLoad:
    """The load of a worker that is known."""
    load = table.get(worker)
    assert load is not None
    return load


def rates(prefill: float | None = None, decode: float | None = None, running: int = 8) -> EngineStats:
    """What an engine says of its speed."""
    return EngineStats(prefill_tokens_per_s=prefill, decode_tokens_per_s=decode, running=running)


def test_what_was_placed_is_subtracted_until_the_next_announcement() -> None:
    """A client counts what it has sent since an announcement, and what has ended (H54)."""
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
    """A worker announces a free slot before the client has heard of the request that ended there."""
    table = table_of("a")
    table.placed("a", 100, 0.5)
    table.update(presence("a", free_slots=7, in_flight=1), 1)
    table.ended("a")
    assert table.free_slots("a", 1) == 8
    table.ended("a")

    assert table.free_slots("a", 1) == 8


def test_the_counts_of_one_client_are_never_below_nothing() -> None:
    """A worker of which more is known than it announced has no room, and runs at least nothing."""
    table = table_of("a", free_slots=1)
    table.placed("a", 0, 0)
    table.placed("a", 0, 0)
    assert table.free_slots("a", 0) == 0
    for _ in range(3):
        table.ended("a")

    assert load_of(table).running == 0
    assert table.free_slots("nobody", 0) == 0


def test_a_refusal_closes_a_worker_until_it_announces_room_after_a_while() -> None:
    """Also an announcement that crossed the refusal opens nothing."""
    table = table_of("a")
    table.placed("a", 0, 0.5)
    table.refused("a", 0.5)
    assert table.free_slots("a", 0.9) == 0
    table.refused("a", 0.95)
    table.update(presence("a"), 0.96)
    assert table.free_slots("a", 0.97) == 0

    assert table.free_slots("a", 0.96 + 2 * FULL_S) == 8


def test_a_worker_that_always_says_that_it_is_free_is_asked_less_and_less() -> None:
    """Of one that refuses all that is placed, and announces room ten times a second, few refusals are got (H62)."""
    table = table_of("a")
    refusals = 0
    for tick in range(600):
        now = tick / 10
        table.update(presence("a"), now)
        if table.free_slots("a", now):
            refusals += 1
            # A burst that was on its way counts once.
            for _ in range(8):
                table.placed("a", 100, now)
            for _ in range(8):
                table.refused("a", now + 0.01)

    assert refusals <= 14


def test_requests_that_are_refused_together_count_once() -> None:
    """They were on their way when the first of them was refused."""
    table = table_of("a")
    for _ in range(8):
        table.refused("a", 1)
    table.update(presence("a"), 1.01)

    assert table.free_slots("a", 1 + FULL_S) == 8


def test_an_admission_makes_refusals_forgotten() -> None:
    """A worker that has admitted what was placed is closed for a short while by its next refusal."""
    table = table_of("a")
    for now in (1, 2, 3, 4):
        table.refused("a", now)
    table.admitted("a")
    table.refused("a", 5)
    table.update(presence("a"), 5.01)

    assert table.free_slots("a", 5 + FULL_S) == 8


def test_a_silent_worker_gets_nothing_for_ten_seconds() -> None:
    """Whatever it announces meanwhile, as another incarnation, too (H62)."""
    table = table_of("a")
    table.placed("a", 0, 1)
    table.silent("a", 2)
    for now in range(3, 12):
        table.update(presence("a", incarnation=f"i{now}"), now)
        assert table.free_slots("a", now) == 0

    assert SILENT_S == 10
    assert table.free_slots("a", 12) == 8


def test_a_worker_without_kv_cache_has_no_room() -> None:
    """Another request would take the KV cache of a running one."""
    table = LoadTable()
    table.update(presence("a", engine_stats=EngineStats(kv_cache_use=FULL_KV)), 0)
    table.update(presence("b", engine_stats=EngineStats(kv_cache_use=0.5)), 0)

    assert (table.free_slots("a", 0), table.free_slots("b", 0)) == (0, 8)


def test_prompts_that_wait_are_computed_at_the_announced_rate() -> None:
    """What was placed is work ahead until the worker has had time for it, also when its rate changes meanwhile."""
    table = LoadTable()
    table.update(presence("a", engine_stats=rates(prefill=1000)), 0)
    table.placed("a", 2000, 0)
    table.placed("a", 1000, 1)
    assert load_of(table).backlog(1) == 2000
    table.update(presence("a", engine_stats=rates(prefill=2000)), 2)
    assert load_of(table).backlog(2) == 1000

    assert load_of(table).backlog(2.25) == 500
    assert load_of(table).backlog(9) == 0


def test_a_worker_without_a_rate_counts_as_the_typical_one() -> None:
    """It has just started; where no worker has announced a rate, all count with a constant."""
    table = LoadTable()
    for now, rate in enumerate((None, 1000, 2000, 4000)):
        table.update(presence(str(now), engine_stats=rates(prefill=rate)), now)
    table.placed("0", 24_000, 3)
    assert load_of(table, "0").backlog(4) == 16_000

    for worker in ("0", "new"):
        table.update(presence(worker), 4)
    table.placed("new", 12_000, 4)
    # The median of the other rates, also for what was placed before.
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
        # It finds most of each prompt cached, or computes more prompts between its steps.
        (rates(prefill=500, decode=100), 1),
        (rates(prefill=1000, decode=50), 1),
    ],
)
def test_a_slow_worker_is_slow_at_prompts_and_at_tokens(rates_of_c: EngineStats, slowness: float) -> None:
    """With half of each rate that it announces it counts as about twice as slow, and the others as equal."""
    table = LoadTable()
    stats = {"a": rates(prefill=1000, decode=100), "b": rates(prefill=1200, decode=110), "c": rates_of_c}
    for now in range(3):
        for worker, each in stats.items():
            table.update(presence(worker, engine_stats=each), now)

    assert (load_of(table, "a").slowness, load_of(table, "b").slowness) == (1, 1)
    assert load_of(table, "c").slowness == pytest.approx(slowness, abs=0.25)


def test_short_ends_of_cached_prompts_do_not_make_a_worker_slow() -> None:
    """A rate that falls because little is left to compute counts for some time as it was."""
    table = LoadTable()
    for now in range(30):
        table.update(presence("a", engine_stats=rates(prefill=1000)), now)
        table.update(presence("b", engine_stats=rates(prefill=1000 if now < 5 else 200)), now)

    assert load_of(table, "b").slowness == 1


def test_more_running_requests_do_not_make_a_worker_slow() -> None:
    """Tokens of many requests come slower each and faster together: the rate is seen beside their number."""
    table = LoadTable()
    for now in range(30):
        for worker, running in (("a", 4), ("b", 64), ("c", 4)):
            decode = running / (0.01 * (1 + 0.01 * running))
            table.update(presence(worker, engine_stats=rates(decode=decode, running=running)), now)

    assert [load_of(table, worker).slowness for worker in "abc"] == [1, 1, 1]


any_rate = st.none() | st.floats(min_value=0, allow_infinity=False, allow_nan=False)


@given(st.lists(st.tuples(st.sampled_from("abc"), any_rate, any_rate, st.integers(0, 2**62)), max_size=20))
def test_no_announced_rate_breaks_the_arithmetic(announced: list[tuple[str, float | None, float | None, int]]) -> None:
    """Slowness is between 1 and its bound, and a backlog finite, whatever workers announce (H62)."""
    table = LoadTable()
    for now, (worker, prefill, decode, running) in enumerate(announced):
        table.update(presence(worker, engine_stats=rates(prefill, decode, running)), now)
        table.placed(worker, 10**6, now)
        load = load_of(table, worker)

        assert load.slowness == 1 or SLOW <= load.slowness <= SLOWEST
        assert math.isfinite(load.backlog(now))
        assert load.backlog(now + 10**7 * len(announced)) == 0


def test_the_workers_are_bounded() -> None:
    """Beyond the bound a worker is not known, until another one is gone."""
    table = LoadTable()
    for i in range(MAX_WORKERS):
        table.update(presence(str(i)), 0)
    table.update(presence("new"), 0)
    assert table.get("new") is None
    table.remove("0")
    table.update(presence("new"), 0)

    assert table.get("new") is not None
    assert len(table) == MAX_WORKERS
