"""Finds out whether a model's queue stores requests, and the reason if it does not.

If a write of nats-server fails, usually because its disk is full, the stream stores nothing until the server restarts,
even after space was freed. It answers reads as before, and does not answer publications at all.
"""

import asyncio
import logging
from typing import Final

from nats import errors as nats_errors

from ...schemas.errors import BusBroken, PermissionDenied
from ...schemas.request import Lane
from ..auth.permissions import REQUESTERS
from ..nats.connection import Connection
from ..nats.jetstream import ApiError, ask
from ..subjects import Subjects
from .streams import LOOK_S, PROBE_HEADER, STREAM_LANES, stream_name

__all__ = ["RESTART_ADVICE", "STORES_NOTHING", "probe_queue", "why_unstored"]

logger = logging.getLogger(__name__)

PROBE_BYTES: Final = 8192
"""Bytes of a probe: more than the rest of a disk block, in which a message may still have room on a full disk."""
PROBE_S: Final = 2.0
"""Seconds for the server to confirm a probe, which takes milliseconds. A busy server takes a second."""
RESTART_ADVICE: Final = "free space on the disk of nats-server, then restart nats-server"
STORES_NOTHING: Final = (
    "confirms no request, although the server answers: its disk is full or was full since its start, or it is "
    f"overloaded; if this lasts, {RESTART_ADVICE}"
)


async def why_unstored(nats: Connection, subjects: Subjects, model: str, lane: Lane) -> str:
    """Return why the server confirms no publication to a lane, phrased to follow the name of the queue."""
    try:
        await ask(nats, f"CONSUMER.INFO.{stream_name(subjects, model, lane)}.{lane}", timeout_s=LOOK_S)
    except (ApiError, BusBroken) as error:
        return f"does not answer: {error}"
    return STORES_NOTHING


async def probe_queue(nats: Connection, subjects: Subjects, client: str, model: str) -> str | None:
    """Publish a message, which workers remove, to each stream of a queue. Return the problem if one is not stored.

    Return None even if this user may not publish requests, because then nothing is known.
    """
    if nats.user is not None and nats.user.role not in REQUESTERS:
        return None  # the server would log a violation
    async with asyncio.TaskGroup() as tasks:
        probes = [tasks.create_task(_probe(nats, subjects, client, model, lanes[0])) for lanes in STREAM_LANES]
    return next((problem for probe in probes if (problem := probe.result()) is not None), None)


async def _probe(nats: Connection, subjects: Subjects, client: str, model: str, lane: Lane) -> str | None:
    try:
        # After a second without a worker, the server removes it.
        headers = {"Nats-TTL": "1", PROBE_HEADER: "1"}
        await nats.request(subjects.request(client, model, lane), bytes(PROBE_BYTES), timeout=PROBE_S, headers=headers)
    except (PermissionDenied, nats_errors.NoRespondersError):
        return None
    except nats_errors.TimeoutError:
        return await why_unstored(nats, subjects, model, lane)
    except nats_errors.Error as error:
        logger.warning("queue.probe_failed model=%s error=%s", model, error)
    return None
