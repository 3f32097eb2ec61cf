"""Prometheus metrics of the fleet: the workers by their presence, the queues, and this service's link to the bus.

Nothing is stored between scrapes. A lost worker has no series. The counters of a restarted worker begin at 0, as
Prometheus expects of counters.
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
"""Seconds that a scrape waits for the fleet. Prometheus cancels a scrape after ten seconds."""
WAITING: Final = "vllm:num_requests_waiting"
QUEUE_ENGINE: Final = "queue."
"""Label `engine` of requests that wait in a queue. A worker's name cannot contain a dot."""
CLIENT_COUNTERS: Final = {
    "requests": "Published requests, counted for each attempt and phase of each sample",
    "direct": "Requests published directly to the worker that the client selected",
    "placements_refused": "Directly published requests that the worker rejected; they went to the queue",
    "expected_cached_tokens": "Prompt tokens of ended direct requests that the client expected in the workers' caches",
    "placed_cached_tokens": "Prompt tokens of the same requests that the workers found in their caches",
    "prefill_legs": "Requests that went to a prefill worker first; a decode worker continues them",
    "republished": "Publishes repeated because the queue did not acknowledge the first one",
    "orphans": "Requests that left the queue without an offer and were published again",
    "attempts_lost": "Attempts ended by the client because their worker or their data was lost",
    "frames": "Received frames, including heartbeats",
    "duplicate_frames": "Received frames that the client already had",
    "missing_frames": "Frames discarded because an earlier frame was missing; the client requested all of them again",
    "stale_frames": "Frames of an ended link, or of an ended incarnation of the worker or client",
    "resends_asked": "Requests for retransmission of missing frames",
    "late_chunks": "Chunks of ended calls and ended attempts",
    "bad_messages": "Frames that could not be decoded",
    "spans_exported": "Request spans that the collector accepted",
    "spans_failed": "Request spans that were sent and that the collector did not accept",
    "spans_dropped": "Spans that were not sent: too many in a second, or the exporter's queue was full",
    "dropped_msgs": "Messages that the connection discarded unread; frames among them were requested again",
}
"""Monotonic fields of `ClientStats`, with their help texts."""


class FleetCollector(Collector):
    """Collects the last fleet state: set `latest` to the result of `ask`."""

    def __init__(self, rb: bus.Client) -> None:
        self._rb = rb
        self.latest: bus.FleetState | None = None

    async def ask(self) -> bus.FleetState | None:
        """Return the current state of the fleet; None if the bus does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._rb.fleet.state()
        except (RollbusError, TimeoutError) as error:
            logger.warning("metrics.fleet_read_failed error=%r", error)
            return None

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
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
            "rollbus_client_unread_bytes", "Bytes of results that HTTP clients have not read yet", stats.unread_bytes
        )
        for name, text in CLIENT_COUNTERS.items():
            yield CounterMetricFamily(f"rollbus_client_{name}", text, getattr(stats, name))
        yield _counter(
            "rollbus_client_retries",
            "Attempts that followed a lost attempt of the same request",
            "model",
            stats.retries,
        )
        yield _counter(
            "rollbus_client_placed",
            "Requests by destination and reason: the queue (queued), or the worker that has a prefix of the prompt"
            " cached (placed_prefix), serves the same group (placed_group) or session (placed_session), or is able to"
            " serve a request that others cannot (placed_able)",
            "reason",
            stats.placed,
        )
        yield _counter(
            "rollbus_client_prefill_fallbacks",
            "Attempts that a decode worker served alone although the fleet has prefill workers",
            "reason",
            stats.prefill_fallbacks,
        )
        waits = HistogramMetricFamily(
            "rollbus_client_queue_wait_seconds",
            "Seconds from the publication of a request to a worker's offer, for each attempt",
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
            # For programs that add requests as long as none waits at an engine.
            for model in sorted({queue.model for queue in queues}):
                waiting = sum(queue.waiting for queue in queues if queue.model == model)
                metric.add_sample(WAITING, dict(zip(VLLM_LABELS, (model, QUEUE_ENGINE, ""), strict=True)), waiting)
        yield metric


def _queues(queues: Sequence[bus.QueueDepth]) -> Iterator[Metric]:
    labels = ("model", "lane")
    waiting = GaugeMetricFamily(
        "rollbus_queue_waiting", "Requests that the queue has not delivered to a worker", labels=labels
    )
    in_hand = GaugeMetricFamily(
        "rollbus_queue_in_hand",
        "Requests that the queue delivered to a worker and that have no queue ack yet",
        labels=labels,
    )
    for queue in queues:
        waiting.add_metric((queue.model, queue.lane), queue.waiting)
        in_hand.add_metric((queue.model, queue.lane), queue.in_hand)
    yield waiting
    yield in_hand
