"""What is in a bucket: listing and deleting; and making a bucket that is missing.

All functions raise `BusBroken` if JetStream does not answer.
"""

import base64
import logging
from datetime import datetime
from typing import Any, Final, NamedTuple

from nats.aio.client import Client

from ...schemas.certificate import Certificate
from ...schemas.errors import ControlCode, ControlError
from ..auth.signatures import BadSignature
from ..nats.connection import Connection
from ..nats.jetstream import NO_MESSAGE, NO_STREAM, ApiError, ask, create_stream, headers_of
from ..subjects import published_bucket
from .layout import (
    MAX_FILES,
    ObjectInfo,
    check_bucket,
    check_path,
    decode_info,
    info_subject,
    info_subjects,
    name_of,
    parts_subject,
    split_objects,
    stream_config,
    stream_of,
)

__all__ = [
    "BUCKET_BYTES",
    "NO_LIMIT",
    "BucketState",
    "FoundObject",
    "bucket_state",
    "delete_objects",
    "delete_prefix",
    "ensure_bucket",
    "find_object",
    "list_objects",
    "list_prefix",
    "list_subjects",
    "set_bucket_bytes",
]

logger = logging.getLogger(__name__)

NO_LIMIT: Final = 2**62
"""Of a bucket that shares what the server has."""

BUCKET_BYTES: Final = 32 * 1024**3
"""Of a bucket that is made here: two checkpoints of a model with 8 billion parameters in 16 bits."""


async def ensure_bucket(nats: Connection, bucket: str, *, max_bytes: int = BUCKET_BYTES) -> None:
    """Make the bucket unless it is there; one that is there stays as it is.

    Raises:
        ControlError: `bad_source`: no bucket can be called so; `storage`: the server refuses.
    """
    check_bucket(bucket)
    try:
        await ask(nats, f"STREAM.INFO.{stream_of(bucket)}")
        return
    except ApiError as error:
        if error.code != NO_STREAM:
            raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be read: {error}") from error
    try:
        await create_stream(nats, stream_config(bucket, max_bytes))
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be made: {error}") from error


async def set_bucket_bytes(nats: Connection, bucket: str, max_bytes: int) -> None:
    """Give a bucket that many bytes; make it if it is missing.

    Raises:
        ControlError: `bad_source`, as in `ensure_bucket`; `storage`: the server refuses, or the bucket holds more.
        BusBroken: JetStream does not answer.
    """
    await ensure_bucket(nats, bucket, max_bytes=max_bytes)
    stream = stream_of(bucket)
    try:
        info = await ask(nats, f"STREAM.INFO.{stream}")
        if info["config"]["max_bytes"] == max_bytes:
            return
        used = info["state"]["bytes"]
        # The server would refuse all uploads from then on, and the record of published weights with them.
        if used > max_bytes:
            raise ControlError(
                ControlCode.STORAGE, f"the bucket {bucket!r} holds {used} bytes; it cannot have {max_bytes}"
            )
        await ask(nats, f"STREAM.UPDATE.{stream}", {**info["config"], "max_bytes": max_bytes})
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be resized: {error}") from error


async def list_objects(
    nats: Connection, bucket: str, prefix: str = "", *, is_signed: bool = False
) -> tuple[ObjectInfo, ...]:
    """Describe the objects below `prefix`, by name; all of the bucket where it is empty. No bucket, no objects.

    Args:
        is_signed: leave out those that are not signed, where signatures are demanded.

    Raises:
        ControlError: `bad_source`: more than `MAX_FILES`, or one whose description is none; `storage`.
    """
    check_bucket(bucket)
    if prefix:
        check_path(prefix, "the prefix")
    start = f"{prefix}/" if prefix else ""
    try:
        names = [name for name in await _names(nats, bucket) if name.startswith(start)]
        if len(names) > MAX_FILES:
            raise ControlError(
                ControlCode.BAD_SOURCE, f"objects:{bucket}/{prefix} has {len(names)} objects; at most {MAX_FILES}"
            )
        infos = [await _info(nats, bucket, name, is_signed) for name in sorted(names)]
    except ApiError as error:
        raise ControlError(ControlCode.STORAGE, f"the bucket {bucket!r} cannot be read: {error}") from error
    return tuple(info for info in infos if info is not None)


async def list_prefix(nats: Connection, objects: str, *, is_signed: bool) -> tuple[ObjectInfo, ...]:
    """Describe the objects of a folder written `<bucket>/<prefix>`; there must be some.

    Raises:
        ControlError: `bad_source`: it is not written so, or nothing is there; and as in `list_objects`.
    """
    bucket, prefix = split_objects(objects)
    infos = await list_objects(nats, bucket, prefix, is_signed=is_signed)
    if not infos:
        what = "signed objects" if is_signed and nats.signatures.are_demanded else "objects"
        raise ControlError(
            ControlCode.BAD_SOURCE, f"objects:{objects}: the bucket {bucket!r} has no {what} below {prefix!r}"
        )
    return infos


async def delete_prefix(nats: Connection, objects: str) -> int:
    """Delete all objects of a folder written `<bucket>/<prefix>`, without a trace; return how many there were.

    Raises:
        ControlError: `bad_source`, `storage`, as in `list_objects`.
        BusBroken: JetStream does not answer; some may be deleted.
    """
    bucket, prefix = split_objects(objects)
    infos = await list_objects(nats, bucket, prefix)
    await delete_objects(nats, bucket, infos)
    return len(infos)


