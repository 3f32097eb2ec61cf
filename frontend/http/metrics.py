"""What the service counts and times, and what its workers say of themselves, as Prometheus reads it.

Labels are few: routes come from the tables, models and workers are those of the fleet, and only the newest weight
versions of a model have series of their own.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from starlette.requests import ClientDisconnect

from ... import bus
from ...schemas.errors import RollbusError
from .fleet_metrics import FleetCollector

__all__ = ["GenerationTimer", "HttpRequestRecord", "Metrics"]

MAX_VERSIONS: Final = 8
"""Weight versions of a model that have series: a training run makes one in each step."""
SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


@dataclass(slots=True)
class HttpRequestRecord:
    """What is known of one HTTP request."""

    status: int = 500
    """Until it has an answer: what fails unexpectedly has no other."""
    model: str = ""
    """Which it is for; empty where it is for none, or for one that nobody serves."""


_seen: ContextVar[HttpRequestRecord | None] = ContextVar("seen", default=None)


class Metrics:
    """The counters of one service, in a registry of their own."""

    def __init__(self, rb: bus.Client) -> None:
        # When each series began is of use to few, and would double their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._fleet = FleetCollector(rb)
        registry.register(self._fleet)
        ProcessCollector(registry=registry)
        self._versions: dict[str, OrderedDict[str, None]] = {}
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._requests = counter(
            "rollbus_http_requests",
            "HTTP requests that were answered; 499: the client left before",
            ("method", "route", "status", "model"),
        )
        self._request_seconds = histogram(
            "rollbus_http_request_seconds",
            "From a request's head to the end of its answer",
            ("method", "route"),
            buckets=SECONDS,
        )
        self._connections_cut = counter(
            "rollbus_http_connections_cut",
            "Connections closed without what their clients asked for: head_timeout, and too_many, without a whole"
            " request; busy, answered 503 as requests had all connections that they may have",
            ("reason",),
        )
        self.in_flight = gauge("rollbus_http_generations_in_flight", "Requests for tokens under way", ("model",))
        self.waiting = gauge(
            "rollbus_http_generations_waiting",
            "Requests for tokens that wait in the service while the workers have enough of them",
            ("model",),
        )
        self.ended = counter(
            "rollbus_http_generations",
            "Requests for tokens by how they ended: done; left (a client went away, or a stop string was found before"
            " the engine's end); the bus's error code",
            ("model", "outcome"),
        )
        self.prompt_tokens = counter(
            "rollbus_http_prompt_tokens", "Prompt tokens of all requests, whatever came of them", ("model",)
        )
        self.tokens = counter(
            "rollbus_http_generated_tokens",
            "Generated tokens by the weights that made them",
            ("model", "weight_version"),
        )
        self.routing_bytes = counter(
            "rollbus_http_routing_bytes",
            "Routed experts, raw, by the weights that made them; of what came whole, by those of the last token",
            ("model", "weight_version"),
        )
        self.seconds = histogram(
            "rollbus_http_generation_seconds", "From a request for tokens to its last one", ("model",), buckets=SECONDS
        )
        self.first_token = histogram(
            "rollbus_http_time_to_first_token_seconds",
            "Of streams: from the request to the first token, with the time in the queue",
            ("model", "weight_version"),
            buckets=SECONDS,
        )
        self.inter_token = histogram(
            "rollbus_http_inter_token_seconds",
            "Of streams: time between chunks over the tokens of the later one",
            ("model", "weight_version"),
            buckets=TOKEN_SECONDS,
        )

    @contextmanager
    def request(self, method: str, route: str) -> Iterator[HttpRequestRecord]:
        """Count one HTTP request, whatever comes of it."""
        seen = HttpRequestRecord()
        token = _seen.set(seen)
        begun = time.perf_counter()
        try:
            yield seen
        finally:
            _seen.reset(token)
            self._requests.labels(method, route, str(seen.status), seen.model).inc()
            self._request_seconds.labels(method, route).observe(time.perf_counter() - begun)

    def connection_cut(self, reason: str) -> None:
        """Count a connection that was closed without what its client asked for."""
        self._connections_cut.labels(reason).inc()

    def is_for(self, model: str) -> None:
        """The request under way is for this model, which live workers serve."""
        seen = _seen.get()
        if seen is not None:
            seen.model = model

    @contextmanager
    def generation(self, model: str, prompt_len: int) -> Iterator["GenerationTimer"]:
        """Count one request for tokens while it is under way, and how it ended."""
        self.is_for(model)
        self.prompt_tokens.labels(model).inc(prompt_len)
        progress = GenerationTimer(self, model)
        outcome = "internal_error"
        self.in_flight.labels(model).inc()
        try:
            yield progress
            outcome = "done"
        except (asyncio.CancelledError, ClientDisconnect, GeneratorExit):
            outcome = "left"
            raise
        except RollbusError as error:
            outcome = str(getattr(error, "code", "bus_unavailable"))
            raise
        finally:
            self.in_flight.labels(model).dec()
            self.ended.labels(model, outcome).inc()
            self.seconds.labels(model).observe(time.perf_counter() - progress.begun)

    def version(self, model: str, weight_version: int) -> str:
        """The label of a version; the series of the one that was longest not seen end when there are too many."""
        label = str(weight_version)
        known = self._versions.setdefault(model, OrderedDict())
        known[label] = None
        known.move_to_end(label)
        if len(known) > MAX_VERSIONS:
            oldest, _ = known.popitem(last=False)
            for metric in (self.tokens, self.routing_bytes, self.first_token, self.inter_token):
                metric.remove(model, oldest)
        return label

    async def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        found = await self._fleet.ask()
        # Nothing is awaited from here on: several scrapes do not mix.
        self._fleet.latest = found
        return generate_latest(self._registry)


@dataclass(slots=True)
class GenerationTimer:
    """One request for tokens."""

    metrics: Metrics
    model: str
    begun: float = field(default_factory=time.perf_counter)
    _last: dict[int, float] = field(default_factory=dict)

    def add(self, chunk: bus.Chunk) -> None:
        """Count a chunk as it comes."""
        metrics, child = self.metrics, chunk.child
        labels = self.model, metrics.version(self.model, chunk.weight_version)
        if chunk.routed_experts is not None:
            metrics.routing_bytes.labels(*labels).inc(len(chunk.routed_experts.data))
        if not chunk.num_tokens:
            return
        now = time.perf_counter()
        last = self._last.get(child)
        if last is None:
            metrics.first_token.labels(*labels).observe(now - self.begun)
        else:
            metrics.inter_token.labels(*labels).observe((now - last) / chunk.num_tokens)
        self._last[child] = now
        metrics.tokens.labels(*labels).inc(chunk.num_tokens)

    def finished(self, generation: bus.Generation) -> None:
        """Count a result that came whole."""
        for sample in (generation, *generation.siblings):
            for version, count in zip(*np.unique(sample.weight_versions, return_counts=True), strict=True):
                labels = self.model, self.metrics.version(self.model, int(version))
                self.metrics.tokens.labels(*labels).inc(int(count))
            if sample.routed_experts is not None and len(sample.weight_versions):
                labels = self.model, self.metrics.version(self.model, int(sample.weight_versions[-1]))
                self.metrics.routing_bytes.labels(*labels).inc(sample.routed_experts.nbytes)
