"""Follows the fleet: keeps its last hour, and tells all viewers of it once a second."""

import asyncio
import contextlib
import logging
import time
from functools import cached_property
from typing import Final

from .... import __version__, bus
from ....bus.client.fleet_watch import FleetWatch, watch_fleet
from ....bus.protocol.telemetry.series import STEP_S, History
from ....schemas.errors import RollbusError
from .boundary import contained
from .events import HELLO, PING, SNAPSHOT, FleetEvent, HelloEvent, WorkerRow, encode_event
from .expert_feeds import ExpertFeeds
from .fleet_event import model_lines, queue_lines, worker_row
from .heard import Heard
from .points import QueueWaits, worker_points
from .recorded import RecordedReader
from .viewers import Viewers

__all__ = ["PERIOD_S", "LiveFleet"]

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Between two `fleet` events: workers announce themselves as often."""
READ_WAIT_S: Final = 0.5
"""For NATS to answer before an event is made of what it said last: a healthy server takes milliseconds."""
PING_S: Final = 15.0
QUEUES_WAIT_S: Final = 2.0
"""For NATS to say how much waits, while nobody watches; well below `STEP_S`."""
LISTEN_AGAIN_S: Final = 60.0
"""Until it is tried again to listen to commands, where that failed."""
RESTART_S: Final = 5.0
"""After a fault, until the fleet is followed again: a fault that lasts makes no flood of events in the log."""
LINGER_S: Final = 10.0
"""For which commands are heard on when the last viewer has left: a page that is loaded again is back in a second."""


class LiveFleet:
    """The fleet as one service shows it. `run` it while the service serves, and `end` the streams before that ends.

    Attributes:
        viewers: all who watch.
        history: the last hour.
        experts: the load of experts, for those who look at it.
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
        # Cleared while it is read.
        self._has_read = asyncio.Event()
        # Why commands are not heard.
        self._deaf: str | None = None

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<LiveFleet {self._heard!r} {self.viewers!r} {self.history!r}>"

    @cached_property
    def _watch(self) -> FleetWatch:
        # The client is connected when the service runs, not yet when it is made.
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
        return encode_event(HELLO, hello)

    async def run(self) -> None:
        """Keep the history and tell viewers of the fleet, until cancelled."""
        begun = asyncio.get_running_loop().time()
        while True:
            with contained("fleet"):
                await self._run(begun)
            await asyncio.sleep(RESTART_S)

    async def _run(self, begun: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep(begun))
            tasks.create_task(self._read())
            tasks.create_task(self._tell())
            tasks.create_task(self._listen())
            tasks.create_task(self.experts.run())

    async def _keep(self, begun: float) -> None:
        """Keep a point of each step, also while nobody watches."""
        loop = asyncio.get_running_loop()
        number = self.history.number
        while True:
            number = max(number, int((loop.time() - begun) / STEP_S)) + 1
            await asyncio.sleep(begun + number * STEP_S - loop.time())
            try:
                await self._keep_point(number)
            except RollbusError as error:
                logger.warning("live.point_failed error=%r", error)

    async def _keep_point(self, number: int) -> None:
        if self._watch.problem is not None:
            # What was heard last says nothing of now.
            return
        await self._heard.update(self._watch)
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
            await self.viewers.until_some()
            begun = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_WAIT_S):
                    await self._has_read.wait()
            try:
                self.viewers.offer(SNAPSHOT, encode_event(SNAPSHOT, await self._event()))
            except RollbusError as error:
                logger.warning("live.event_failed error=%r", error)
            if begun - pinged_at >= PING_S:
                pinged_at = begun
                self.viewers.offer("ping", PING)
            await asyncio.sleep(max(begun + PERIOD_S - loop.time(), 0.0))

    async def _read(self) -> None:
        """Read what NATS has of the fleet, again and again while somebody watches."""
        while True:
            self._has_read.clear()
            await self.viewers.until_some()
            try:
                await self._recorded.read(self._watch)
            except RollbusError as error:
                logger.warning("live.read_failed error=%r", error)
            self._has_read.set()
            await asyncio.sleep(PERIOD_S)

    async def _listen(self) -> None:
        """Listen to commands while somebody watches."""
        while True:
            await self.viewers.until_some()
            try:
                await self._watch.listen()
            except RollbusError as error:
                self._deaf = f"commands cannot be heard: {error}"
                logger.warning("live.commands_read_failed error=%r", error)
                await asyncio.sleep(LISTEN_AGAIN_S)
                continue
            self._deaf = None
            await self.viewers.until_none()
            await asyncio.sleep(LINGER_S)
            if not self.viewers:
                with contextlib.suppress(RollbusError):
                    await self._watch.unlisten()

    def end(self) -> None:
        """End all streams at once."""
        self.viewers.end()

    async def _event(self) -> FleetEvent:
        watch, recorded = self._watch, self._recorded.latest
        await self._heard.update(watch)
        heard, now = tuple(self._heard.workers.values()), time.monotonic()
        lost = watch.problem
        workers = [each.presence for each in heard]
        models = model_lines(workers, recorded.desired, self._recorded.recorded_at)
        return FleetEvent(
            at=round(time.time(), 3),
            bus_up=lost is None,
            problem=lost or recorded.problem or self._deaf,
            workers=tuple(worker_row(each, self._heard.rates, now) for each in heard),
            queues=tuple(queue_lines(recorded.queues, recorded.clients)),
            queue_problems=recorded.queue_problems,
            models=tuple(models),
            commands=await watch.commands(),
            history_number=self.history.number,
        )
