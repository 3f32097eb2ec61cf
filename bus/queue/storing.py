"""Finds out whether a model's queue stores requests, and the reason if it does not.

If a write of nats-server fails, usually because its disk is full, the stream stores nothing until the server restarts,
even after space was freed. It answers reads as before, and does not answer publications at all.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from nats import errors as nats_errors

from ...schemas.errors import BusBroken, PermissionDenied
from ...schemas.request import Lane
from ..auth.credentials import Role
from ..auth.permissions import REQUESTERS
from ..nats.connection import Connection
from ..nats.jetstream import ApiError, ask
from ..subjects import Subjects
from .streams import LOOK_S, PROBE_HEADER, STREAM_LANES, stream_name

__all__ = ["FULL", "SHARE_FULL", "PublishAck", "QueueProbes", "decode_publish_ack", "why_unstored"]

logger = logging.getLogger(__name__)

PROBE_BYTES: Final = 8192
"""Bytes of a probe: more than the rest of a disk block, in which a message may still have room on a full disk."""
PROBE_S: Final = 2.0
"""Seconds for the server to confirm a probe, which takes milliseconds. A busy server takes a second."""
STREAM_FULL: Final = 10077
"""JetStream's error if a stream rejects a message: because of its limits, or because of a failed write."""
FULL: Final = frozenset({STREAM_FULL, 10023, 10047, 10002})
"""JetStream's errors for a stream, a server, a disk or an account that can store no more."""
LIMIT: Final = "exceeded"
"""Part of the server's message for a stream at one of its limits."""
SHARE_FULL: Final = "maximum messages per subject exceeded"
"""The server's message for a client whose share of a lane is full. The code is that of a full stream."""
RESTART_ADVICE: Final = "free space on the disk of nats-server, then restart nats-server"
LIMIT_ADVICE: Final = "start workers that empty the queue, or raise its limits with `rollbus make-queue`"
SPACE_ADVICE: Final = "raise max_file_store in the configuration of nats-server, or delete data that nobody needs"
IF_THIS_LASTS: Final = f"if this lasts, {RESTART_ADVICE}"
STORES_NOTHING: Final = (
    "confirms no request, although the server answers: its disk is full or was full since its start, or it is "
    f"overloaded; {IF_THIS_LASTS}"
)


class _AnswerError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} (JetStream error {self.err_code})"


class PublishAck(msgspec.Struct):
    """The server's answer to a publication."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _AnswerError | None = None


decode_publish_ack: Final = msgspec.json.Decoder(PublishAck).decode


async def why_unstored(nats: Connection, subjects: Subjects, model: str, lane: Lane) -> str:
    """Return why the server confirms no publication to a lane, phrased to follow the name of the queue.

    The remedy follows the last semicolon.
    """
    try:
        await ask(nats, f"CONSUMER.INFO.{stream_name(subjects, model, lane)}.{lane}", timeout_s=LOOK_S)
    except (ApiError, BusBroken) as error:
        return f"does not answer: {error}; {IF_THIS_LASTS}"
    return STORES_NOTHING


class QueueProbes:
    """Publishes messages, which workers remove, to find out whether queues store requests."""

    def __init__(self, nats: Connection, subjects: Subjects) -> None:
        self._nats = nats
        self._subjects = subjects
        self._is_denied = False

    def __repr__(self) -> str:
        """Return one line."""
        return f"<QueueProbes {self._subjects.fleet} is_denied={self._is_denied}>"

    async def problems(self, client: str, models: Sequence[str]) -> dict[str, str]:
        """Publish a probe to each stream of these queues. Return by model why one is not stored.

        The remedy follows the last semicolon. Return nothing if this user may not publish probes, because then nothing
        is known.
        """
        user = self._nats.user
        if not models or (user is not None and user.role not in REQUESTERS | {Role.ADMIN}):
            return {}  # the server would log violations
        pairs = [(model, lanes[0]) for model in models for lanes in STREAM_LANES]
        # A server that was configured by an earlier release denies admins the first one. It then gets no others.
        found = [await self._probe(client, *pairs[0])]
        async with asyncio.TaskGroup() as tasks:
            probes = [tasks.create_task(self._probe(client, *pair)) for pair in pairs[1:]]
        found += [probe.result() for probe in probes]
        return {model: one for (model, _), one in reversed(list(zip(pairs, found, strict=True))) if one is not None}

    async def _probe(self, client: str, model: str, lane: Lane) -> str | None:
        if self._is_denied:
            return None
        subject = self._subjects.request(client, model, lane)
        if self._nats.user is not None and self._nats.user.role is Role.ADMIN:
            subject = self._subjects.probe(model, lane)
        try:
            # After a second without a worker, the server removes it.
            headers = {"Nats-TTL": "1", PROBE_HEADER: "1"}
            answer = await self._nats.request(subject, bytes(PROBE_BYTES), timeout=PROBE_S, headers=headers)
            return _why_rejected(decode_publish_ack(answer.data).error)
        except PermissionDenied:
            self._is_denied = True
        except nats_errors.NoRespondersError:
            return None
        except nats_errors.TimeoutError:
            return await why_unstored(self._nats, self._subjects, model, lane)
        except (nats_errors.Error, msgspec.MsgspecError) as error:
            logger.warning("queue.probe_failed model=%s error=%s", model, error)
        return None


def _why_rejected(error: _AnswerError | None) -> str | None:
    """Return the problem that JetStream's answer to a probe shows. A client's full share is none of the queue."""
    if error is None or error.err_code not in FULL or SHARE_FULL in error.description:
        return None
    advice = SPACE_ADVICE
    if error.err_code == STREAM_FULL:
        advice = LIMIT_ADVICE if LIMIT in error.description else RESTART_ADVICE
    return f"rejects requests: {error}; {advice}"
