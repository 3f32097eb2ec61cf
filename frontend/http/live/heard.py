"""What workers have announced, and what follows from one announcement to the next."""

from ....bus.client.fleet_watch import FleetWatch, HeardWorker
from ....bus.protocol.telemetry.fleet_rates import FleetRates

__all__ = ["Heard"]


class Heard:
    """The live workers as they were last heard, and their rates.

    Attributes:
        workers: by id.
        rates: of them.
    """

    def __init__(self) -> None:
        self.workers: dict[str, HeardWorker] = {}
        self.rates = FleetRates()

    def __repr__(self) -> str:
        """One line with their number."""
        return f"<Heard {len(self.workers)}>"

    async def update(self, watch: FleetWatch) -> None:
        """Take in what was announced since the last time.

        Raises:
            BusClosed: the client was closed.
        """
        self.workers = {each.presence.worker: each for each in await watch.workers()}
        self.rates.update(self.workers.values())