async def delete_objects(nats: Client, bucket: str, infos: tuple[ObjectInfo, ...]) -> None:
    """Delete objects: first what describes them, so that no reader begins on one whose parts go.

    Raises:
        ControlError: `storage`.
        BusBroken: JetStream does not answer; some may be deleted.
    """
    subjects = [info_subject(bucket, info.name) for info in infos]
    subjects += [parts_subject(bucket, info.nuid) for info in infos]
    for subject in subjects:
        try:
            await ask(nats, f"STREAM.PURGE.{stream_of(bucket)}", {"filter": subject})
        except ApiError as error:
            if error.code == NO_STREAM:
                return
            raise ControlError(ControlCode.STORAGE, f"objects of {bucket!r} cannot be deleted: {error}") from error


async def _names(nats: Client, bucket: str) -> list[str]:
    """List the names of all objects."""
    found = [name_of(subject) for subject in await list_subjects(nats, bucket, info_subjects(bucket))]
    return [name for name in found if name is not None]


class BucketState(NamedTuple):
    """What a bucket says of itself."""

    used: int
    """Bytes."""
    limit: int
    """Bytes; `NO_LIMIT` if it shares what the server has."""
    now: datetime
    """By the server's clock."""


async def bucket_state(nats: Client, bucket: str) -> BucketState:
    """Ask how full a bucket is.

    Raises:
        ApiError: the server refuses, or there is no bucket.
        BusBroken: JetStream does not answer.
    """
    answer = await ask(nats, f"STREAM.INFO.{stream_of(bucket)}")
    limit = answer["config"].get("max_bytes", -1)
    used, now = answer["state"]["bytes"], datetime.fromisoformat(answer["ts"])
    return BucketState(used, limit if limit >= 0 else NO_LIMIT, now)


async def list_subjects(nats: Client, bucket: str, subjects: str) -> list[str]:
    """List the subjects of the bucket that have messages; the server gives up to 100,000 at a time. No bucket, none.

    Raises:
        ApiError: the server refuses.
    """
    listed: list[str] = []
    while True:
        question: dict[str, Any] = {"subjects_filter": subjects, "offset": len(listed)}
        try:
            answer = await ask(nats, f"STREAM.INFO.{stream_of(bucket)}", question)
        except ApiError as error:
            if error.code == NO_STREAM:
                return []
            raise
        found = answer["state"].get("subjects") or {}
        listed += found
        if not found or len(listed) >= answer.get("total", 0):
            return listed


def _is_own(by: Certificate, bucket: str) -> bool:
    """The bucket is that of a model whose weights this user may replace."""
    return any(bucket == published_bucket(by.fleet, model) for model in by.models or ())


class FoundObject(NamedTuple):
    """The description of an object, as the server has stored it."""

    sequence: int
    """Of its message, for a compare-and-set."""
    stored_at: datetime
    """By the server's clock."""
    info: ObjectInfo | None
    """None: it is deleted, or not signed where it has to be."""


async def find_object(nats: Connection, bucket: str, name: str, *, is_signed: bool) -> FoundObject | None:
    """Read one object's description; None: there is none.

    Args:
        nats: the connection.
        bucket: of the object.
        name: of the object.
        is_signed: as in `list_objects`.

    Raises:
        ApiError: the server refuses.
        ControlError: `bad_source`: what stands there is no description, or another object's.
    """
    subject = info_subject(bucket, name)
    try:
        answer = await ask(nats, f"STREAM.MSG.GET.{stream_of(bucket)}", {"last_by_subj": subject})
    except ApiError as error:
        if error.code == NO_MESSAGE:
            return None
        raise
    message = answer["message"]
    stored_at = datetime.fromisoformat(message["time"])
    data = base64.b64decode(message.get("data", ""))
    if is_signed and not _is_signed(nats, bucket, name, data, headers_of(message)):
        return FoundObject(message["seq"], stored_at, None)
    info = decode_info(data)
    if (info.name, info.bucket) != (name, bucket):
        raise ControlError(
            ControlCode.BAD_SOURCE, f"objects:{bucket}/{name} describes itself as {info.bucket}/{info.name}"[:1000]
        )
    return FoundObject(message["seq"], stored_at, None if info.deleted else info)


def _is_signed(nats: Connection, bucket: str, name: str, data: bytes, headers: dict[str, str]) -> bool:
    try:
        signed = nats.signatures.check(info_subject(bucket, name), data, headers)
        if signed is not None and signed.by.is_limited and not _is_own(signed.by, bucket):
            raise BadSignature(f"{signed.by.role} {signed.by.name} may not upload there")
    except BadSignature as error:
        logger.warning("objects.refused bucket=%s object=%s error=%s", bucket, name, error)
        return False
    return True


async def _info(nats: Connection, bucket: str, name: str, is_signed: bool) -> ObjectInfo | None:
    """Read one object's description; None: it is deleted, or not signed where it has to be."""
    found = await find_object(nats, bucket, name, is_signed=is_signed)
    return None if found is None else found.info
