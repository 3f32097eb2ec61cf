"""How one client is set up."""

from dataclasses import dataclass

from ..nats.server import Server
from ..subjects import Subjects
from ..tracing.switch import Tracing

__all__ = ["ClientConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Who a client is, where it connects, and what it waits for."""

    server: Server
    subjects: Subjects
    client: str
    """Its name in subjects."""
    incarnation: str
    """Which life of that name."""
    worker_grace_s: float
    """How long requests wait for a worker to come up where there is none."""
    prefill_min_tokens: int
    """Of a prompt that goes to a prefill worker first, where there are any."""
    placement: bool = True
    """Requests may be placed at workers; False: they all go through the queue."""
    tracing: Tracing = False
    """Spans of requests: off, by the environment, or by this provider."""
