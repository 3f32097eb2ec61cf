"""The state of a fleet for displays: presence, rates from two presences of a worker, queues and desired states.

Queues and desired states are read from NATS only while a display is open.
"""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Final

from ..bus import QueueDepth
from ..bus.client.fleet_state import FleetWatch, HeardWorker
from ..bus.protocol.telemetry.rates import FleetRates
from ..schemas.control import DesiredState
from ..schemas.errors import PermissionDenied, RollbusError
from ..schemas.request import Lane

logger = logging.getLogger(__name__)


class Heard:
    """The live workers with their last presence, and their rates.

    Attributes:
        workers: the live workers by id.
        rates: the rates of these workers.
    """

    def __init__(self) -> None:
        self.workers: dict[str, HeardWorker] = {}
        self.rates = FleetRates()

    async def update(self, watch: FleetWatch) -> None:
        """Read the presence that arrived since the last call.

        Raises:
            BusClosed: the client was closed.
        """
        self.workers = {each.presence.worker: each for each in await watch.workers()}
        self.rates.update(self.workers.values())


CLIENTS_S: Final = 5.0
"""Seconds between two lists of queued requests by client. For each list, the server walks through the queue."""
DENIED_S: Final = 300.0
"""Seconds until the next list if this NATS user has no permission for it."""

Clients = dict[tuple[str, Lane, str], int]


@dataclass(frozen=True, slots=True)
class RecordedState:
    """The result of the last read."""

    queues: tuple[QueueDepth, ...] = ()
    queue_problems: dict[str, str] = field(default_factory=dict)
    desired: dict[str, DesiredState] = field(default_factory=dict)
    clients: Clients | None = None
    """Number of requests in the queues by model, lane and client; None if they cannot be listed."""
    problem: str | None = None
    """Reason why a part could not be read."""


class RecordedReader:
    """Reads the recorded state.

    Args:
        lists_clients: also list the queued requests by client.

    Attributes:
        latest: the result of the last read.
    """

    def __init__(self, *, lists_clients: bool = True) -> None:
        self.latest = RecordedState()
        self._list_at = 0.0 if lists_clients else math.inf

    async def read(self, watch: FleetWatch) -> None:
        """Read the state and set `latest`.

        Raises:
            BusClosed: the client was closed.
        """
        queues, queue_problems = await watch.queues()
        desired, problem = self.latest.desired, None
        try:
            desired = await watch.desired()
        except RollbusError as error:
            problem = f"cannot read the desired state: {error}"
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
