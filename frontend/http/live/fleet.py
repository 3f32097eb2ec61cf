"""Watches the fleet: records its last hour, and sends an event to all viewers once a second."""

import asyncio
import contextlib
import logging
import time
from functools import cached_property
from typing import Final

from .... import __version__, bus
from ....bus.client.client import watch_fleet
from ....bus.client.fleet_state import FleetWatch
from ....bus.logs import warning_of
from ....bus.protocol.telemetry.rates import STEP_S, History
from ....bus.thread_calls import is_set_within
from ....schemas.errors import RollbusError
from ...follow import Heard, RecordedReader
from ..calls import PING
from .events import (
    DaySnapshot,
    FleetDay,
    FleetEvent,
    HelloEvent,
    QueueWaits,
    WorkerRow,
    encode_event,
    model_lines,
    queue_lines,
    worker_points,
    worker_row,
)
from .experts import ExpertFeeds
from .viewers import Viewers, contained

logger = logging.getLogger(__name__)


PERIOD_S: Final = 1.0
"""Seconds between two `fleet` events. Workers publish presence equally often."""
READ_WAIT_S: Final = 0.5
"""Seconds for NATS to answer. Then the event uses the previous answers. A healthy server answers in milliseconds."""
PING_S: Final = 15.0
QUEUES_WAIT_S: Final = 2.0
"""Seconds for NATS to return the queue depths while there are no viewers; well below `STEP_S`."""
LISTEN_AGAIN_S: Final = 60.0
"""Seconds until the next attempt to subscribe to commands after a failure."""
RESTART_S: Final = 5.0
"""Seconds between an unexpected error and the restart, so that a lasting error does not flood the log."""
LINGER_S: Final = 10.0
"""Seconds for which the subscription to commands outlives the last viewer. A page that reloads returns in a second."""


class LiveFleet:
    """The live view of the fleet. Call `run` while the service serves.

    Attributes:
        viewers: the viewers of the fleet.
        history: the last hour.
        experts: the load of experts, for the viewers that requested it.
    """

    def __init__(self, rb: bus.Client) -> None:
        self.viewers = Viewers()
        self._rb = rb
        self._started_at = time.time()
        self.history = History()
        self.experts = ExpertFeeds(rb)
        self._heard = Heard()
        self._queue_waits = QueueWaits()
        self._recorded = RecordedReader()
        self._day = FleetDay()
        self._told_day: DaySnapshot | None = None
        # Cleared while `_recorded` is read.
        self._has_read = asyncio.Event()
        # The reason why commands are not received.
        self._deaf: str | None = None

    @cached_property
    def _watch(self) -> FleetWatch:
        # Created late: the client is not connected yet when this object is built.
        return watch_fleet(self._rb)

    def time_of(self, number: int) -> float:
        """Return the Unix time of a point of the history."""
        return round(self._started_at + number * STEP_S, 3)

    def hello(self, *, may_act: bool) -> bytes:
        """Return the first event for a viewer."""
        hello = HelloEvent(
            fleet=self._watch.fleet,
            version=__version__,
            started_at=round(self._started_at, 3),
            may_act=may_act,
            may_trace=may_act,
            period_s=PERIOD_S,
            history_step_s=STEP_S,
            worker_fields=WorkerRow.__struct_fields__,
        )
        return encode_event("hello", hello)

    def day(self) -> bytes:
        """Return the event with the last day."""
        return encode_event("day", self._day.snapshot())

    def _tell_day(self) -> None:
        if self.viewers and (day := self._day.snapshot()) != self._told_day:
            self._told_day = day
            self.viewers.offer("day", encode_event("day", day))

    async def run(self) -> None:
        """Record the history and send events to the viewers, until cancelled."""
        begun = asyncio.get_running_loop().time()
        while True:
            with contained("fleet"):
                await self._run(begun)
            await asyncio.sleep(RESTART_S)

    async def _run(self, begun: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self._keep(begun), self._read(), self._tell(), self._listen(), self.experts.run()):
                tasks.create_task(work)

    async def _keep(self, begun: float) -> None:
        """Record a point in each step, even without viewers."""
        loop = asyncio.get_running_loop()
        number = self.history.number
        while True:
            number = max(number, int((loop.time() - begun) / STEP_S)) + 1
            await asyncio.sleep(begun + number * STEP_S - loop.time())
            with warning_of(RollbusError, logger, "live.point_failed error=%r"):
                await self._keep_point(number)

    async def _keep_point(self, number: int) -> None:
        if self._watch.problem is not None:
            # Without a connection, the last presence does not describe the present.
            return
        await self._heard.update(self._watch)
        workers = tuple(self._heard.workers.values())
        self._day.update_workers(workers)
        if not self.viewers:
            await self._day.read_announced(self._watch, workers)
        self._tell_day()
        queues = self._recorded.latest.queues
        if not self.viewers:
            queues = ()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUEUES_WAIT_S):
                    queues, _ = await self._watch.queues()
        waits = self._queue_waits.step(self._rb.stats().queue_waits)
        self.history.add(number, *worker_points(self._heard, queues, waits))

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        pinged_at = loop.time()
        while True:
            await self.viewers.some.wait()
            begun = loop.time()
            await is_set_within(self._has_read, READ_WAIT_S)
            with warning_of(RollbusError, logger, "live.event_failed error=%r"):
                self.viewers.offer("fleet", encode_event("fleet", await self._event()))
            if begun - pinged_at >= PING_S:
                pinged_at = begun
                self.viewers.offer("ping", PING)
            await asyncio.sleep(max(begun + PERIOD_S - loop.time(), 0.0))

    async def _read(self) -> None:
        """Read the queues and desired states from NATS periodically while there are viewers."""
        while True:
            self._has_read.clear()
            await self.viewers.some.wait()
            with warning_of(RollbusError, logger, "live.read_failed error=%r"):
                await self._recorded.read(self._watch)
            self._has_read.set()
            await self._day.read(self._watch, self._recorded.latest.desired)
            self._tell_day()
            await asyncio.sleep(PERIOD_S)

    async def _listen(self) -> None:
        """Subscribe to commands while there are viewers."""
        while True:
            await self.viewers.some.wait()
            try:
                await self._watch.listen()
            except RollbusError as error:
                self._deaf = f"cannot subscribe to commands: {error}"
                logger.warning("live.commands_read_failed error=%r", error)
                await asyncio.sleep(LISTEN_AGAIN_S)
                continue
            self._deaf = None
            await self.viewers.none.wait()
            await asyncio.sleep(LINGER_S)
            if not self.viewers:
                with contextlib.suppress(RollbusError):
                    await self._watch.unlisten()

    async def _event(self) -> FleetEvent:
        watch, recorded = self._watch, self._recorded.latest
        await self._heard.update(watch)
        heard, now = tuple(self._heard.workers.values()), time.monotonic()
        return FleetEvent(
            at=round(time.time(), 3),
            bus_up=watch.problem is None,
            problem=watch.problem or recorded.problem or self._deaf,
            workers=tuple(worker_row(each, self._heard.rates, now) for each in heard),
            queues=tuple(queue_lines(recorded.queues, recorded.clients)),
            queue_problems=recorded.queue_problems,
            models=tuple(model_lines((each.presence for each in heard), recorded.desired)),
            commands=await watch.commands(),
            history_number=self.history.number,
        )
