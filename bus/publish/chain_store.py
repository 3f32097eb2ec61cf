"""The messages in the bucket of a model's published weights through which its publishers agree.

The chain record is written by compare-and-set. Ranks other than 0 store objects, failure reports and signs of life for
rank 0. Because of the signs, no rank waits long for a dead rank.
"""

import logging
import math
import time
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from ...schemas.errors import ControlError, RemoteProtocolError, storage_failure
from ...schemas.manifest import (
    CHAIN,
    CHAIN_OBJECT,
    MAX_REASON_CHARS,
    ChainRecord,
    RankObject,
    decode_chain,
)
from ..nats.connection import Connection
from ..nats.jetstream import NO_STREAM, TRY_S, WRONG_LAST_SEQUENCE, ApiError, Unanswered, put, storage_errors
from ..objects.catalog import BucketState, bucket_state, describe_object, find_object, list_subjects
from ..objects.layout import ObjectInfo, ObjectOptions, info_subject, stream_of
from ..protocol.weights.chain import SILENT_S, Silence
from ..subjects import published_bucket

logger = logging.getLogger(__name__)

REASON: Final = "rollbus-reason"
"""Metadata field of an object without content: the reason why a rank failed."""


class StoredChain(NamedTuple):
    """The chain record as stored by the server."""

    record: ChainRecord
    """The record; empty if no valid record exists."""
    sequence: int
    """Sequence number of the record's message; 0: there is no message."""
    age_s: float
    """Seconds since the record was stored, by the server's clock."""


class ChainKey:
    """The chain record of one model. Methods raise `BusBroken` if JetStream does not answer."""

    def __init__(self, nats: Connection, fleet: str, model: str) -> None:
        self.nats: Final = nats
        self._model = model
        self.bucket: Final = published_bucket(fleet, model)

    async def bucket_state(self) -> BucketState:
        """Return the state of the bucket.

        Raises:
            ControlError: `storage`: the bucket does not exist.
        """
        try:
            return await bucket_state(self.nats, self.bucket)
        except ApiError as error:
            raise self._rejection("read", error) from error

    async def read(self) -> StoredChain:
        """Return the record. A record that does not decode, or lacks a required signature, counts as empty.

        Raises:
            ControlError: `storage`: the bucket does not exist.
        """
        try:
            found = await find_object(self.nats, self.bucket, CHAIN_OBJECT, is_signed=True, is_lenient=True)
        except ApiError as error:
            raise self._rejection("read", error) from error
        if found is None:
            return StoredChain(ChainRecord(model=self._model), 0, math.inf)
        try:
            if found.info is None:
                raise RemoteProtocolError("the record is deleted, damaged or not signed")
            record = decode_chain(found.info.metadata.get(CHAIN, ""))
        except RemoteProtocolError as error:
            logger.warning("chain.decode_failed bucket=%s error=%s", self.bucket, error)
            # Each epoch was written in its own message, so no epoch exceeds the sequence number of this message.
            return StoredChain(ChainRecord(model=self._model, epoch=found.sequence), found.sequence, math.inf)
        now = (await self.bucket_state()).now
        return StoredChain(record, found.sequence, (now - found.stored_at).total_seconds())

    async def write(self, record: ChainRecord, sequence: int) -> int | None:
        """Store the record if its last message still has number `sequence`. Return the new number, or None if not.

        Raises:
            ControlError: `storage`: the bucket is full or does not exist.
            Unanswered: the server may or may not have stored the record.
        """
        info = ObjectInfo(
            name=CHAIN_OBJECT, bucket=self.bucket, nuid="chain", metadata={CHAIN: msgspec.json.encode(record).decode()}
        )
        subject, data, headers = describe_object(self.nats, info)
        headers |= {
            "Nats-Expected-Stream": stream_of(self.bucket),
            "Nats-Expected-Last-Subject-Sequence": str(sequence),
        }
        try:
            return await put(self.nats, subject, data, headers, timeout_s=TRY_S)
        except ApiError as error:
            if error.code in WRONG_LAST_SEQUENCE:
                return None
            if error.code == NO_STREAM:
                raise Unanswered(f"no server stores the chain record of {self._model!r}") from error
            raise self._rejection("written", error) from error

    def _rejection(self, what: str, error: ApiError) -> ControlError:
        if error.code == NO_STREAM:
            return storage_failure(
                f"the bucket {self.bucket!r} of {self._model!r} does not exist; an admin creates it: rollbus "
                "make-queue MODEL --upload-bytes N"
            )
        return storage_failure(f"the bucket {self.bucket!r} cannot be {what}: {error}")


async def read_chain(nats: Connection, fleet: str, model: str) -> ChainRecord | None:
    """Return the chain record of a model without taking its lease. Return None if nothing was ever published.

    Raises:
        ControlError: `storage`: JetStream refuses.
        BusBroken: JetStream does not answer.
    """
    key = ChainKey(nats, fleet, model)
    with storage_errors(f"the bucket {key.bucket!r} cannot be read"):
        if not await list_subjects(nats, key.bucket, info_subject(key.bucket, CHAIN_OBJECT)):
            return None
    return (await key.read()).record


def as_rank_object(info: ObjectInfo) -> RankObject:
    """Convert an object's description in the folder to its entry in a rank's list."""
    given = msgspec.convert(info, RankObject, from_attributes=True)
    return given if info.options is None else replace(given, part_bytes=info.options.max_chunk_size)


def as_info(bucket: str, given: RankObject) -> ObjectInfo:
    """Convert an object's entry in a rank's list to its description in the folder."""
    fields = asdict(given)
    return ObjectInfo(bucket=bucket, options=ObjectOptions(max_chunk_size=fields.pop("part_bytes")), **fields)


async def find_failure(nats: Connection, bucket: str, name: str) -> str | None:
    """Return the reason why a rank failed; None if the rank stored no reason, or did not sign it.

    Raises:
        ApiError: the server refuses.
        ControlError: `bad_source`: the stored message is no valid description.
        BusBroken: JetStream does not answer.
    """
    found = await find_object(nats, bucket, name, is_signed=True)
    if found is None or found.info is None:
        return None
    return found.info.metadata.get(REASON, "")[:MAX_REASON_CHARS]


async def silence_of(nats: Connection, bucket: str, prefix: str, rank: int, silences: dict[int, Silence]) -> str | None:
    """Check for a new sign of life of a rank without a list. Return the problem if the rank was silent for too long.

    Args:
        prefix: prefix of the lists of the ranks.
        silences: the silences of all ranks that have sent a sign of life.

    Raises:
        ApiError: the server refuses.
        BusBroken: JetStream does not answer.
    """
    found = await find_object(nats, bucket, sign_name(prefix, rank), is_signed=True)
    if found is None:
        return None
    silent_s = silences.setdefault(rank, Silence()).record(found.sequence, time.monotonic())
    return None if silent_s < SILENT_S else f"rank {rank} joined, but {has_been_silent()}"


def has_been_silent() -> str:
    """Return the problem of a rank without a sign of life, phrased to follow its name."""
    return f"has sent no sign of life for {SILENT_S:g} s"


def sign_name(prefix: str, rank: int) -> str:
    """Return the name of the object with which a rank shows that it lives."""
    return f"{prefix}/alive/{rank}"
