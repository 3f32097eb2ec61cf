"""The waits between the ranks of a publication.

Each rank sends signs of life, so no rank waits long for a dead rank.
"""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from ...schemas.chain import ChainRecord, OpenedVersion
from ...schemas.errors import ControlCode, ControlError, RollbusError
from ...schemas.manifest import Link
from ..nats.connection import Connection
from ..nats.jetstream import ApiError, put
from ..objects.catalog import find_object
from ..objects.layout import ObjectInfo, info_subject
from ..protocol.weights.silence import SIGN_S, SILENT_S, Silence
from .chain_key import ChainKey

__all__ = ["POLL_S", "RankWatch", "sending_signs", "until_committed", "until_opened"]

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
"""Seconds between checks for an announcement, a commit, or the end of an earlier incarnation's lease."""


class RankWatch:
    """The signs of life of the other ranks, as rank 0 receives them.

    Args:
        bucket: bucket of the publication.
        prefix: prefix of the lists of its ranks.
    """

    def __init__(self, nats: Connection, bucket: str, prefix: str) -> None:
        self._nats = nats
        self._bucket = bucket
        self._prefix = prefix
        self._silences: defaultdict[int, Silence] = defaultdict(Silence)

    def __repr__(self) -> str:
        """Return one line with the ranks."""
        return f"<RankWatch {self._prefix} joined={sorted(self.joined)}>"

    @property
    def joined(self) -> frozenset[int]:
        """Ranks that have sent a sign of life."""
        return frozenset(self._silences)

    async def silence_of(self, rank: int) -> str | None:
        """Check for a new sign of a rank without a list. Return the problem if the rank was silent for too long.

        Raises:
            ApiError: the server refuses.
            BusBroken: JetStream does not answer.
        """
        found = await find_object(self._nats, self._bucket, _sign(self._prefix, rank), is_signed=True)
        if found is None:
            return None
        silent_s = self._silences[rank].record(found.sequence, time.monotonic())
        return None if silent_s < SILENT_S else f"rank {rank} joined, but {_has_been_silent()}"


@contextlib.asynccontextmanager
async def sending_signs(nats: Connection, bucket: str, prefix: str, rank: int) -> AsyncIterator[None]:
    """Send signs of life of a rank to rank 0 during the block."""
    name = _sign(prefix, rank)
    info = ObjectInfo(name=name, bucket=bucket, nuid="alive")
    subject, data = info_subject(bucket, name), msgspec.json.encode(info)

    async def give() -> None:
        try:
            await put(nats, subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})
        except (RollbusError, ApiError) as error:
            logger.warning("publication.sign_publish_failed prefix=%s rank=%s error=%s", prefix, rank, error)

    async def go_on() -> None:
        while True:
            await asyncio.sleep(SIGN_S)
            await give()

    await give()
    giving = asyncio.get_running_loop().create_task(go_on(), name="publication.signs")
    try:
        yield
    finally:
        giving.cancel()
        await asyncio.wait([giving])


async def until_opened(key: ChainKey, version: int, timeout_s: float) -> tuple[ChainRecord, OpenedVersion]:
    """Wait until rank 0 has announced a version of the weights.

    Raises:
        ControlError: `timeout`: rank 0 did not announce this version.
        BusBroken: JetStream or the connection failed.
    """
    ends_at = time.monotonic() + timeout_s
    while True:
        record = (await key.read()).record
        if record.opened is not None and _is_open(record.opened, record, version):
            return record, record.opened
        if time.monotonic() >= ends_at:
            raise ControlError(
                ControlCode.TIMEOUT, f"rank 0 did not begin to publish version {version} within {timeout_s:g} s"
            )
        await asyncio.sleep(POLL_S)


async def until_committed(key: ChainKey, objects: str, timeout_s: float) -> tuple[ChainRecord, Link]:
    """Wait until rank 0 has committed a publication.

    Raises:
        ControlError: `not_found`: rank 0 discarded it, or another publisher took over; `timeout`: neither happened in
            time, or rank 0 did not renew its lease for too long.
        BusBroken: JetStream or the connection failed.
    """
    ends_at, silence = time.monotonic() + timeout_s, Silence()
    while True:
        stored = await key.read()
        record = stored.record
        for link in record.links:
            if link.objects == objects:
                return record, link
        if record.opened is None or record.opened.objects != objects:
            withdrawn, reason = record.withdrawn, "it failed, or another publisher took over"
            if withdrawn is not None and withdrawn.objects == objects:
                reason = withdrawn.reason
            raise ControlError(ControlCode.NOT_FOUND, f"rank 0 did not commit {objects}: {reason}")
        if silence.record(stored.sequence, time.monotonic()) >= SILENT_S:
            raise ControlError(ControlCode.TIMEOUT, f"rank 0 did not commit {objects}: rank 0 {_has_been_silent()}")
        if time.monotonic() >= ends_at:
            raise ControlError(ControlCode.TIMEOUT, f"rank 0 did not commit {objects} within {timeout_s:g} s")
        await asyncio.sleep(POLL_S)


def _has_been_silent() -> str:
    return f"has sent no sign of life for {SILENT_S:g} s"


def _sign(prefix: str, rank: int) -> str:
    return f"{prefix}/alive/{rank}"


def _is_open(opened: OpenedVersion, record: ChainRecord, version: int) -> bool:
    """Return True if rank 0 waits for lists of this version."""
    is_wanted = (opened.version, opened.adapter, opened.epoch) == (version, None, record.epoch)
    return is_wanted and record.holder is not None
