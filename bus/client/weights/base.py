"""Lets a publisher start from a folder, if the folder has the content of the last committed version."""

import hashlib
import os
from collections.abc import Mapping

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import Manifest
from ...protocol.weights.safetensors_layout import INDEX
from .checkpoint import FolderFile, folder_tensors
from .snapshot import Snapshot, SnapshotTensor
from .tensors import read_tensor

__all__ = ["fill"]


def fill(
    snapshot: Snapshot, manifest: Manifest, files: Mapping[str, FolderFile], folder: str | os.PathLike[str]
) -> None:
    """Read a folder's tensors into an empty snapshot of `manifest`. This blocks.

    Args:
        files: files besides the tensors in the next publication.

    Raises:
        InvalidRequest: a tensor differs from the manifest, or `files` differ from it. A delta contains no files, so
            they must be equal.
    """
    shown = f"{os.fspath(folder)}, and version {manifest.version} was published with"
    known = {name: sha256 for name, sha256 in manifest.files.items() if name != INDEX}
    if differing := sorted(known.items() ^ {(name, file.sha256) for name, file in files.items()}):
        raise _bad_base(f"{shown} another {differing[0][0]}")
    entries = {entry.name: entry for entry in manifest.tensors}
    tensors: dict[str, SnapshotTensor] = {}
    for name, tensor in folder_tensors(folder):
        kind, content = read_tensor(name, tensor)
        own = content.copy()
        entry = entries.get(name)
        if entry is None or name in tensors or hashlib.sha256(own.data).hexdigest() != entry.sha256:
            raise _bad_base(f"{shown} another {name[:200]}, or without it")
        if (entry.dtype, entry.shape) != (kind.dtype, kind.shape):
            raise _bad_base(f"{shown} another dtype or shape of {name[:200]}")
        tensors[name] = SnapshotTensor(kind, entry.file, entry.sha256, own)
    if missing := sorted(entries.keys() - tensors.keys()):
        raise _bad_base(f"{shown} {missing[0][:200]}, which the folder lacks")
    snapshot.tensors = {name: tensors[name] for name in entries}
    snapshot.digest = manifest.digest


def _bad_base(problem: str) -> InvalidRequest:
    return InvalidRequest(
        field="base", problem=f"is {problem}", allowed="the content of the last published version, or no base"
    )
