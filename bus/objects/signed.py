"""Signatures of stored folders. Each object's description is signed, and has the digest of the whole folder.

Only a user that may sign can therefore change, add or remove a file. See `rollbus.bus.auth.signatures`.
"""

import hashlib
from collections.abc import Iterable

import msgspec

from ...schemas.errors import ControlCode, ControlError
from ..nats.connection import Connection
from ..nats.jetstream import ApiError, put
from ..protocol.fleet.authority import check_unlimited
from .catalog import list_prefix
from .layout import FOLDER_DIGEST, ObjectInfo, info_subject, split_objects
from .sender import Sender

__all__ = ["check_folder", "describe_folder", "folder_digest", "sign_folder", "store_descriptions"]


def folder_digest(objects: str, infos: Iterable[ObjectInfo]) -> str:
    """Return the digest of a folder: its location and the digest of each file."""
    _, prefix = split_objects(objects)
    files = sorted((info.name.removeprefix(f"{prefix}/"), info.size, info.digest) for info in infos)
    lines = [objects, *(f"{path} {size} {digest}" for path, size, digest in files)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def describe_folder(objects: str, infos: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the descriptions with the digest of the folder."""
    infos = list(infos)
    metadata = {FOLDER_DIGEST: folder_digest(objects, infos)}
    return [msgspec.structs.replace(info, metadata=metadata) for info in infos]


async def store_descriptions(nats: Connection, sender: Sender, infos: Iterable[ObjectInfo]) -> None:
    """Store descriptions, signed if this program signs. From then on, readers find the objects.

    Raises:
        ControlError: `storage`: the bucket is full.
        BusBroken: the connection or JetStream failed; some descriptions may be stored.
    """
    for info in infos:
        subject, data = info_subject(info.bucket, info.name), msgspec.json.encode(info)
        await sender.send(subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})
    await sender.finish()


def check_folder(objects: str, infos: Iterable[ObjectInfo]) -> None:
    """Check that a folder of signed descriptions is complete.

    Raises:
        ControlError: `bad_source`.
    """
    infos = list(infos)
    digest = folder_digest(objects, infos)
    for info in infos:
        if info.metadata.get(FOLDER_DIGEST) != digest:
            raise ControlError(
                ControlCode.BAD_SOURCE,
                f"objects:{objects} is not the folder that was signed: a file was changed, added or removed since",
            )


async def sign_folder(nats: Connection, objects: str) -> int:
    """Sign a stored folder without a check of its author. Return its number of objects.

    Raises:
        ControlError: `bad_source`: the folder has no objects; `not_allowed`; `storage`.
        BusBroken: JetStream does not answer; some objects may be signed.
    """
    check_unlimited(nats.signatures.own)
    bucket, _ = split_objects(objects)
    infos = describe_folder(objects, await list_prefix(nats, objects, is_signed=False))
    for info in infos:
        subject, data = info_subject(bucket, info.name), msgspec.json.encode(info)
        try:
            await put(nats, subject, data, {"Nats-Rollup": "sub", **nats.signatures.headers(subject, data)})
        except ApiError as error:
            raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be signed: {error}") from error
    return len(infos)
