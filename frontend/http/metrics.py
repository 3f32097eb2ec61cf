"""Prometheus metrics of the service, of its workers by their presence, of the queues and of the link to the bus.

The number of labels is bounded. Routes come from the route tables, and models and workers from the fleet. Only the
models that were used last have series, and of each only the newest weight versions.

Nothing of the fleet is stored between scrapes. A lost worker has no series. The counters of a restarted worker begin at
0, as Prometheus expects of counters.
"""

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self, TypeVar

from prometheus_client import CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from ... import bus
from ...bus.client.config import Durations, Histogram
from ...bus.worker_metrics import VLLM_LABELS, worker_families
from ...schemas.errors import RollbusError
from ...schemas.presence import WorkerPresence

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


CLIENT_TABLES: Final = {
    "retries": ("model", "Attempts that followed a lost attempt of the same request"),
    "placed": (
        "reason",
        (
            "Requests by destination and reason: the queue (queued), or the worker that has a prefix of the prompt"
            " cached (placed_prefix), serves the same group (placed_group) or session (placed_session), or is able to"
            " serve a request that others cannot (placed_able)"
        ),
    ),
    "prefill_fallbacks": (
        "reason",
        "Attempts that a decode worker served alone although the fleet has prefill workers",
    ),
}
"""Fields of `ClientStats` with counts by a label: the label and the help text."""

QUEUE_GAUGES: Final = {
    "waiting": "Requests that the queue has not delivered to a worker",
    "in_hand": "Requests that the queue delivered to a worker and that have no queue ack yet",
}
"""Fields of `QueueDepth`, with their help texts."""


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
        for name, (label, text) in CLIENT_TABLES.items():
            counter = CounterMetricFamily(f"rollbus_client_{name}", text, labels=(label,))
            for key, value in getattr(stats, name).items():
                counter.add_metric((key,), value)
            yield counter
        waits = HistogramMetricFamily(
            "rollbus_client_queue_wait_seconds",
            "Seconds from the publication of a request to a worker's offer, for each attempt",
            labels=("model",),
        )
        for model, durations in stats.queue_waits.items():
            _add_histogram(waits, (model,), durations)
        yield waits


def _add_histogram(family: HistogramMetricFamily, labels: Sequence[str], found: "Durations | Histogram") -> None:
    buckets = [("+Inf" if math.isinf(end_s) else str(end_s), count) for end_s, count in found.cumulative()]
    family.add_metric(labels, buckets, found.total_s)


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
    for name, text in QUEUE_GAUGES.items():
        gauge = GaugeMetricFamily(f"rollbus_queue_{name}", text, labels=("model", "lane"))
        for queue in queues:
            gauge.add_metric((queue.model, queue.lane), getattr(queue, name))
        yield gauge


MAX_VERSIONS: Final = 8
"""Number of weight versions of a model that have series. A training run creates a version in each step."""
MAX_MODELS: Final = 64
"""Number of models that have series, beside those with open requests: more than a fleet serves at once. Names of models
come from workers, so a worker could make endless series."""
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


@dataclass(slots=True)
class HttpRequestRecord:
    """The labels of one HTTP request, which is counted at the end of the block that has it."""

    metrics: "Metrics"
    method: str
    route: str
    status: int = 500
    """500 until the request has an answer. An unexpected failure keeps this value."""
    model: str = ""
    """The requested model; empty if the request needs no model, or if no worker serves the model."""
    begun: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> Self:
        """Return the record."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Count the request with any outcome."""
        self.metrics.note_use(self.model)
        self.metrics.requests[self.method, self.route, str(self.status), self.model] += 1
        self.metrics.request_seconds[self.method, self.route].observe(time.perf_counter() - self.begun)


S = TypeVar("S", float, Histogram)


