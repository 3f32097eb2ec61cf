"""Reads the manifest of a published version, and validates it before anything is fetched or allocated."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...bus.objects.catalog import NO_LIMIT, BucketState
from ...bus.objects.folder_reader import FolderReader
from ...bus.protocol.weights.chain import chain_length
from ...bus.protocol.weights.safetensors_layout import layouts
from ...bus.protocol.weights.tensor_delta import max_body_bytes
from ...schemas.errors import RemoteProtocolError
from ...schemas.manifest import (
    DELTA_PREFIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Link,
    Manifest,
    TensorEntry,
    decode_manifest,
    delta_name,
)
from ...schemas.weights import PublishedVersion
from .checkpoint import check_tensors
from .headers import Tensor
from .roots import bad_source

__all__ = [
    "anchor_files",
    "check_manifest",
    "check_same_tensors",
    "delta_files",
    "describe",
    "read_link",
    "read_manifest",
]

MAX_SLACK: Final = 1024**2
"""Bytes by which a delta may exceed the size of all tensors."""


async def read_manifest(folder: FolderReader, objects: str) -> Manifest | None:
    """Read the manifest of a folder. Return None if it has none: the folder is an upload, not a published version.

    Raises:
        ControlError: `bad_source`: the manifest does not decode, or belongs to another folder; `storage`.
    """
    if MANIFEST not in folder.names:
        return None
    data = await folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = await asyncio.to_thread(decode_manifest, data)
    except RemoteProtocolError as error:
        raise bad_source(f"objects:{objects}: {error}") from error
    if manifest.own.objects != objects:
        raise bad_source(f"objects:{objects} has the manifest of objects:{manifest.own.objects}")
    return manifest


def describe(manifest: Manifest, bucket: BucketState) -> PublishedVersion:
    """Return the information that the worker reports about a version and about its bucket."""
    own = manifest.own
    return PublishedVersion(
        version=manifest.version,
        stored_bytes=(own.delta_bytes or 0) + (own.anchor_bytes or 0),
        model_bytes=sum(entry.size for entry in manifest.tensors),
        chain_length=chain_length(manifest.links),
        used_bytes=bucket.used,
        limit_bytes=0 if bucket.limit == NO_LIMIT else bucket.limit,
    )


def check_manifest(manifest: Manifest, model: str, own: Mapping[str, Tensor] | None) -> None:
    """Check that a version belongs to the worker's model, and that its chain is valid.

    Args:
        model: the worker's model. The manifest of an adapter names the model of the adapter's base.
        own: tensors of the worker's checkpoint, or None if they are unknown.

    Raises:
        ControlError: `bad_source`. The message names both models, or the first wrong tensor or link.
    """
    where = f"objects:{manifest.own.objects}"
    if manifest.model != model:
        # Models of one family have the same tensors, so matching tensors do not prove that the model is the same.
        raise bad_source(f"{where} is of the model {manifest.model!r}; expected: {model!r}, as the worker's")
    bucket = manifest.own.objects.partition("/")[0]
    folders = [link.objects for link in manifest.links]
    if len(set(folders)) != len(folders):
        raise bad_source(f"{where} has a chain with a version twice")
    for folder in folders:
        if folder.partition("/")[0] != bucket:
            raise bad_source(f"{where} has the version objects:{folder} in its chain, which is in another bucket")
    if own is not None:
        # The sizes of tensors limit the decompressed bytes, and the sizes of files limit the written bytes.
        tensors = {entry.name: Tensor(entry.dtype, entry.shape, Path(entry.file)) for entry in manifest.tensors}
        check_tensors(where, tensors, own)


async def read_link(folder: FolderReader, link: Link, newest: Manifest) -> Manifest:
    """Read the manifest of another version of the chain of `newest`.

    Raises:
        ControlError: `bad_source`: the manifest is missing, of another model, or of another version than `link`;
            `storage`.
    """
    where = f"objects:{link.objects}"
    manifest = await read_manifest(folder, link.objects)
    if manifest is None:
        raise bad_source(f"{where} has no {MANIFEST}: it is no published version")
    if (manifest.model, manifest.adapter) != (newest.model, newest.adapter):
        raise bad_source(f"{where} is of the model {manifest.model!r}; expected: {newest.model!r}")
    if (manifest.digest, manifest.version) != (link.digest, link.version):
        raise bad_source(f"{where} is the version {manifest.version} of digest {manifest.digest}; expected: {link}")
    return manifest


def check_same_tensors(manifest: Manifest, newest: Mapping[str, TensorEntry]) -> None:
    """Check that a version has the same tensors as the newest version of its chain, whose sizes are already checked.

    Raises:
        ControlError: `bad_source`.
    """
    where = f"objects:{manifest.own.objects}"
    if newest.keys() != {entry.name for entry in manifest.tensors}:
        raise bad_source(f"{where} has other tensors than the versions after it")
    for entry in manifest.tensors:
        expected = newest[entry.name]
        if (entry.dtype, entry.shape) != (expected.dtype, expected.shape):
            raise bad_source(
                f"{where} has the tensor {entry.name[:200]!r} as {entry.dtype}{list(entry.shape)}; expected: "
                f"{expected.dtype}{list(expected.shape)}, as the versions after it"
            )


def delta_files(folder: FolderReader, manifest: Manifest) -> dict[str, int]:
    """Return the objects that contain the changes of a version's delta, with their sizes.

    Raises:
        ControlError: `bad_source`: an object is missing, or a change is outside of its object or too large.
    """
    where = f"objects:{manifest.own.objects}"
    files: dict[str, int] = {}
    for entry in manifest.tensors:
        if (delta := entry.delta) is None:
            continue
        shown, name = f"{where} has the tensor {entry.name[:200]!r}", delta_name(delta.object)
        if name not in folder.names:
            raise bad_source(f"{shown} in {name}, which is missing")
        files[name] = folder.names[name].size
        num_items = entry.size // entry.item_bytes
        if delta.offset + delta.num_bytes > files[name]:
            raise bad_source(f"{shown} up to byte {delta.offset + delta.num_bytes} of {name}, which has {files[name]}")
        if delta.num_changed > num_items or max(delta.num_bytes, delta.body_bytes) > max_body_bytes(
            delta.encoding, delta.num_changed, num_items, entry.item_bytes
        ):
            raise bad_source(f"{shown} with a change that is larger than the tensor can have: {delta}")
    if sum(files.values()) > MAX_SLACK + sum(entry.size for entry in manifest.tensors):
        raise bad_source(f"{where} has a delta that is larger than all its tensors")
    return files


def anchor_files(folder: FolderReader, manifest: Manifest) -> dict[str, int]:
    """Return the objects of a version's anchor, with their sizes.

    Raises:
        ControlError: `bad_source`: an object is missing, or its size is not that of its tensors.
    """
    where = f"objects:{manifest.own.objects}"
    files: dict[str, int] = {}
    for file in layouts(manifest.tensors):
        if file.name not in folder.names or folder.names[file.name].size != file.size:
            raise bad_source(f"{where} lacks {file.name}, or its size is not the {file.size} bytes of its tensors")
        files[file.name] = file.size
    for name in manifest.files:
        if name not in folder.names or name.startswith(DELTA_PREFIX):
            raise bad_source(f"{where} lacks {name}, which its manifest names")
        files[name] = folder.names[name].size
    return files
