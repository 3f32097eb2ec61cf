"""The fleet as Prometheus reads it: its workers as they announce themselves, its queues, and this service's link to it.

Nothing is kept between scrapes: a worker that is gone has no series any more, and the counters of one that was started
anew begin at 0, which is what Prometheus expects of counters.
"""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ... import bus
from ...bus.worker_metrics import VLLM_LABELS, worker_families
from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerPresence

__all__ = ["FleetCollector"]

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 3.0
"""A scrape does not wait longer for the fleet: Prometheus gives up after ten seconds."""
WAITING: Final = "vllm:num_requests_waiting"
QUEUE_ENGINE: Final = "queue."
"""The label `engine` of what waits in a queue: no worker may have a name with a dot."""
CLIENT_COUNTERS: Final = {
    "requests": "Requests published: one for each attempt, or leg of an attempt, of each sample",
    "direct": "Requests that went straight to the worker at which they were placed",
    "placements_refused": "Placed requests that their worker did not take; they went to the queue",
    "expected_cached_tokens": "Of placed requests that have ended: prompt tokens expected in their workers' caches",
    "placed_cached_tokens": "Of the same requests: prompt tokens that their workers found there",
    "prefill_legs": "Requests that went to a prefill worker first, to be gone on with by a decode worker",
    "republished": "Publishes repeated for want of the queue's answer",
    "orphans": "Requests that had left the queue without a worker's offer, and were published again",
    "attempts_lost": "Attempts given up because of their worker or of what was under way",
    "frames": "Frames taken in, heartbeats included",
    "duplicate_frames": "Frames that were there already",
    "missing_frames": "Frames dropped because one before them was missing; all of them were asked for again",
    "stale_frames": "Frames of a link, or of a life of either side, that was over",
    "resends_asked": "How often missing frames were asked for",
    "late_chunks": "Chunks of calls and attempts that had ended",
    "bad_messages": "Frames that did not decode",
    "spans_exported": "Spans of requests that the collector has taken",
    "spans_failed": "Spans that were sent, and that the collector did not take",
    "spans_dropped": "Spans that were not sent: too many in a second, or no room in the exporter's queue",
    "dropped_msgs": "Messages that the connection dropped unread; frames among them were asked for again",
}
"""Fields of `ClientStats` that only grow, and what they are."""


class FleetCollector(Collector):
    """Collects what was last asked for: set `latest` to what `ask` returned."""

    def __init__(self, rb: bus.Client) -> None:
        self._rb = rb
        self.latest: bus.FleetState | None = None

    async def ask(self) -> bus.FleetState | None:
        """The state of the fleet now; None if the bus does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._rb.fleet.state()
        except (RollbusError, TimeoutError) as error:
            logger.warning("metrics.fleet_read_failed error=%r", error)
            return None

    def collect(self) -> Iterator[Metric]:
        """All families."""
        state = self.latest
        yield GaugeMetricFamily("rollbus_bus_up", "1 if the bus answered this scrape", 0 if state is None else 1)
        queues = () if state is None else state.queues
        yield from _workers(() if state is None else state.workers, queues)
        yield from _queues(queues)
        yield from self._client()

    def _client(self) -> Iterator[Metric]:
        try:
            stats = self._rb.stats()
        except RollbusError:
            return
        yield GaugeMetricFamily(
            "rollbus_client_unread_bytes", "Results that HTTP clients have not taken yet", stats.unread_bytes
        )
        for name, text in CLIENT_COUNTERS.items():
            yield CounterMetricFamily(f"rollbus_client_{name}", text, getattr(stats, name))
        yield _counter(
            "rollbus_client_retries",
            "Attempts that followed one that was given up: a worker was lost, and another went on",
            "model",
            stats.retries,
        )
        yield _counter(
            "rollbus_client_placed",
            "Where requests went when it was decided, by reason: to the queue (queued), or to the worker that has a"
            " beginning of their prompt (placed_prefix), their group (placed_group) or their session (placed_session),"
            " or that can serve them where others cannot (placed_able)",
            "reason",
            stats.placed,
        )
        yield _counter(
            "rollbus_client_prefill_fallbacks",
            "Attempts that a decode worker served alone in a fleet with prefill workers",
            "reason",
            stats.prefill_fallbacks,
        )
        waits = HistogramMetricFamily(
            "rollbus_client_queue_wait_seconds",
            "From the publishing of a request to a worker's offer to run it, again for each attempt",
            labels=("model",),
        )
        for model, durations in stats.queue_waits.items():
            buckets = [("+Inf" if math.isinf(end_s) else str(end_s), count) for end_s, count in durations.cumulative()]
            waits.add_metric((model,), buckets, durations.total_s)
        yield waits


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        counter.add_metric((key,), value)
    return counter


def _workers(workers: Sequence[WorkerPresence], queues: Sequence[bus.QueueDepth]) -> Iterator[Metric]:
    for family in worker_families(workers):
        metric = Metric(family.name, family.text, family.kind)
        for sample in family.samples:
            metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
        if family.name == WAITING:
            # For programs that ask for more work while none waits at an engine.
            for model in sorted({queue.model for queue in queues}):
                waiting = sum(queue.waiting for queue in queues if queue.model == model)
                metric.add_sample(WAITING, dict(zip(VLLM_LABELS, (model, QUEUE_ENGINE, ""), strict=True)), waiting)
        yield metric


def _queues(queues: Sequence[bus.QueueDepth]) -> Iterator[Metric]:
    labels = ("model", "lane")
    waiting = GaugeMetricFamily("rollbus_queue_waiting", "Requests that no worker has been handed", labels=labels)
    in_hand = GaugeMetricFamily("rollbus_queue_in_hand", "Requests handed to a worker and not yet acked", labels=labels)
    for queue in queues:
        waiting.add_metric((queue.model, queue.lane), queue.waiting)
        in_hand.add_metric((queue.model, queue.lane), queue.in_hand)
    yield waiting
    yield in_hand
