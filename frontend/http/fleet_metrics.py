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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector

from ... import bus
from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerPresence

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
WORKER_TIMES: Final = {
    "time_to_first_token_seconds": (
        "first_tokens",
        "From a request's offer to its first token, as the engine makes it: without the time in the queue",
    ),
    "inter_token_seconds": ("next_tokens", "Time between steps of a request over the tokens of the later one"),
}
"""Sums of times by their names here: the field of `WorkerCounters` with their number, that with the seconds is named
after it, and what they are."""
WORKER_COUNTERS: Final = {
    "requests": "Requests that it has offered to clients: each attempt of each sample is one",
    "rejected": "Requests that it has refused",
    "ended": "Requests that its engine has ended",
    "failed": "Requests that it has ended with an error; those over budget, and some of lost clients, among them",
    "aborted": "Requests that it has ended because their clients wanted no more of them",
    "over_budget": "Requests that it has ended because clients had left too much untaken",
    "returned": "Requests that it has given back to the queue",
    "given_up": "Requests that it has given up because its lease had run out",
    "prompt_tokens": "Prompt tokens of the requests offered; a resumed attempt's prompt ends with what came before",
    "generated_tokens": "Tokens that its engine has made, whether or not they were taken",
    "routing_bytes": "Routed experts that its engine has made, raw",
    "credit_stalls": "How often what was for a client had to wait for its credit: the client does not keep up",
    "frames": "Frames published, those sent again included",
    "frames_resent": "Frames sent again because a client missed them",
    "frames_lost": "Frames that could not be published; on a link they are sent again",
    "links_broken": "Links given up for new ones, as their clients had lost their place",
    "clients_lost": "Lives of clients that ended: closed, silent for too long, or followed by another",
    "requests_of_lost_clients": "Requests that nobody waited for any more",
    "fences": "How often it has fenced itself: its lease had run out unconfirmed",
    "dropped_msgs": "Messages that its connection has dropped unread",
}
"""Fields of `WorkerCounters`, and what they are."""
CLIENT_COUNTERS: Final = {
    "requests": "Requests published: one for each attempt, or leg of an attempt, of each sample",
    "direct": "Requests that went straight to a worker, for their session or their weights",
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


def _workers(workers: Sequence[WorkerPresence]) -> Iterator[Metric]:
    labels = ("worker", "model")
    counted = [((each.worker, each.model), each.counters) for each in workers if each.counters is not None]
    for field, (name, text) in GAUGES.items():
        gauge = GaugeMetricFamily(f"rollbus_worker_{name}", text, labels=labels)
        for worker in workers:
            value = getattr(worker, field)
            if value is not None:
                gauge.add_metric((worker.worker, worker.model), value)
        yield gauge
    for name, (field, text) in WORKER_TIMES.items():
        times = SummaryMetricFamily(f"rollbus_worker_{name}", text, labels=labels)
        for key, counters in counted:
            times.add_metric(key, getattr(counters, field), getattr(counters, f"{field}_s"))
        yield times
    for field, text in WORKER_COUNTERS.items():
        counter = CounterMetricFamily(f"rollbus_worker_{field}", text, labels=labels)
        for key, counters in counted:
            counter.add_metric(key, getattr(counters, field))
        yield counter
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
