"""The configuration of one client."""

from dataclasses import dataclass

from ..nats.server import Server
from ..subjects import Subjects
from ..tracing.spans import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Name, connection and limits of one client."""

    server: Server
    subjects: Subjects
    client: str
    """Name of the client in subjects."""
    incarnation: str = ""
    """Id of this lifetime of the name: a client that connects again under the same name has another incarnation."""
    worker_grace_s: float
    """Seconds that a request waits for a worker when its model has none and none starts."""
    wait_for_workers_s: float = 0.0
    """Seconds that a new request waits for such a worker; 0: it fails at once."""
    max_unread_bytes: int
    """Unread bytes of all results of the client above which batches open no more requests."""
    prefill_min_tokens: int
    """Prompts of at least this many tokens go to a prefill worker first, if the fleet has one."""
    placement: bool = True
    """True if the client may send requests directly to a worker. False: all requests go through the queue."""
    tracing: Tracing = False
    """Spans of requests: off (False), configured by the environment (True), or by this provider."""
