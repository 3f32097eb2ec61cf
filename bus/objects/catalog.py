"""Functions that list, delete and create the content of buckets.

All functions raise `BusBroken` if JetStream does not answer.
"""

import base64
import logging
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from ...schemas.errors import ControlError, bad_source, storage_failure
from ..auth.credentials import BadSignature
from ..logs import RejectionCount
from ..nats.connection import Connection
from ..nats.jetstream import NO_MESSAGE, NO_STREAM, ask, create_stream, find, headers_of, storage_errors
from ..nats.library import Client
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

logger = logging.getLogger(__name__)
_rejected, _invalid = RejectionCount(), RejectionCount()

NO_LIMIT: Final = 2**62
"""Limit of a bucket that shares the server's storage."""

BUCKET_BYTES: Final = 32 * 1024**3
"""Size of a new bucket: two checkpoints of a model with 8 billion parameters in 16 bits."""


async def ensure_bucket(nats: Connection, bucket: str, *, max_bytes: int = BUCKET_BYTES) -> bool:
    """Create the bucket and return True if it does not exist. Leave an existing bucket unchanged.

    Raises:
        ControlError: `bad_source`: the bucket's name is invalid; `storage`: the server rejects the request.
    """
    check_bucket(bucket)
    with storage_errors(f"the bucket {bucket!r} cannot be read"):
        if await find(nats, f"STREAM.INFO.{stream_of(bucket)}", absent={NO_STREAM}) is not None:
            return False
    with storage_errors(f"the bucket {bucket!r} cannot be created"):
        await create_stream(nats, stream_config(bucket, max_bytes))
    return True


async def set_bucket_bytes(nats: Connection, bucket: str, max_bytes: int) -> str:
    """Set the size of a bucket; create the bucket if it is missing. Return `created`, `resized` or `unchanged`.

    Raises:
        ControlError: `bad_source`, as in `ensure_bucket`; `storage`: the server rejects the request, or the bucket
            holds more.
        BusBroken: JetStream does not answer.
    """
    if await ensure_bucket(nats, bucket, max_bytes=max_bytes):
        return "created"
    stream = stream_of(bucket)
    with storage_errors(f"the bucket {bucket!r} cannot be resized"):
        info = await ask(nats, f"STREAM.INFO.{stream}")
        if info["config"]["max_bytes"] == max_bytes:
            return "unchanged"
        used = info["state"]["bytes"]
        # With a lower limit, the server would reject all uploads, including the record of published weights.
        if used > max_bytes:
            raise storage_failure(f"the bucket {bucket!r} holds {used} bytes; it cannot have {max_bytes}")
        await ask(nats, f"STREAM.UPDATE.{stream}", {**info["config"], "max_bytes": max_bytes})
    return "resized"


async def list_objects(
    nats: Connection, bucket: str, prefix: str = "", *, is_signed: bool = False, is_lenient: bool = False
) -> tuple[ObjectInfo, ...]:
    """Return the descriptions of the objects below `prefix`, by name. An empty prefix means the whole bucket.

    A missing bucket has no objects.

    Args:
        is_signed: omit unsigned objects if signatures are required.
        is_lenient: omit invalid descriptions, and log them.

    Raises:
        ControlError: `bad_source`: more than `MAX_FILES` objects, or an invalid description; `storage`.
    """
    check_bucket(bucket)
    if prefix:
        check_path(prefix, "the prefix")
    start = f"{prefix}/" if prefix else ""
    with storage_errors(f"the bucket {bucket!r} cannot be read"):
        found = [name_of(subject) for subject in await list_subjects(nats, bucket, info_subjects(bucket))]
        names = [name for name in found if name is not None and name.startswith(start)]
        if len(names) > MAX_FILES:
            raise bad_source(f"objects:{bucket}/{prefix} has {len(names)} objects; at most {MAX_FILES}")
        objects = [
            await find_object(nats, bucket, name, is_signed=is_signed, is_lenient=is_lenient) for name in sorted(names)
        ]
    return tuple(one.info for one in objects if one is not None and one.info is not None)


async def list_prefix(nats: Connection, objects: str, *, is_signed: bool) -> tuple[ObjectInfo, ...]:
    """Return the descriptions of the objects in a folder `<bucket>/<prefix>`, at least one.

    Raises:
        ControlError: `bad_source`: the folder's name is invalid, or it has no objects; and as in `list_objects`.
    """
    bucket, prefix = split_objects(objects)
    infos = await list_objects(nats, bucket, prefix, is_signed=is_signed)
    if not infos:
        what = "signed objects" if is_signed and nats.signatures.are_demanded else "objects"
        raise bad_source(f"objects:{objects}: the bucket {bucket!r} has no {what} below {prefix!r}")
    return infos


async def delete_prefix(nats: Connection, objects: str) -> int:
    """Delete all objects of a folder `<bucket>/<prefix>` without a marker. Return their number.

    Objects with an invalid description are of other programs, and stay.

    Raises:
        ControlError: `bad_source`, `storage`, as in `list_objects`.
        BusBroken: JetStream does not answer; some objects may be deleted.
    """
    bucket, prefix = split_objects(objects)
    infos = await list_objects(nats, bucket, prefix, is_lenient=True)
    await delete_objects(nats, bucket, infos)
    return len(infos)


