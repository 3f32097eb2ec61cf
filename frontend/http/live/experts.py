"""The `experts` event: how often the routers chose each expert in the last minute, and how uneven the load is.

Workers are asked only while there are viewers. All viewers of a model share the answers.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from .... import bus
from ....bus.protocol.telemetry.experts import ExpertAnswers, ExpertShape, PlaneLoad, imbalance
from ....schemas.checks import list_names
from ....schemas.decoding import JsonObject
from ....schemas.errors import RollbusError
from .events import encode_event
from .viewers import Viewer, contained

PLANES: Final = ("prompt", "generated")
MAX_NAMED: Final = 5
"""Limit on workers whose problem the event names. It counts the others."""
MAX_COUNT: Final = 2**32 - 1
"""Limit on the count of one expert in the event. No fleet reaches it within a minute."""


class PlaneEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load from prompt positions, or from generated tokens."""

    counts: str
    """Base64 of <u4[num_layers, num_experts]."""
    computed: int
    """Number of positions that engines computed."""
    seen: int
    """Number of these positions that were counted."""
    max_over_mean: list[float]
    """By layer: the load of the busiest expert divided by the mean load. 1 means even."""
    entropy: list[float]
    """Entropy by layer. 1 means even."""
    unused: list[int]
    """By layer: number of experts that were never chosen."""
    kept: str | None = None
    """The last minute has no tokens, so these are earlier counts: `minute`, of the minute until `counted_at`, or
    `version`, all of the newest weight version since the workers started. Absent: the counts are of the last minute."""
    counted_at: float | None = None
    """With `kept`: Unix time of the last counted minute; absent if unknown."""


class ExpertsEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a model's experts, from sampled workers or from one worker."""

    model: str
    worker: str | None
    """None if the event covers up to 64 sampled workers."""
    at: float
    """Unix time."""
    seconds: float = 0.0
    """Total length of the counted intervals."""
    workers_asked: int = 0
    workers_answered: int = 0
    """Number of workers whose counts are in the sum."""
    workers_total: int = 0
    """Number of live workers of the model."""
    problem: str | None = None
    """Which workers are left out and why, or why there are no counts."""
    num_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    planes: dict[str, PlaneEvent] | None = None
    """`prompt` and `generated`; None if no worker has ever answered."""


def experts_event(answers: ExpertAnswers, *, worker: str | None, at: float) -> ExpertsEvent:
    """Build the event from the counts of the last minute."""
    window = answers.window
    counted: JsonObject = {}
    if window is not None:
        counted = {
            "seconds": round(window.seconds, 1),
            "workers_answered": len(window.workers),
            **window.shape._asdict(),
            "planes": {name: _plane(getattr(window, name), window.shape.top_k) for name in PLANES},
        }
    return ExpertsEvent(
        model=answers.model,
        worker=worker,
        at=at,
        workers_asked=len(answers.asked),
        workers_total=answers.num_workers,
        problem=_problem(answers),
        **counted,
    )


def with_last_counts(event: ExpertsEvent, versions: ExpertAnswers | None, before: ExpertsEvent | None) -> ExpertsEvent:
    """Return the event with earlier counts for each plane without a token in the last minute.

    Args:
        versions: all counts by weight version; None if the workers were not asked yet.
        before: the previous event, with the counts that it kept; None for the first one.
    """
    planes, shape = dict(event.planes or {}), _shape(event)
    if before is not None and before.planes is not None:
        if event.planes is None:
            shape = _shape(before)
        kept = before.planes.items() if shape == _shape(before) else ()
        for name, last in kept:
            if last.seen and not (name in planes and planes[name].seen):
                planes[name] = last if last.kept else replace(last, kept="minute", counted_at=before.at)
    window = None if versions is None else versions.window
    if window is not None and window.shape == shape:
        for name in [name for name, plane in planes.items() if not plane.seen]:
            loads = [getattr(version, name) for version in window.versions]
            found = next((load for load in loads if load.seen), None)
            if found is not None:
                planes[name] = replace(_plane(found, window.shape.top_k), kept="version")
    return replace(event, **shape._asdict(), planes=planes or None)


def _shape(event: ExpertsEvent) -> ExpertShape:
    return ExpertShape(event.num_layers, event.num_experts, event.top_k)


def _plane(load: PlaneLoad, top_k: int) -> PlaneEvent:
    uneven = imbalance(load.counts, top_k)
    counts = np.minimum(load.counts, MAX_COUNT).astype("<u4")
    return PlaneEvent(
        counts=base64.b64encode(counts.tobytes()).decode(),
        computed=load.computed,
        seen=load.seen,
        max_over_mean=np.round(uneven.max_over_mean, 4).tolist(),
        entropy=np.round(uneven.entropy, 4).tolist(),
        unused=uneven.unused.tolist(),
    )


def _problem(answers: ExpertAnswers) -> str | None:
    if not answers.left_out:
        return None if answers.window is not None else "no worker has answered"
    named = [f"{worker}: {why}" for worker, why in sorted(answers.left_out.items())]
    return list_names(named, "; ", MAX_NAMED)


