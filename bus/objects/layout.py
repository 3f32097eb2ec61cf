"""The layout of objects in JetStream: names, subjects and descriptions, as all NATS clients use them."""

import base64
import re
from typing import Final

import msgspec

from ...schemas.decoding import MALFORMED
from ...schemas.errors import bad_source

MAX_FILES: Final = 4096
"""Maximum files of one folder, several times as many as the largest checkpoints have."""
MAX_PATH_CHARS: Final = 1024
"""Maximum characters of a prefix, or of a file's path below it."""
FOLDER_DIGEST: Final = "rollbus-folder"
"""Metadata field of an object: the digest of all objects of its folder."""
_DIGEST: Final = "SHA-256="
_BUCKET: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The storage options of an object."""

    max_chunk_size: int = 0
    """Bytes of each part except the last."""
    link: dict[str, str] | None = None
    """Bucket and name of another object that has the content; None: the object has its own content."""


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The store's description of one object, with the field names of the standard."""

    name: str
    bucket: str
    nuid: str = ""
    """Last token of the subject of the object's parts."""
    size: int = 0
    """Size in bytes."""
    chunks: int = 0
    """Number of parts, which NATS calls chunks."""
    digest: str = ""
    """`SHA-256=` and the digest in URL-safe base64."""
    mtime: str = ""
    """Time of storage."""
    deleted: bool = False
    """True if another client deleted the object and left this marker."""
    options: ObjectOptions | None = None
    metadata: dict[str, str] = {}
    """Metadata; signed objects have `FOLDER_DIGEST`."""


def split_objects(objects: str) -> tuple[str, str]:
    """Return bucket and prefix of a source written `<bucket>/<prefix>`.

    Raises:
        ControlError: `bad_source`.
    """
    bucket, _, prefix = objects.partition("/")
    check_bucket(bucket)
    check_path(prefix, f"the prefix of objects:{objects}")
    return bucket, prefix


def check_bucket(bucket: str) -> None:
    """Check that NATS allows the name of the bucket.

    Raises:
        ControlError: `bad_source`.
    """
    if _BUCKET.fullmatch(bucket) is None:
        raise bad_source(f"{bucket[:80]!r} is no bucket; allowed: letters, digits, '_' and '-'")


def check_path(path: str, what: str) -> None:
    """Check that a path is unambiguous and cannot lead out of its folder.

    Raises:
        ControlError: `bad_source`; the message begins with `what`.
    """
    is_plain = 0 < len(path) <= MAX_PATH_CHARS and path.isprintable() and "\\" not in path
    if not is_plain or any(part in {"", ".", ".."} for part in path.split("/")):
        raise bad_source(
            f"{what[:200]} is {path[:200]!r}; allowed: a relative path without '..', empty parts and backslashes"
        )


def stream_of(bucket: str) -> str:
    """Return the name of the stream that holds a bucket."""
    return f"OBJ_{bucket}"


def stream_config(bucket: str, max_bytes: int) -> dict[str, object]:
    """Return the configuration of a bucket's stream, equal to that of every NATS client."""
    return {
        "name": stream_of(bucket),
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "storage": "file",
        "discard": "new",
        "max_bytes": max_bytes,
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }


def parts_subject(bucket: str, nuid: str) -> str:
    """Return the subject of the parts of one object."""
    return f"$O.{bucket}.C.{nuid}"


def info_subjects(bucket: str) -> str:
    """Return the subject of the descriptions of all objects."""
    return f"$O.{bucket}.M.>"


def info_subject(bucket: str, name: str) -> str:
    """Return the subject of the description of one object. Its last token is the encoded name."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def name_of(subject: str) -> str | None:
    """Return the object's name in a description's subject; None: the name is invalid."""
    token = subject.rpartition(".")[2]
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except ValueError:  # no base64, or not in UTF-8
        return None


def encode_digest(digest: bytes) -> str:
    """Encode a SHA-256 for a description."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def decode_digest(info: ObjectInfo) -> bytes:
    """Return the expected SHA-256 of an object.

    Raises:
        ControlError: `bad_source`: the description has no SHA-256.
    """
    encoded = info.digest
    if encoded[: len(_DIGEST)].upper() == _DIGEST:
        encoded = encoded[len(_DIGEST) :]
        try:
            digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        except ValueError:
            digest = b""
        if len(digest) == 32:
            return digest
    raise bad_source(f"{shown(info)} has no SHA-256, but the digest {info.digest[:80]!r}")


def decode_info(data: bytes) -> ObjectInfo:
    """Decode a description.

    Raises:
        ControlError: `bad_source`: the description is invalid, contradicts itself, or only links to another object.
    """
    try:
        info = msgspec.json.decode(data, type=ObjectInfo)
    except MALFORMED as error:
        raise bad_source(f"an object's description does not decode: {error}") from error
    if info.options is not None and info.options.link is not None:
        raise bad_source(f"{shown(info)} is a link; allowed: objects that have content")
    if not info.deleted:
        # The nuid becomes a token of a subject, and the sizes limit the bytes that are written.
        is_sound = info.nuid.isalnum() and 0 <= info.chunks <= info.size and (info.size == 0) == (info.chunks == 0)
        if not is_sound:
            raise bad_source(
                f"{shown(info)} contradicts itself: {info.size} bytes in {info.chunks} parts of {info.nuid[:80]!r}"
            )
    return info


def shown(info: ObjectInfo) -> str:
    """Return the name of an object for messages."""
    return f"objects:{info.bucket[:80]}/{info.name[:200]}"
