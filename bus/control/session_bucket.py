"""The bucket of agents' sessions: an admin creates it in a fleet with users, else the first service that needs it."""

from typing import Any, Final

from ..nats.connection import Connection
from ..nats.jetstream import NO_STREAM, create_stream, find, nanoseconds
from ..subjects import session_bucket

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
    config: dict[str, Any] = {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "description": "rollbus: sessions of agents",
        "retention": "limits",
        "storage": "file",
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_bytes": SESSIONS_BYTES,
        "max_age": nanoseconds(MAX_AGE_S),
        "allow_rollup_hdrs": True,
    }
    await create_stream(nats, config)
