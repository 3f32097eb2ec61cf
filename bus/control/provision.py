"""Creates the queues and buckets that a fleet's workers and controllers may use but not create.

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
) -> dict[str, str]:
    """Create the queues of `models` and the bucket of desired states, and make the models known. Safe to repeat.

    Args:
        limits: limits of the queues, by the field names of `QueueLimits`; queues that exist get them too.
        upload_bytes: size in bytes of each model's bucket for published weights; buckets that exist are resized. None:
            create no such bucket.

    Returns:
        By bucket for published weights: `created`, `resized` or `unchanged`; empty without `upload_bytes`.

    Raises:
        BusBroken: JetStream does not answer or refuses; its cause is `PermissionDenied` if the user is no admin.
        ControlError: a bucket for published weights cannot be created, or holds more than its new size.
        InvalidRequest: the fleet's name is not valid in a subject, or a queue holds more than a limit allows.
    """
    subjects, buckets = Subjects(fleet), dict[str, str]()
    async with connected(server, name=f"rollbus provision {fleet}") as nats:
        store = DesiredStore(nats, subjects)
        await store.ensure_bucket()
        for model in models:
            await ensure_queue(nats, subjects, model)
            if limits:
                await set_limits(nats, subjects, model, limits)
            if upload_bytes:
                bucket = published_bucket(fleet, model)
                buckets[bucket] = await set_bucket_bytes(nats, bucket, upload_bytes)
            # Last, because the state makes the model known.
            await store.begin(model)
    return buckets