class Series(dict[tuple[str, ...], S]):
    """The series of one metric by the values of its labels. Each exists from its first use on.

    Only the service's loop uses them. Those of prometheus_client have locks, which cost more than a token's event.
    """

    def __init__(self, make: Callable[[], S], family: Callable[..., Metric], labels: Sequence[str]) -> None:
        super().__init__()
        self._make: Callable[[], S] = make
        self._family = family
        self.labels = labels

    def __missing__(self, labels: tuple[str, ...]) -> S:
        series: S = self._make()
        self[labels] = series
        return series

    def collect(self) -> Metric:
        """Return the metric with all series."""
        metric = self._family(labels=self.labels)
        family: Any = metric
        for labels, series in self.items():
            if isinstance(series, Histogram):
                _add_histogram(family, labels, series)
            else:
                family.add_metric(labels, series)
        return metric


class Metrics(Collector):
    """The metrics of one service, in their own registry."""

    def __init__(self, rb: bus.Client) -> None:
        self._registry = CollectorRegistry()
        self._fleet = FleetCollector(rb)
        self._registry.register(self._fleet)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        # The labels of each weight version that has series, by model.
        self._versions: dict[str, OrderedDict[int, tuple[str, str]]] = {}
        # Number of open token requests by model, the least recently used model first.
        self._models: OrderedDict[str, int] = OrderedDict()
        self._all: list[Series[float] | Series[Histogram]] = []
        self._make_metrics()

    def _make_metrics(self) -> None:
        counter, gauge = partial(self._add, CounterMetricFamily, float), partial(self._add, GaugeMetricFamily, float)
        seconds = partial(self._add, HistogramMetricFamily, partial(Histogram, SECONDS))
        token_seconds = partial(self._add, HistogramMetricFamily, partial(Histogram, TOKEN_SECONDS))
        of_model, of_version = ("model",), ("model", "weight_version")
        self.requests = counter(
            "rollbus_http_requests",
            "Answered HTTP requests; status 499: the client disconnected before the answer",
            ("method", "route", "status", "model"),
        )
        self.request_seconds = seconds(
            "rollbus_http_request_seconds",
            "Seconds from a request's head to the end of its answer",
            ("method", "route"),
        )
        self.in_flight = gauge("rollbus_http_generations_in_flight", "Open token requests", of_model)
        self.waiting = gauge(
            "rollbus_http_generations_waiting",
            "Token requests that wait in the service until the workers have capacity",
            of_model,
        )
        self.ended = counter(
            "rollbus_http_generations",
            "Ended token requests by outcome: done; left (the client disconnected, or a stop string ended the answer"
            " before the engine did); or the bus's error code",
            ("model", "outcome"),
        )
        self.prompt_tokens = counter(
            "rollbus_http_prompt_tokens", "Prompt tokens of all requests, with any outcome", of_model
        )
        self.tokens = counter(
            "rollbus_http_generated_tokens", "Generated tokens by the weight version that generated them", of_version
        )
        self.routing_bytes = counter(
            "rollbus_http_routing_bytes",
            "Raw bytes of routed experts by weight version; of an unstreamed result, by that of its last token",
            of_version,
        )
        self.seconds = seconds(
            "rollbus_http_generation_seconds", "Seconds from a token request to its last token", of_model
        )
        self.first_token = seconds(
            "rollbus_http_time_to_first_token_seconds",
            "For streams: seconds from the request to the first token, including the time in the queue",
            of_version,
        )
        self.inter_token = token_seconds(
            "rollbus_http_inter_token_seconds",
            "For streams: seconds between two chunks, divided by the tokens of the later chunk",
            of_version,
        )

    def _add(
        self, family: Callable[..., Metric], make: Callable[[], S], name: str, text: str, labels: tuple[str, ...]
    ) -> Series[S]:
        """Return a new metric."""
        series = Series(make, partial(family, name, text), labels)
        self._all.append(series)
        return series

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the service itself."""
        return (series.collect() for series in self._all)

    def note_use(self, model: str, num_opened: int = 0) -> None:
        """Count opened or closed token requests of a model. Remove the series of models that were not used for long."""
        self._models[model] = self._models.get(model, 0) + num_opened
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            # The series of open requests stay: a gauge without its increments would fall below zero.
            idle = next((name for name, num_open in self._models.items() if not num_open and name != model), None)
            if idle is None:
                return
            del self._models[idle]
            self._versions.pop(idle, None)
            for series in self._all:
                for labels in [each for each in series if ("model", idle) in zip(series.labels, each, strict=True)]:
                    del series[labels]

    def version(self, model: str, weight_version: int) -> tuple[str, str]:
        """Return the labels of a version.

        If there are too many versions, remove the series of the least recently used one.
        """
        known = self._versions.get(model)
        if known is None:
            known = self._versions[model] = OrderedDict()
        labels = known.get(weight_version)
        if labels is None:
            labels = known[weight_version] = (model, str(weight_version))
            if len(known) > MAX_VERSIONS:
                _, oldest = known.popitem(last=False)
                for series in (self.tokens, self.routing_bytes, self.first_token, self.inter_token):
                    series.pop(oldest, None)
        else:
            known.move_to_end(weight_version)
        return labels

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        found = await self._fleet.ask()
        # No `await` from here on, so that concurrent scrapes do not mix.
        self._fleet.latest = found
        return generate_latest(self._registry)


@dataclass(slots=True)
class GenerationTimer:
    """The metrics of one token request."""

    metrics: Metrics
    model: str
    prompt_len: int = 0
    begun: float = field(default_factory=time.perf_counter)
    outcome: str = "done"
    """The outcome if no exception ends the request."""
    _last: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Count the request as open."""
        self.metrics.prompt_tokens[self.model,] += self.prompt_len
        self.metrics.note_use(self.model, 1)
        self.metrics.in_flight[self.model,] += 1
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Count the outcome."""
        if isinstance(error, asyncio.CancelledError | ClientDisconnect | GeneratorExit):
            self.outcome = "left"
        elif error is not None:
            is_known = isinstance(error, RollbusError)
            self.outcome = str(getattr(error, "code", "bus_unavailable")) if is_known else "internal_error"
        self.metrics.ended[self.model, self.outcome] += 1
        self.metrics.seconds[self.model,].observe(time.perf_counter() - self.begun)
        self.metrics.in_flight[self.model,] -= 1
        self.metrics.note_use(self.model, -1)

    def add(self, chunk: bus.Chunk) -> None:
        """Count a received chunk."""
        child, num_tokens, metrics = chunk.child, chunk.num_tokens, self.metrics
        labels = metrics.version(self.model, chunk.weight_version)
        if chunk.routed_experts is not None:
            metrics.routing_bytes[labels] += len(chunk.routed_experts.data)
        if not num_tokens:
            return
        now = time.perf_counter()
        last = self._last.get(child)
        if last is None:
            metrics.first_token[labels].observe(now - self.begun)
        else:
            metrics.inter_token[labels].observe((now - last) / num_tokens)
        self._last[child] = now
        metrics.tokens[labels] += num_tokens

    def finished(self, generation: bus.Generation) -> None:
        """Count a result that was not streamed."""
        self.outcome = str(getattr(generation.error, "code", self.outcome))
        for sample in (generation, *generation.siblings):
            versions = sample.weight_versions.tolist()
            # Nearly all answers have one version.
            counts = {versions[0]: len(versions)} if len(set(versions)) == 1 else Counter(versions)
            for version, count in sorted(counts.items()):
                self.metrics.tokens[self.metrics.version(self.model, version)] += count
            if sample.routed_experts is not None and len(sample.weight_versions):
                labels = self.metrics.version(self.model, int(sample.weight_versions[-1]))
                self.metrics.routing_bytes[labels] += sample.routed_experts.nbytes
