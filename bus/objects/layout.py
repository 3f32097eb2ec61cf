"""How objects lie in JetStream: names, subjects and the description of an object, as all NATS clients agree on them."""

import base64
import re
from typing import Final

import msgspec

from ...schemas.errors import ControlCode, ControlError

__all__ = [
    "FOLDER_DIGEST",
    "MAX_FILES",
    "ObjectInfo",
    "ObjectLink",
    "ObjectOptions",
    "check_bucket",
    "check_path",
    "decode_digest",
    "decode_info",
    "encode_digest",
    "info_subject",
    "info_subjects",
    "name_of",
    "parts_subject",
    "split_objects",
    "stream_config",
    "stream_of",
]

MAX_FILES: Final = 4096
"""Of one folder: several times what the largest checkpoints have."""
MAX_PATH_CHARS: Final = 1024
"""Of a prefix, or of a file's path below it."""
FOLDER_DIGEST: Final = "rollbus-folder"
"""In the metadata of an object: what all objects of its folder are."""
_DIGEST: Final = "SHA-256="
_BUCKET: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")


class ObjectLink(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an object points that has no content of its own."""

    bucket: str = ""
    name: str = ""


class ObjectOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an object is stored."""

    max_chunk_size: int = 0
    """Bytes of each of its parts but the last; NATS calls parts chunks."""
    link: ObjectLink | None = None
    """Set where the object only points at another one."""


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the store says of one object, under the names that the standard gives its fields."""

    name: str
    bucket: str
    nuid: str = ""
    """The last token of its parts' subject."""
    size: int = 0
    """Bytes."""
    chunks: int = 0
    """Parts."""
    digest: str = ""
    """`SHA-256=` and the digest in URL-safe base64."""
    mtime: str = ""
    """When it was put."""
    deleted: bool = False
    """Other clients leave this in place of what they delete."""
    options: ObjectOptions | None = None
    metadata: dict[str, str] = {}
    """Of signed objects: `FOLDER_DIGEST`."""


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
    """Refuse what NATS allows no bucket to be called.

    Raises:
        ControlError: `bad_source`.
    """
    if _BUCKET.fullmatch(bucket) is None:
        raise ControlError(
            ControlCode.BAD_SOURCE, f"{bucket[:80]!r} is no bucket; allowed: letters, digits, '_' and '-'"
        )


def check_path(path: str, what: str) -> None:
    """Refuse a path that could lead out of the folder it is meant for, or that means two things.

    Raises:
        ControlError: `bad_source`; the message begins with `what`.
    """
    is_plain = 0 < len(path) <= MAX_PATH_CHARS and path.isprintable() and "\\" not in path
    if not is_plain or any(part in {"", ".", ".."} for part in path.split("/")):
        raise ControlError(
            ControlCode.BAD_SOURCE,
            f"{what[:200]} is {path[:200]!r}; allowed: a relative path without '..', empty parts and backslashes",
        )


def stream_of(bucket: str) -> str:
    """Name the stream that holds a bucket."""
    return f"OBJ_{bucket}"


def stream_config(bucket: str, max_bytes: int) -> dict[str, object]:
    """Describe the stream of a bucket, as every NATS client would make it."""
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
    """Where the parts of one object lie."""
    return f"$O.{bucket}.C.{nuid}"


def info_subjects(bucket: str) -> str:
    """Where the descriptions of all objects lie."""
    return f"$O.{bucket}.M.>"


def info_subject(bucket: str, name: str) -> str:
    """Where the description of one object lies; its last token is the name."""
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def name_of(subject: str) -> str | None:
    """Return the object's name that a description's subject bears; None: no name that an object could have."""
    token = subject.rpartition(".")[2]
    try:
        return base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode()
    except ValueError:  # no base64, or not in UTF-8
        return None


def encode_digest(digest: bytes) -> str:
    """Write a SHA-256 as descriptions have it."""
    return _DIGEST + base64.urlsafe_b64encode(digest).decode()


def decode_digest(info: ObjectInfo) -> bytes:
    """Return the SHA-256 that an object must have.

    Raises:
        ControlError: `bad_source`: it has none.
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
    raise ControlError(ControlCode.BAD_SOURCE, f"{_shown(info)} has no SHA-256, but the digest {info.digest[:80]!r}")


def decode_info(data: bytes) -> ObjectInfo:
    """Read a description.

    Raises:
        ControlError: `bad_source`: it is none, it contradicts itself, or it only links to another object.
    """
    try:
        info = msgspec.json.decode(data, type=ObjectInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ControlError(ControlCode.BAD_SOURCE, f"an object's description does not decode: {error}") from error
    if info.options is not None and info.options.link is not None:
        raise ControlError(ControlCode.BAD_SOURCE, f"{_shown(info)} is a link; allowed: objects that have content")
    if not info.deleted:
        # The nuid becomes a subject's token, and sizes bound what is written.
        is_sound = info.nuid.isalnum() and 0 <= info.chunks <= info.size and (info.size == 0) == (info.chunks == 0)
        if not is_sound:
            raise ControlError(
                ControlCode.BAD_SOURCE,
                f"{_shown(info)} contradicts itself: {info.size} bytes in {info.chunks} parts of {info.nuid[:80]!r}",
            )
    return info


def _shown(info: ObjectInfo) -> str:
    return f"objects:{info.bucket[:80]}/{info.name[:200]}"
