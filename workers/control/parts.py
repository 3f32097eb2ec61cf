"""The worker around its control."""

from collections.abc import Callable
from dataclasses import dataclass

from bus.connection import Connection
from schemas.errors import EngineDead
from schemas.presence import WorkerPresence
from workers.config import WorkerConfig
from workers.control.flow import Flow
from workers.engine_runner import EngineRunner
from workers.life import Life
from workers.links import Links
from workers.sending import Sending

__all__ = ["Parts"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What commands act on, and what their answers say."""

    config: WorkerConfig
    nats: Connection
    life: Life
    links: Links
    sending: Sending
    flow: Flow
    runner: EngineRunner
    describe: Callable[[], WorkerPresence]
    """What the worker says of itself."""
    on_dead: Callable[[EngineDead], None]
    """Called when the engine turns out to be gone."""
