"""The objects and failure reports that ranks other than 0 store for rank 0."""

from typing import Final

import msgspec

from ...schemas.chain import MAX_REASON_CHARS, RankObject
from ..nats.connection import Connection
from ..nats.jetstream import put
from ..objects.catalog import find_object
from ..objects.layout import ObjectInfo, ObjectOptions, info_subject

__all__ = ["as_info", "as_rank_object", "find_failure", "store_failure"]

REASON: Final = "rollbus-reason"
"""Metadata field of an object without content: the reason why a rank failed."""


def as_rank_object(info: ObjectInfo) -> RankObject:
    """Convert an object's description in the folder to its entry in a rank's list."""
    return RankObject(
        name=info.name,
        nuid=info.nuid,
        size=info.size,
        chunks=info.chunks,
        digest=info.digest,
        mtime=info.mtime,
        part_bytes=0 if info.options is None else info.options.max_chunk_size,
    )


def as_info(bucket: str, given: RankObject) -> ObjectInfo:
    """Convert an object's entry in a rank's list to its description in the folder."""
    return ObjectInfo(
        name=given.name,
        bucket=bucket,
        nuid=given.nuid,
        size=given.size,
        chunks=given.chunks,
        digest=given.digest,
        mtime=given.mtime,
        options=ObjectOptions(max_chunk_size=given.part_bytes),
    )


async def store_failure(nats: Connection, bucket: str, name: str, reason: str) -> None:
    """Store the reason why a rank failed.

    Raises:
        ApiError: the server refuses.
        BusBroken: JetStream does not answer.
    """
    info = ObjectInfo(name=name, bucket=bucket, nuid="failed", metadata={REASON: reason[:MAX_REASON_CHARS]})
    subject, data = info_subject(bucket, name), msgspec.json.encode(info)
    await put(nats, subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})


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
