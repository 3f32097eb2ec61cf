"""Asks workers for the load of their experts while somebody looks: once for all who look at the same."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from .... import bus
from ....bus.protocol.telemetry.expert_answers import ExpertAnswers
from ....schemas.errors import RollbusError
from ..errors import HttpError
from .events import EXPERTS, encode_event
from .expert_event import ExpertsEvent, ExpertsPoint, experts_event, experts_point
from .viewers import Viewer

__all__ = ["MAX_FEEDS", "ExpertFeeds"]

PERIOD_S: Final = 5.0
"""Between two questions: workers count in intervals as long."""
WINDOW_S: Final = 60.0
VERSIONS_EVERY: Final = 6
"""Questions between two for everything that was counted by version of the weights, which changes slowly."""
MAX_FEEDS: Final = 8
"""Pairs of a model and a worker that are looked at: each asks at most 64 workers."""
NUM_POINTS: Final = 720
"""An hour of them."""


class _Feed:
    """The load of one model's experts, of sampled workers or of one worker, and those who look at it."""

    def __init__(self, model: str, worker: str | None) -> None:
        self.model = model
        self.worker = worker
        self.viewers: set[Viewer] = set()
        self.latest: bytes | None = None
        self.due_at = 0.0
        self._round = 0
        self._versions: ExpertAnswers | None = None
        self._over_time: deque[ExpertsPoint] = deque(maxlen=NUM_POINTS)

    async def ask(self, rb: bus.Client) -> None:
        """Ask the workers, and tell those who look."""
        try:
            event = await self._ask(rb)
        except RollbusError as error:
            event = ExpertsEvent(
                model=self.model,
                worker=self.worker,
                at=round(time.time(), 3),
                problem=str(error),
                over_time=tuple(self._over_time),
            )
        self.latest = await asyncio.to_thread(encode_event, EXPERTS, event)
        for viewer in self.viewers:
            viewer.offer(EXPERTS, self.latest)

    async def _ask(self, rb: bus.Client) -> ExpertsEvent:
        workers = None if self.worker is None else (self.worker,)
        answers = await rb.fleet.experts(self.model, workers=workers, last_s=WINDOW_S)
        if self._round % VERSIONS_EVERY == 0:
            self._versions = await rb.fleet.experts(self.model, workers=workers, last_s=None)
        self._round += 1
        at = round(time.time(), 3)
        point = experts_point(answers.window, at)
        if point is not None:
            self._over_time.append(point)
        # The arithmetic of eight versions of a large model takes a hundredth of a second.
        return await asyncio.to_thread(
            experts_event, answers, self._versions, tuple(self._over_time), worker=self.worker, at=at
        )


class ExpertFeeds:
    """All that is looked at, at most `MAX_FEEDS`. `run` it while the service serves."""

    def __init__(self, rb: bus.Client) -> None:
        self._rb = rb
        # The one that was looked at last comes last.
        self._feeds: dict[tuple[str, str | None], _Feed] = {}
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        """One line with what is looked at."""
        return f"<ExpertFeeds {list(self._feeds)}>"

    @contextmanager
    def joined(self, viewer: Viewer, model: str, worker: str | None) -> Iterator[None]:
        """Have the experts of a model, or of one worker, told to a viewer while the block lasts.

        Raises:
            HttpError: 503, so many others are looked at.
        """
        key = model, worker
        feed = self._feeds.pop(key, None)
        if feed is None:
            feed = _Feed(model, worker)
            idle = [known for known, each in self._feeds.items() if not each.viewers]
            if len(self._feeds) >= MAX_FEEDS and not idle:
                message = f"the experts of {MAX_FEEDS} pairs of a model and a worker are watched; allowed: {MAX_FEEDS}"
                raise HttpError(503, message, code="too_many_viewers")
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
        """Ask again and again for what is looked at, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            watched = [feed for feed in self._feeds.values() if feed.viewers]
            due = [feed for feed in watched if feed.due_at <= loop.time()]
            for feed in due:
                feed.due_at = loop.time() + PERIOD_S
            async with asyncio.TaskGroup() as tasks:
                for feed in due:
                    tasks.create_task(feed.ask(self._rb))
            next_at = min((feed.due_at for feed in self._feeds.values() if feed.viewers), default=None)
            await self._wait(None if next_at is None else next_at - loop.time())

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until a question is due, or somebody else looks."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