PERIOD_S: Final = 5.0
"""Seconds between two rounds. Workers count in intervals of the same length."""
WINDOW_S: Final = 60.0
VERSIONS_EVERY: Final = 6
"""Every sixth round also asks for all counts by weight version, which change slowly."""
MAX_FEEDS: Final = 8
"""Limit on watched pairs of a model and a worker. Each pair asks at most 64 workers."""
KEPT_FOR_ADMINS: Final = 2
"""Number of `MAX_FEEDS` that are reserved for admins, so that viewers with the other token cannot use all of them."""


class _ExpertFeed:
    """The load of one model's experts, from sampled workers or from one worker, and its viewers."""

    def __init__(self, model: str, worker: str | None) -> None:
        self.model = model
        self.worker = worker
        self.viewers: set[Viewer] = set()
        self.latest: bytes | None = None
        self.is_running = False
        self._round = 0
        self._versions: ExpertAnswers | None = None
        # The last event, with the last counts of each plane.
        self._last: ExpertsEvent | None = None

    async def run(self, rb: bus.Client) -> None:
        """Ask the workers periodically and send each event to the viewers, until there are none."""
        loop = asyncio.get_running_loop()
        while self.viewers:
            due_at = loop.time() + PERIOD_S
            await self._send_event(rb)
            await asyncio.sleep(max(due_at - loop.time(), 0.0))
        self.is_running = False

    async def _send_event(self, rb: bus.Client) -> None:
        event = self.failed("the service failed to add up the answers of the workers; its log has the reason")
        with contained("experts"):
            try:
                event = await self._ask(rb)
            except RollbusError as error:
                event = self.failed(str(error))
        self._last = with_last_counts(event, self._versions, self._last)
        self.latest = await asyncio.to_thread(encode_event, "experts", self._last)
        for viewer in self.viewers:
            viewer.offer("experts", self.latest)

    def failed(self, problem: str) -> ExpertsEvent:
        """Return the event that states why there are no counts."""
        return ExpertsEvent(model=self.model, worker=self.worker, at=round(time.time(), 3), problem=problem)

    async def _ask(self, rb: bus.Client) -> ExpertsEvent:
        workers = None if self.worker is None else (self.worker,)
        answers = await rb.fleet.experts(self.model, workers=workers, last_s=WINDOW_S)
        if self._round % VERSIONS_EVERY == 0:
            # If this fails, the event still has the last minute.
            with contextlib.suppress(RollbusError):
                self._versions = await rb.fleet.experts(self.model, workers=workers, last_s=None)
        self._round += 1
        at = round(time.time(), 3)
        # For a large model, this computation takes milliseconds.
        return await asyncio.to_thread(experts_event, answers, worker=self.worker, at=at)


class ExpertFeeds:
    """The watched feeds, at most `MAX_FEEDS`. Call `run` while the service serves."""

    def __init__(self, rb: bus.Client) -> None:
        self._rb = rb
        # In the order of the last access, most recent last.
        self._feeds: dict[tuple[str, str | None], _ExpertFeed] = {}
        self._changed = asyncio.Event()

    @contextmanager
    def joined(self, viewer: Viewer, model: str, worker: str | None, *, is_admin: bool) -> Iterator[None]:
        """Send the load of a model's experts, or of one worker's, to a viewer while the block lasts.

        If too many feeds are watched, the viewer receives an event with this problem. It still receives the fleet.

        Args:
            is_admin: the viewer may use the feeds that are reserved for admins.
        """
        key = model, worker
        feed = self._feeds.pop(key, None)
        if feed is None:
            feed = _ExpertFeed(model, worker)
            idle = [known for known, each in self._feeds.items() if not each.viewers]
            allowed = MAX_FEEDS if is_admin else MAX_FEEDS - KEPT_FOR_ADMINS
            if len(self._feeds) - len(idle) >= allowed:
                problem = f"the experts of {len(self._feeds) - len(idle)} pairs of a model and a worker are watched"
                viewer.offer("experts", encode_event("experts", feed.failed(f"{problem}; allowed: {allowed}")))
                yield
                return
            if len(self._feeds) >= MAX_FEEDS:
                del self._feeds[idle[0]]
        self._feeds[key] = feed
        feed.viewers.add(viewer)
        if feed.latest is not None:
            viewer.offer("experts", feed.latest)
        self._changed.set()
        try:
            yield
        finally:
            feed.viewers.discard(viewer)

    async def run(self) -> None:
        """Ask periodically for the watched feeds, until cancelled."""
        # An earlier call that failed has cancelled all of them.
        for feed in self._feeds.values():
            feed.is_running = False
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                # A feed that waits for a slow worker does not delay the others.
                for feed in self._feeds.values():
                    if feed.viewers and not feed.is_running:
                        feed.is_running = True
                        tasks.create_task(feed.run(self._rb))
                await self._changed.wait()
