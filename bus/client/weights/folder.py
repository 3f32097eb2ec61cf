"""The files besides the tensors in a version's folder: the index, the manifest, config.json and others."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from ....schemas.manifest import TensorEntry
from ...protocol.weights.safetensors_layout import INDEX, index_of
from .checkpoint import FolderFile
from .packing import StoredObject

__all__ = ["file_objects", "with_index"]


def with_index(files: Mapping[str, FolderFile], entries: Sequence[TensorEntry]) -> dict[str, FolderFile]:
    """Add the index of `entries` to the files of a folder if the tensors are in several files."""
    if len({entry.file for entry in entries}) < 2:
        return dict(files)
    index = index_of(entries)
    return {**files, INDEX: FolderFile(index, hashlib.sha256(index).hexdigest())}


def file_objects(files: Mapping[str, FolderFile]) -> Iterator[StoredObject]:
    """Yield files as objects to store."""
    for name, file in files.items():
        data = file.data
        yield StoredObject(name, len(data), lambda data=data: iter((data,)))  # type: ignore[misc]
