"""The last presence of each worker, and rates from the differences between two presences."""

from ....bus.client.fleet_watch import FleetWatch, HeardWorker
from ....bus.protocol.telemetry.fleet_rates import FleetRates

__all__ = ["Heard"]


class Heard:
    """The live workers with their last presence, and their rates.

    Attributes:
        workers: the live workers by id.
        rates: the rates of these workers.
    """

    def __init__(self) -> None:
        self.workers: dict[str, HeardWorker] = {}
        self.rates = FleetRates()

    def __repr__(self) -> str:
        """Return one line with the number of workers."""
        return f"<Heard {len(self.workers)}>"

    async def update(self, watch: FleetWatch) -> None:
        """Read the presence that arrived since the last call.

        Raises:
            BusClosed: the client was closed.
        """
        self.workers = {each.presence.worker: each for each in await watch.workers()}
        self.rates.update(self.workers.values())
