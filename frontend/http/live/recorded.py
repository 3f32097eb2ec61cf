"""What NATS has of the fleet: queues, whose requests wait in them, and desired states; read while somebody watches."""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from ....bus import QueueDepth
from ....bus.client.fleet_watch import FleetWatch
from ....schemas.desired import DesiredState
from ....schemas.errors import PermissionDenied, RollbusError
from ....schemas.request import Lane
from .fleet_event import pause_epoch

__all__ = ["RecordedReader", "RecordedState"]

logger = logging.getLogger(__name__)

MAX_TIMES: Final = 256
"""Pauses of which the time is remembered; of more models than that it is read again."""
CLIENTS_S: Final = 5.0
"""Between two lists of whose requests wait: the server walks through the queue for each."""
DENIED_S: Final = 300.0
"""Until they are asked for again, where this user may not list them."""

Clients = dict[tuple[str, Lane, str], int]


@dataclass(frozen=True, slots=True)
class RecordedState:
    """What was read last."""

    queues: tuple[QueueDepth, ...] = ()
    queue_problems: dict[str, str] = field(default_factory=dict)
    desired: dict[str, DesiredState] = field(default_factory=dict)
    clients: Clients | None = None
    """Requests in the queues by model, lane and client; None: they cannot be listed."""
    problem: str | None = None
    """Why some of it could not be read."""


class RecordedReader:
    """Reads it, and remembers what does not change.

    Attributes:
        latest: what was read last.
    """

    def __init__(self) -> None:
        self.latest = RecordedState()
        self._list_at = 0.0
        # By model and epoch.
        self._times: dict[tuple[str, int], float | None] = {}

    def __repr__(self) -> str:
        """One line with the models."""
        return f"<RecordedReader {sorted(self.latest.desired)}>"

    def recorded_at(self, model: str, epoch: int) -> float | None:
        """Return the Unix time at which the pause of a model's epoch was recorded; None: that is not known."""
        return self._times.get((model, epoch))

    async def read(self, watch: FleetWatch) -> None:
        """Read all of it.

        Raises:
            BusClosed: the client was closed.
        """
        queues, queue_problems = await watch.queues()
        desired, problem = self.latest.desired, None
        try:
            desired = await watch.desired()
        except RollbusError as error:
            problem = f"what is desired cannot be read: {error}"
        for model, state in desired.items():
            if (epoch := pause_epoch(state)) is not None and (model, epoch) not in self._times:
                self._times[model, epoch] = await watch.recorded_at(model, epoch)
        while len(self._times) > MAX_TIMES:
            del self._times[next(iter(self._times))]
        clients = await self._clients(watch, {depth.model for depth in queues})
        self.latest = RecordedState(queues, queue_problems, desired, clients, problem)

    async def _clients(self, watch: FleetWatch, models: set[str]) -> Clients | None:
        if time.monotonic() < self._list_at:
            return self.latest.clients
        self._list_at = time.monotonic() + CLIENTS_S
        try:
            return await watch.clients(sorted(models))
        except PermissionDenied as error:
            self._list_at = time.monotonic() + DENIED_S
            logger.info("live.clients_read_failed error=%s", error)
        except RollbusError as error:
            logger.warning("live.clients_read_failed error=%r", error)
        return None
