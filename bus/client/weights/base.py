"""A publisher's beginning with a folder instead of nothing: only if it holds what was committed last."""

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
    """Read a folder's tensors into an empty snapshot of `manifest`. Blocks.

    Args:
        files: that stand beside the tensors of what is published next.

    Raises:
        InvalidRequest: a tensor is not what the manifest says; or `files` are others, which a delta does not bring.
    """
    shown = f"{os.fspath(folder)}, and version {manifest.version} was published with"
    known = {name: sha256 for name, sha256 in manifest.files.items() if name != INDEX}
    if differing := sorted(known.items() ^ {(name, file.sha256) for name, file in files.items()}):
        raise _bad(f"{shown} another {differing[0][0]}")
    entries = {entry.name: entry for entry in manifest.tensors}
    tensors: dict[str, SnapshotTensor] = {}
    for name, tensor in folder_tensors(folder):
        kind, content = read_tensor(name, tensor)
        own = content.copy()
        entry = entries.get(name)
        if entry is None or name in tensors or hashlib.sha256(own.data).hexdigest() != entry.sha256:
            raise _bad(f"{shown} another {name[:200]}, or without it")
        if (entry.dtype, entry.shape) != (kind.dtype, kind.shape):
            raise _bad(f"{shown} {name[:200]} in another form")
        tensors[name] = SnapshotTensor(kind, entry.file, entry.sha256, own)
    if missing := sorted(entries.keys() - tensors.keys()):
        raise _bad(f"{shown} {missing[0][:200]} besides")
    snapshot.tensors = {name: tensors[name] for name in entries}
    snapshot.digest = manifest.digest


def _bad(problem: str) -> InvalidRequest:
    return InvalidRequest(
        field="base", problem=f"is {problem}", allowed="the content of the last published version, or no base"
    )
