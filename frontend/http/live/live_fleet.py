"""Follows the fleet: keeps its last hour, and tells all viewers of it once a second."""

import asyncio
import contextlib
import logging
import time
from typing import Final

from .... import __version__, bus
from ....bus.client.fleet_watch import watch_fleet
from ....bus.protocol.telemetry.series import STEP_S, History
from ....schemas.errors import RollbusError
from .events import HELLO, PING, SNAPSHOT, FleetEvent, HelloEvent, WorkerRow, encode_event
from .fleet_event import Recorded, model_lines, pause_epoch, queue_lines, worker_row
from .heard import Heard
from .points import QueueWaits, worker_points
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
MAX_TIMES: Final = 256
"""Pauses of which the time is remembered; of more models than that it is read again."""


class LiveFleet:
    """The fleet as one service shows it. `run` it while the service serves, and `end` the streams before that ends.

    Attributes:
        viewers: all who watch.
        history: the last hour.
    """

    def __init__(self, rb: bus.Client) -> None:
        self.viewers = Viewers()
        self._rb = rb
        self._started_at = time.time()
        self.history = History()
        self._heard = Heard()
        self._queue_waits = QueueWaits()
        self._recorded = Recorded()
        # Cleared while it is read.
        self._has_read = asyncio.Event()
        # By model and epoch.
        self._recorded_at: dict[tuple[str, int], float | None] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<LiveFleet {self._heard!r} {self.viewers!r} {self.history!r}>"

    def time_of(self, number: int) -> float:
        """Return the Unix time of a point of the history."""
        return round(self._started_at + number * STEP_S, 3)

    def hello(self, *, may_act: bool) -> bytes:
        """Return the first event for a viewer."""
        hello = HelloEvent(
            fleet=watch_fleet(self._rb).fleet,
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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep())
            tasks.create_task(self._read())
            tasks.create_task(self._tell())

    async def _keep(self) -> None:
        """Keep a point of each step, also while nobody watches."""
        loop = asyncio.get_running_loop()
        begun, number = loop.time(), 0
        while True:
            number = max(number, int((loop.time() - begun) / STEP_S)) + 1
            await asyncio.sleep(begun + number * STEP_S - loop.time())
            try:
                await self._keep_point(number)
            except RollbusError as error:
                logger.warning("live.no_point error=%r", error)

    async def _keep_point(self, number: int) -> None:
        watch = watch_fleet(self._rb)
        if watch.problem is not None:
            # What was heard last says nothing of now.
            return
        await self._heard.update(watch)
        queues = self._recorded.queues
        if not self.viewers:
            queues = ()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUEUES_WAIT_S):
                    queues, _ = await watch.queues()
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
                logger.warning("live.no_event error=%r", error)
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
                self._recorded = await self._read_now()
            except RollbusError as error:
                logger.warning("live.not_read error=%r", error)
            self._has_read.set()
            await asyncio.sleep(PERIOD_S)

    def end(self) -> None:
        """End all streams at once."""
        self.viewers.end()

    async def _event(self) -> FleetEvent:
        watch = watch_fleet(self._rb)
        recorded = self._recorded
        await self._heard.update(watch)
        heard, now = tuple(self._heard.workers.values()), time.monotonic()
        lost = watch.problem
        workers = [each.presence for each in heard]
        models = model_lines(workers, recorded.desired, lambda *key: self._recorded_at.get(key))
        return FleetEvent(
            at=round(time.time(), 3),
            bus_up=lost is None,
            problem=recorded.problem if lost is None else lost,
            workers=tuple(worker_row(each, self._heard.rates, now) for each in heard),
            queues=tuple(queue_lines(recorded.queues)),
            queue_problems=recorded.queue_problems,
            models=tuple(models),
            history_number=self.history.number,
        )

    async def _read_now(self) -> Recorded:
        watch, problem = watch_fleet(self._rb), None
        queues, queue_problems = await watch.queues()
        try:
            desired = await watch.desired()
        except RollbusError as error:
            desired, problem = self._recorded.desired, f"what is desired cannot be read: {error}"
        for model, state in desired.items():
            if (epoch := pause_epoch(state)) is not None and (model, epoch) not in self._recorded_at:
                self._recorded_at[model, epoch] = await watch.recorded_at(model, epoch)
        while len(self._recorded_at) > MAX_TIMES:
            del self._recorded_at[next(iter(self._recorded_at))]
        return Recorded(queues, queue_problems, desired, problem)
