"""What ranks other than 0 store for rank 0: objects, as lists name them and as the folder describes them; failures."""

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
    """Return an object as a list names it."""
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
    """Return an object as the folder describes it."""
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
    """Store why a rank gives nothing.

    Raises:
        ApiError: the server refuses.
        BusBroken: JetStream does not answer.
    """
    info = ObjectInfo(name=name, bucket=bucket, nuid="failed", metadata={REASON: reason[:MAX_REASON_CHARS]})
    subject, data = info_subject(bucket, name), msgspec.json.encode(info)
    await put(nats, subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})


async def find_failure(nats: Connection, bucket: str, name: str) -> str | None:
    """Read why a rank gives nothing; None: it did not say so, or did not sign that.

    Raises:
        ApiError: the server refuses.
        ControlError: `bad_source`: what stands there is no description.
        BusBroken: JetStream does not answer.
    """
    found = await find_object(nats, bucket, name, is_signed=True)
    if found is None or found.info is None:
        return None
    return found.info.metadata.get(REASON, "")[:MAX_REASON_CHARS]
