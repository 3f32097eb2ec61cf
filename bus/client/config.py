"""The configuration of one client, and its counters with histograms of durations by model."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from ..nats.server import Server
from ..protocol.queue.placement import PlacementReason
from ..protocol.queue.prefill_queue import PrefillFallback
from ..subjects import Subjects
from ..tracing.spans import Tracing

BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""Upper bounds of the buckets in seconds, from one round trip to the longest usual request."""
MAX_MODELS: Final = 256
"""Maximum number of models in a client's counters, more than one client uses. Beyond it, the counters of the model that
was counted first are removed. They begin at 0 again with its next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Name, connection and limits of one client."""

    server: Server
    subjects: Subjects
    client: str
    """Name of the client in subjects."""
    incarnation: str = ""
    """Id of this lifetime of the name: a client that connects again under the same name has another incarnation."""
    worker_grace_s: float
    """Seconds that a request waits for a worker when its model has none and none starts."""
    wait_for_workers_s: float = 0.0
    """Seconds that a new request waits for such a worker; 0: it fails at once."""
    max_unread_bytes: int
    """Unread bytes of all results of the client above which batches open no more requests."""
    prefill_min_tokens: int
    """Prompts of at least this many tokens go to a prefill worker first, if the fleet has one."""
    placement: bool = True
    """True if the client may send requests directly to a worker. False: all requests go through the queue."""
    tracing: Tracing = False
    """Spans of requests: off (False), configured by the environment (True), or by this provider."""


class Histogram:
    """Counts durations of one kind.

    Args:
        bounds: upper bounds of the buckets in seconds.
    """

    __slots__ = ("_bounds", "counts", "total_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of durations in each bucket, as in `Durations`."""
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of durations up to it) pairs. The bound of the last pair is infinity."""
        return list(zip((*map(float, self._bounds), math.inf), accumulate(self.counts), strict=True))


@dataclass(frozen=True, slots=True)
class Durations:
    """A copy of the durations of one kind."""

    counts: tuple[int, ...]
    """Number of durations in each bucket: up to its bound in `BOUNDS_S` and above the previous bound. The last number
    counts the durations above all bounds."""
    total_s: float
    """Sum of all durations in seconds."""

    def cumulative(self) -> list[tuple[float, int]]:
        """Return (bound, number of durations up to it) pairs. The bound of the last pair is infinity."""
        return list(zip((*BOUNDS_S, math.inf), accumulate(self.counts), strict=True))


class DurationsByModel:
    """Counts durations by model. One thread writes, any thread may copy."""

    def __init__(self) -> None:
        self._found: dict[str, Histogram] = {}

    def add(self, model: str, seconds: float) -> None:
        """Count one duration."""
        if model not in self._found:
            if len(self._found) >= MAX_MODELS:
                del self._found[next(iter(self._found))]
            self._found[model] = Histogram(BOUNDS_S)
        self._found[model].observe(seconds)

    def copy(self) -> dict[str, Durations]:
        """Return a copy of all counts."""
        return {model: Durations(tuple(each.counts), each.total_s) for model, each in list(self._found.items())}


@dataclass(slots=True, kw_only=True)
class ClientStats:
    """Counters since the client connected: published requests, losses, repeats and dropped data."""

    requests: int = 0
    """Published requests: one for each attempt of each child of each request."""
    direct: int = 0
    """Requests that the client sent directly to the worker at which it placed them."""
    placed: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in PlacementReason})
    """By `PlacementReason`: where the placement sent requests, including the queue."""
    placements_refused: int = 0
    """Placed requests that their worker rejected. They went to the queue."""
    expected_cached_tokens: int = 0
    """For placed requests that have ended: prompt tokens that the client expected in the caches of their workers."""
    placed_cached_tokens: int = 0
    """For the same requests: prompt tokens that their workers found in their caches."""
    republished: int = 0
    """Publications repeated because the queue did not answer."""
    prefill_legs: int = 0
    """Requests that the client sent directly to a prefill worker; a decode worker continues them."""
    prefill_fallbacks: dict[str, int] = field(default_factory=lambda: {str(reason): 0 for reason in PrefillFallback})
    """By `PrefillFallback`: attempts that a decode worker served alone although the fleet has prefill workers."""
    orphans: int = 0
    """Requests that left the queue without a worker's offer and were published again."""
    attempts_lost: int = 0
    """Attempts lost with their worker or with messages in transit. Another attempt or an error followed."""
    frames: int = 0
    """Frames that were decoded, including heartbeats."""
    duplicate_frames: int = 0
    """Frames that the client had already received."""
    missing_frames: int = 0
    """Frames dropped because an earlier frame was missing. The client requested all of them again."""
    stale_frames: int = 0
    """Frames of an ended link, or of an ended incarnation of the worker or the client."""
    resends_asked: int = 0
    """Number of times that the client requested missing frames."""
    late_chunks: int = 0
    """Chunks of ended calls and attempts. Their workers received an abort."""
    bad_messages: int = 0
    """Frames that could not be decoded."""
    dropped_msgs: int = 0
    """Messages that nats-py dropped unread. The client requested the frames among them again."""
    spans_exported: int = 0
    """Spans that the collector received. With a provider of the caller: spans that the provider received."""
    spans_failed: int = 0
    """Spans that were sent and that the collector did not receive."""
    spans_dropped: int = 0
    """Spans that were not sent: too many in one second, or no room in the exporter's queue."""
    unread_bytes: int = 0
    """Bytes of results that callers have not read, at this moment."""
    retries: dict[str, int] = field(default_factory=dict)
    """By model: attempts that followed a lost attempt."""
    queue_waits: dict[str, Durations] = field(default_factory=dict)
    """By model: seconds from the publication of a request to a worker's offer, for each attempt."""