async def delete_objects(nats: Client, bucket: str, infos: tuple[ObjectInfo, ...]) -> None:
    """Delete objects. Delete descriptions first, so that no reader starts on an object whose parts disappear.

    Raises:
        ControlError: `storage`.
        BusBroken: JetStream does not answer; some objects may be deleted.
    """
    subjects = [info_subject(bucket, info.name) for info in infos]
    subjects += [parts_subject(bucket, info.nuid) for info in infos]
    with storage_errors(f"objects of {bucket!r} cannot be deleted"):
        for subject in subjects:
            await find(nats, f"STREAM.PURGE.{stream_of(bucket)}", {"filter": subject}, absent={NO_STREAM})


class BucketState(NamedTuple):
    """The server's report on a bucket."""

    used: int
    """Used bytes."""
    limit: int
    """Maximum bytes; `NO_LIMIT` if the bucket shares the server's storage."""
    now: datetime
    """Time of the server's clock."""


async def bucket_state(nats: Client, bucket: str) -> BucketState:
    """Return the used bytes, the limit and the time of a bucket.

    Raises:
        ApiError: the server rejects the request, or the bucket does not exist.
        BusBroken: JetStream does not answer.
    """
    answer = await ask(nats, f"STREAM.INFO.{stream_of(bucket)}")
    limit = answer["config"].get("max_bytes", -1)
    used, now = answer["state"]["bytes"], datetime.fromisoformat(answer["ts"])
    return BucketState(used, limit if limit >= 0 else NO_LIMIT, now)


async def list_subjects(nats: Client, bucket: str, subjects: str) -> list[str]:
    """Return the subjects of the bucket that have messages. The server returns up to 100,000 at a time.

    If the bucket does not exist, the list is empty.

    Raises:
        ApiError: the server rejects the request.
    """
    listed: list[str] = []
    while True:
        question: dict[str, Any] = {"subjects_filter": subjects, "offset": len(listed)}
        answer = await find(nats, f"STREAM.INFO.{stream_of(bucket)}", question, absent={NO_STREAM})
        if answer is None:
            return []
        found = answer["state"].get("subjects") or {}
        listed += found
        if not found or len(listed) >= answer.get("total", 0):
            return listed


def describe_object(nats: Connection, info: ObjectInfo) -> tuple[str, bytes, dict[str, str]]:
    """Return subject, content and headers of the message that describes an object, signed if this program signs."""
    subject, data = info_subject(info.bucket, info.name), msgspec.json.encode(info)
    return subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)}


class FoundObject(NamedTuple):
    """The description of an object, as the server has stored it."""

    sequence: int
    """Sequence number of the message, for a compare-and-set."""
    stored_at: datetime
    """Time of storage by the server's clock."""
    info: ObjectInfo | None
    """Description of the object; None: the object is deleted, or lacks a required signature or a valid description."""
    invalid: bytes = b""
    """The content of an invalid description."""


async def find_object(
    nats: Connection, bucket: str, name: str, *, is_signed: bool, is_lenient: bool = False
) -> FoundObject | None:
    """Read the description of one object; None: there is no such object.

    Args:
        nats: the connection.
        bucket: bucket of the object.
        name: name of the object.
        is_signed: as in `list_objects`.
        is_lenient: return and log an invalid description, which other programs may have stored.

    Raises:
        ApiError: the server rejects the request.
        ControlError: `bad_source`: the description is invalid, or that of another object.
    """
    subject = info_subject(bucket, name)
    answer = await find(nats, f"STREAM.MSG.GET.{stream_of(bucket)}", {"last_by_subj": subject}, absent={NO_MESSAGE})
    if answer is None:
        return None
    message = answer["message"]
    stored_at = datetime.fromisoformat(message["time"])
    data = base64.b64decode(message.get("data", ""))
    if is_signed and not _is_signed(nats, bucket, name, data, headers_of(message)):
        return FoundObject(message["seq"], stored_at, None)
    try:
        info = decode_info(data)
        if (info.name, info.bucket) != (name, bucket):
            raise bad_source(f"objects:{bucket}/{name} describes itself as {info.bucket}/{info.name}"[:1000])
    except ControlError as error:
        if not is_lenient:
            raise
        _invalid.warn(logger, "objects.skipped bucket=%s object=%s so_far=%s error=%s", bucket, name, error)
        return FoundObject(message["seq"], stored_at, None, data)
    return FoundObject(message["seq"], stored_at, None if info.deleted else info)


def _is_signed(nats: Connection, bucket: str, name: str, data: bytes, headers: dict[str, str]) -> bool:
    try:
        signed = nats.signatures.check(info_subject(bucket, name), data, headers)
        if signed is not None and signed.by.is_limited:
            by = signed.by
            # It may replace only the weights of its models.
            if bucket not in {published_bucket(by.fleet, model) for model in by.models or ()}:
                raise BadSignature(f"{by.role} {by.name} may not upload there")
    except BadSignature as error:
        _rejected.warn(logger, "objects.rejected bucket=%s object=%s so_far=%s error=%s", bucket, name, error)
        return False
    return True
