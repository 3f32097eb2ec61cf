"""`LoadMeter` adds up the load reports of vLLM's engine cores. The tests use vLLM's own classes, but no engine."""

from typing import Any

import pytest

from rollbus.schemas.presence import EngineStats
from rollbus.workers.engines.vllm.feed import LoadMeter

pytestmark = pytest.mark.vllm


def step(at: float, *outputs: Any, engine: int = 0, **stats: Any) -> Any:
    """Return one step of one engine core."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats

    told = SchedulerStats(**stats) if stats else None
    return EngineCoreOutputs(engine_index=engine, outputs=list(outputs), scheduler_stats=told, timestamp=at)


def output(num_tokens: int, *, computed: int | None = None, scheduled_at: float = 0.0, preempted: int = 0) -> Any:
    """Return one request's output of a step; `computed` is set for its first tokens."""
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
    from vllm.v1.metrics.stats import PrefillStats

    events = [EngineCoreEvent(EngineCoreEventType.PREEMPTED, 1.0)] * preempted
    if computed is not None:
        events.append(EngineCoreEvent(EngineCoreEventType.SCHEDULED, scheduled_at))
    prefill = None if computed is None else PrefillStats(num_computed_tokens=computed)
    return EngineCoreOutput("r", [7] * num_tokens, events=events or None, prefill_stats=prefill)


def test_counts_of_replicas_are_added_and_their_cache_use_is_averaged() -> None:
    """Requests, counts and rates of replicas are added. The use of their KV caches is averaged."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    meter = LoadMeter()
    cache = PrefixCacheStats(queries=100, hits=32)
    for engine, start in enumerate((50.0, 9000.0)):
        first = output(1, computed=500, scheduled_at=start)
        meter.add(
            step(
                start + 0.5, first, engine=engine, num_running_reqs=2, num_waiting_reqs=1, num_skipped_waiting_reqs=1,
                kv_cache_usage=0.25 + 0.5 * engine, prefix_cache_stats=cache,
            )
        )  # fmt: skip
        # Two requests, of which the second produced two tokens, as with speculative decoding.
        meter.add(step(start + 0.6, output(1), output(2, preempted=1), engine=engine))

    assert meter.stats() == EngineStats(
        kv_cache_use=0.5,
        running=4,
        waiting=4,
        preemptions=2,
        prefix_cache_queries=200,
        prefix_cache_hits=64,
        prefill_tokens_per_s=2000.0,
        decode_tokens_per_s=60.0,
    )


def test_after_the_warm_up_an_idle_engine_reports_no_requests_and_no_rate() -> None:
    """After the warm-up, an idle engine reports 0 running requests and no rate."""
    meter = LoadMeter()
    meter.add(step(10.0, output(1, computed=5, scheduled_at=9.0), num_running_reqs=0))
    meter.restart()

    assert meter.stats() == EngineStats(
        kv_cache_use=0.0, running=0, waiting=0, preemptions=0, prefix_cache_queries=0, prefix_cache_hits=0
    )


def test_an_engine_without_statistics_reports_only_the_decode_rate() -> None:
    """For an engine without statistics, only the decode rate is known."""
    meter = LoadMeter()
    meter.add(step(10.0, output(1)))
    meter.add(step(10.5, output(1)))

    assert meter.stats() == EngineStats(decode_tokens_per_s=2.0)
