"""Asks workers for the load of their experts while there are viewers. All viewers of a model share the answers."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .... import bus
from ....bus.protocol.telemetry.expert_answers import ExpertAnswers
from ....schemas.errors import RollbusError
from .boundary import contained
from .events import EXPERTS, encode_event
from .expert_event import ExpertsEvent, ExpertsPoint, experts_event, experts_point, with_last_counts
from .viewers import Viewer

__all__ = ["MAX_FEEDS", "ExpertFeeds"]

PERIOD_S: Final = 5.0
"""Seconds between two rounds. Workers count in intervals of the same length."""
WINDOW_S: Final = 60.0
VERSIONS_EVERY: Final = 6
"""Every sixth round also asks for all counts by weight version, which change slowly."""
MAX_FEEDS: Final = 8
"""Limit on watched pairs of a model and a worker. Each pair asks at most 64 workers."""
HISTORY_S: Final = 3600.0
NUM_POINTS: Final = 720
"""`HISTORY_S / PERIOD_S`."""
KEPT_FOR_ADMINS: Final = 2
"""Number of `MAX_FEEDS` that are reserved for admins, so that viewers with the other token cannot use all of them."""


class _ExpertFeed:
    """The load of one model's experts, from sampled workers or from one worker, and its viewers."""

    def __init__(self, model: str, worker: str | None) -> None:
        self.model = model
        self.worker = worker
        self.viewers: set[Viewer] = set()
        self.latest: bytes | None = None
        self.due_at = 0.0
        self.is_asking = False
        self._round = 0
        self._versions: ExpertAnswers | None = None
        self._over_time: deque[ExpertsPoint] = deque(maxlen=NUM_POINTS)
        # The last event, with the last counts of each plane.
        self._last: ExpertsEvent | None = None

    async def ask(self, rb: bus.Client) -> None:
        """Ask the workers and send the event to the viewers."""
        self.is_asking = True
        event = self.failed("the service failed to add up the answers of the workers; its log has the reason")
        try:
            with contained("experts"):
                try:
                    event = await self._ask(rb)
                except RollbusError as error:
                    event = self.failed(str(error))
        finally:
            self.is_asking = False
        self._last = with_last_counts(event, self._versions, self._last)
        self.latest = await asyncio.to_thread(encode_event, EXPERTS, self._last)
        for viewer in self.viewers:
            viewer.offer(EXPERTS, self.latest)

    def failed(self, problem: str) -> ExpertsEvent:
        """Return the event that states why there are no counts."""
        over_time = tuple(self._over_time)
        return ExpertsEvent(
            model=self.model, worker=self.worker, at=round(time.time(), 3), problem=problem, over_time=over_time
        )

    async def _ask(self, rb: bus.Client) -> ExpertsEvent:
        workers = None if self.worker is None else (self.worker,)
        answers = await rb.fleet.experts(self.model, workers=workers, last_s=WINDOW_S)
        if self._round % VERSIONS_EVERY == 0:
            # If this fails, the event still has the last minute.
            with contextlib.suppress(RollbusError):
                self._versions = await rb.fleet.experts(self.model, workers=workers, last_s=None)
        self._round += 1
        at = round(time.time(), 3)
        point = experts_point(answers.window, at)
        if point is not None:
            self._over_time.append(point)
        while self._over_time and self._over_time[0].at < at - HISTORY_S:
            self._over_time.popleft()
        # For eight versions of a large model, this computation takes about 10 ms.
        return await asyncio.to_thread(
            experts_event, answers, self._versions, tuple(self._over_time), worker=self.worker, at=at
        )


class ExpertFeeds:
    """The watched feeds, at most `MAX_FEEDS`. Call `run` while the service serves."""

    def __init__(self, rb: bus.Client) -> None:
        self._rb = rb
        # In the order of the last access, most recent last.
        self._feeds: dict[tuple[str, str | None], _ExpertFeed] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        """Return one line with the watched feeds."""
        return f"<ExpertFeeds {list(self._feeds)}>"

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
                viewer.offer(EXPERTS, encode_event(EXPERTS, feed.failed(f"{problem}; allowed: {allowed}")))
                yield
                return
            if len(self._feeds) >= MAX_FEEDS:
                del self._feeds[idle[0]]
        self._feeds[key] = feed
        feed.viewers.add(viewer)
        if feed.latest is not None:
            viewer.offer(EXPERTS, feed.latest)
        self._changed.set()
        try:
            yield
        finally:
            feed.viewers.discard(viewer)

    async def run(self) -> None:
        """Ask periodically for the watched feeds, until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                watched = [feed for feed in self._feeds.values() if feed.viewers]
                for feed in watched:
                    if feed.due_at > loop.time():
                        continue
                    feed.due_at = loop.time() + PERIOD_S
                    # A feed that still waits for a slow worker does not delay the others.
                    if not feed.is_asking:
                        tasks.create_task(feed.ask(self._rb))
                next_at = min((feed.due_at for feed in watched), default=None)
                await self._wait(None if next_at is None else next_at - loop.time())

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until a feed is due or a viewer joins."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
