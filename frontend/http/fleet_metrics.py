"""The fleet as Prometheus reads it: its workers as they announce themselves, its queues, and this service's link to it.

Nothing is kept between scrapes: a worker that is gone has no series any more.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import bus
from schemas.errors import RollbusError
from schemas.presence import WorkerPresence

__all__ = ["FleetCollector"]

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 3.0
"""A scrape does not wait longer for the fleet: Prometheus gives up after ten seconds."""
GAUGES: Final = {
    "in_flight": ("in_flight", "Requests that the worker has admitted and not ended"),
    "queued": ("queued", "Requests that it has taken and its engine has not"),
    "free_slots": ("free_slots", "Requests that it would start at once"),
    "held_bytes": ("held_bytes", "What clients have not taken yet: it grows where credit or connections are missing"),
    "weight_version": ("weight_version", "Of the weights that it samples from"),
    "target_version": ("target_weight_version", "Of the weights that it should have"),
    "lease_age_s": ("lease_age_seconds", "Since an announcement of it was last confirmed"),
    "uptime_s": ("uptime_seconds", "Since it started"),
}
"""Fields of `WorkerPresence`, their names here, and what they are."""
CLIENT_HELP: Final = {
    "requests": "Messages published: one for each attempt of each child of each request",
    "republished": "Publishes repeated for want of the queue's answer",
    "attempts_lost": "Attempts given up because of their worker or of what was under way",
    "missing_frames": "Frames dropped because one before them was missing; all of them were asked for again",
    "late_chunks": "Chunks of calls and attempts that had ended",
    "dropped_msgs": "Messages that the connection dropped unread; frames among them were asked for again",
}
"""Of the counters of `ClientStats` that speak least for themselves."""


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
            logger.warning("metrics.no_fleet error=%r", error)
            return None

    def collect(self) -> Iterator[Metric]:
        """All families."""
        state = self.latest
        yield GaugeMetricFamily("rollbus_bus_up", "1 if the bus answered this scrape", 0 if state is None else 1)
        yield from _workers(() if state is None else state.workers)
        yield from _queues(() if state is None else state.queues)
        yield from self._client()

    def _client(self) -> Iterator[Metric]:
        try:
            stats = asdict(self._rb.stats())
        except RollbusError:
            return
        yield GaugeMetricFamily(
            "rollbus_client_unread_bytes", "Results that HTTP clients have not taken yet", stats.pop("unread_bytes")
        )
        for name, value in stats.items():
            words = name.replace("_", " ").capitalize()
            yield CounterMetricFamily(f"rollbus_client_{name}", CLIENT_HELP.get(name, words), value)


def _workers(workers: Sequence[WorkerPresence]) -> Iterator[Metric]:
    labels = ("worker", "model")
    for field, (name, words) in GAUGES.items():
        gauge = GaugeMetricFamily(f"rollbus_worker_{name}", words, labels=labels)
        for worker in workers:
            value = getattr(worker, field)
            if value is not None:
                gauge.add_metric((worker.worker, worker.model), value)
        yield gauge
    states = GaugeMetricFamily("rollbus_worker_state", "1 for the state that it is in", labels=(*labels, "state"))
    for worker in workers:
        states.add_metric((worker.worker, worker.model, str(worker.state)), 1)
    yield states


def _queues(queues: Sequence[bus.QueueDepth]) -> Iterator[Metric]:
    labels = ("model", "lane")
    waiting = GaugeMetricFamily("rollbus_queue_waiting", "Requests that no worker has been handed", labels=labels)
    in_hand = GaugeMetricFamily("rollbus_queue_in_hand", "Requests handed to a worker and not yet acked", labels=labels)
    for queue in queues:
        waiting.add_metric((queue.model, queue.lane), queue.waiting)
        in_hand.add_metric((queue.model, queue.lane), queue.in_hand)
    yield waiting
    yield in_hand
