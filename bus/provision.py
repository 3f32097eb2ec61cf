"""Makes what a fleet's workers and controllers may use and not make: the queues of its models, and their bucket.

Where a server lets everybody do everything, workers and controllers make them by themselves.
"""

from collections.abc import Iterable

from bus.connection import close_connection, open_connection
from bus.control.store import DesiredStore
from bus.queue.streams import ensure_queue
from bus.server import Server
from bus.subjects import Subjects

__all__ = ["provision"]


async def provision(server: Server, fleet: str, models: Iterable[str]) -> None:
    """Make the queues of `models`, and the bucket of desired states; safe to repeat.

    Raises:
        BusBroken: JetStream does not answer or refuses; `PermissionDenied` stands behind it for who is no admin.
        InvalidRequest: the fleet's name cannot stand in a subject.
    """
    subjects = Subjects(fleet)
    nats = await open_connection(server, name=f"rollbus provision {fleet}")
    try:
        for model in models:
            await ensure_queue(nats, subjects, model)
        await DesiredStore(nats, subjects).ensure_bucket()
    finally:
        await close_connection(nats)
