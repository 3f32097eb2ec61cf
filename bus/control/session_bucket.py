"""The bucket of agents' sessions: an admin creates it in a fleet with users, else the first service that needs it."""

from typing import Final

from ..nats.connection import Connection
from ..nats.jetstream import NO_STREAM, create_stream, find, nanoseconds
from ..subjects import session_bucket
from .store import kv_stream

SESSIONS_BYTES: Final = 1 << 30
"""Size of the bucket, for all sessions of a fleet: twenty samples of 100,000 tokens with the rows of a large model."""
MAX_AGE_S: Final = 7 * 24 * 3600.0
"""Seconds after which the server deletes what no service has deleted: a day of a session, and days to read it."""


async def ensure_session_bucket(nats: Connection, fleet: str) -> None:
    """Create the bucket if it is missing.

    Raises:
        ApiError: the server rejects the bucket.
        BusBroken: the server does not answer; `PermissionDenied`: the user may not create it.
    """
    bucket = session_bucket(fleet)
    if await find(nats, f"STREAM.INFO.KV_{bucket}", absent={NO_STREAM}) is not None:
        return
    limits = {"max_msgs_per_subject": 1, "max_bytes": SESSIONS_BYTES, "max_age": nanoseconds(MAX_AGE_S)}
    await create_stream(nats, kv_stream(bucket, "sessions of agents", **limits))
