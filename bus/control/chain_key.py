"""The location of the chain record of a model's published weights, and its compare-and-set."""

import logging
import math
from typing import Final, NamedTuple

import msgspec

from ...schemas.chain import CHAIN, CHAIN_OBJECT, ChainRecord, decode_chain
from ...schemas.errors import ControlCode, ControlError, RemoteProtocolError
from ..nats.connection import Connection
from ..nats.jetstream import NO_STREAM, WRONG_LAST_SEQUENCE, ApiError, Unanswered, put
from ..objects.catalog import BucketState, bucket_state, find_object, list_subjects
from ..objects.layout import ObjectInfo, info_subject, stream_of
from ..subjects import published_bucket
from .retries import TRY_S

__all__ = ["ChainKey", "StoredChain", "read_chain"]

logger = logging.getLogger(__name__)


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
        self._nats = nats
        self._model = model
        self.bucket: Final = published_bucket(fleet, model)

    def __repr__(self) -> str:
        """Return one line with the bucket."""
        return f"<ChainKey {self.bucket}>"

    async def bucket_state(self) -> BucketState:
        """Return the state of the bucket.

        Raises:
            ControlError: `storage`: the bucket does not exist.
        """
        try:
            return await bucket_state(self._nats, self.bucket)
        except ApiError as error:
            raise self._refused("read", error) from error

    async def read(self) -> StoredChain:
        """Return the record. A record that does not decode, or lacks a required signature, counts as empty.

        Raises:
            ControlError: `storage`: the bucket does not exist.
        """
        try:
            found = await find_object(self._nats, self.bucket, CHAIN_OBJECT, is_signed=True)
        except ApiError as error:
            raise self._refused("read", error) from error
        if found is None:
            return StoredChain(ChainRecord(model=self._model), 0, math.inf)
        try:
            if found.info is None:
                raise RemoteProtocolError("the record is deleted or not signed")
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
        subject, data = info_subject(self.bucket, CHAIN_OBJECT), msgspec.json.encode(info)
        headers = {
            "Nats-Rollup": "sub",
            "Nats-Expected-Stream": stream_of(self.bucket),
            "Nats-Expected-Last-Subject-Sequence": str(sequence),
            **self._nats.signatures.headers(subject, data),
        }
        try:
            return await put(self._nats, subject, data, headers, timeout_s=TRY_S)
        except ApiError as error:
            if error.code in WRONG_LAST_SEQUENCE:
                return None
            if error.code == NO_STREAM:
                raise Unanswered(f"no server stores the chain record of {self._model!r}") from error
            raise self._refused("written", error) from error

    def _refused(self, what: str, error: ApiError) -> ControlError:
        if error.code == NO_STREAM:
            return ControlError(
                ControlCode.STORAGE,
                f"the bucket {self.bucket!r} of {self._model!r} does not exist; an admin creates it: rollbus "
                "make-queue MODEL --upload-bytes N",
            )
        return ControlError(ControlCode.STORAGE, f"the bucket {self.bucket!r} cannot be {what}: {error}")


async def read_chain(nats: Connection, fleet: str, model: str) -> ChainRecord | None:
    """Return the chain record of a model without taking its lease. Return None if nothing was ever published.

    Raises:
        ControlError: `storage`: JetStream refuses.
        BusBroken: JetStream does not answer.
    """
    key = ChainKey(nats, fleet, model)
    try:
        if not await list_subjects(nats, key.bucket, info_subject(key.bucket, CHAIN_OBJECT)):
            return None
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"the bucket {key.bucket!r} cannot be read: {error}") from error
    return (await key.read()).record
