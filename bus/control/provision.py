"""Creates the queues and the bucket that a fleet's workers and controllers may use but not create.

On a server without permissions, workers and controllers create them by themselves.
"""

from collections.abc import Iterable, Mapping

from ..nats.connection import connected
from ..nats.server import Server
from ..objects.catalog import set_bucket_bytes
from ..queue.set_limits import set_limits
from ..queue.streams import ensure_queue
from ..subjects import Subjects, published_bucket
from .store import DesiredStore

__all__ = ["provision"]


async def provision(
    server: Server,
    fleet: str,
    models: Iterable[str],
    limits: Mapping[str, int] | None = None,
    *,
    upload_bytes: int | None = None,
) -> None:
    """Make the queues of `models`, and the bucket of desired states; safe to repeat.

    Args:
        limits: by the names of `QueueLimits`; those that queues are to have, also queues that exist.
        upload_bytes: make the buckets for what publishers of the models upload too; those that are there get this
            size.

    Raises:
        BusBroken: JetStream does not answer or refuses; its cause is `PermissionDenied` for a user that is no admin.
        ControlError: a bucket for uploads cannot be made, or holds more than its new size.
        InvalidRequest: the fleet's name cannot stand in a subject, or a queue holds more than a limit allows.
    """
    subjects = Subjects(fleet)
    async with connected(server, name=f"rollbus provision {fleet}") as nats:
        for model in models:
            await ensure_queue(nats, subjects, model)
            if limits:
                await set_limits(nats, subjects, model, limits)
            if upload_bytes:
                await set_bucket_bytes(nats, published_bucket(fleet, model), upload_bytes)
        await DesiredStore(nats, subjects).ensure_bucket()
