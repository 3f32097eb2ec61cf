"""Builds the tensors of a version one at a time: from the previous version and its changes, with a hash check.

A valid tensor is written to its position in the files of the version. All functions block, and run in `threads`.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...bus.protocol.weights.tensors import DeltaError, Encoded, FileLayout, apply_delta, layouts
from ...schemas.errors import bad_source
from ...schemas.manifest import Manifest, TensorDelta, TensorEntry
from ...schemas.rows import Uint8s
from .content import PIECE_BYTES, Tensor, hash_range, open_file, open_regular
from .threads import Job, Scratch

OnBytes = Callable[[int], None]
"""Called with the number of bytes just processed, on any thread."""


class Change(NamedTuple):
    """The change of a tensor in one version of the chain."""

    file: Path
    """The object that contains the change."""
    delta: TensorDelta


class _Target(NamedTuple):
    """The position of a tensor in a file of the version."""

    path: Path
    offset: int


def prepare_files(manifest: Manifest, folder: Path) -> None:
    """Create the safetensors files of a version with header and size, but without tensor contents.

    Existing files with the same names are reused. Everything else in `folder` is deleted.
    """
    files = list(layouts(manifest.tensors))
    _delete_others(folder, files)
    for file in files:
        with open_file(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600) as fd:
            os.ftruncate(fd, file.size)
            _write(fd, np.frombuffer(file.header, np.uint8), 0)


def build_jobs(
    manifest: Manifest,
    base: Mapping[str, Tensor],
    changes: Mapping[str, Sequence[Change]],
    folder: Path,
    on_bytes: OnBytes,
) -> Iterator[Job]:
    """Yield a job for each tensor of a version, which writes it into the files of `prepare_files`.

    A job raises ControlError (`bad_source`) if its tensor does not match the manifest. The message names the tensor.

    Args:
        base: the tensors to which `changes` are applied, with the same names and sizes.
        changes: the changes of each changed tensor, by name, in the order of the chain.
    """
    for file in layouts(manifest.tensors):
        for entry, offset in file.offsets():
            changed = changes.get(entry.name, ())
            target = _Target(folder / file.name, offset)
            yield partial(_build, entry, base[entry.name], changed, target, on_bytes)


def verify_jobs(manifest: Manifest, folder: Path, on_bytes: OnBytes) -> Iterator[Job]:
    """Yield a job for each tensor, which compares it in the safetensors files of `folder` with a manifest.

    A job raises ControlError (`bad_source`), and the message names the tensor. This function raises the same error if a
    file has another layout than the manifest requires.
    """
    for file in layouts(manifest.tensors):
        path = folder / file.name
        _check_header(path, file)
        for entry, offset in file.offsets():
            yield partial(_verify, entry, path, offset, on_bytes)


def verify_file(path: Path, sha256: str, _scratch: Scratch | None = None) -> None:
    """Compare a whole file with its digest. This is also a job.

    Raises:
        ControlError: `bad_source`.
    """
    with open_regular(path) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise bad_source(path, f"is damaged: its SHA-256 is {found}, expected: {sha256}")


def check_no_others(folder: Path, names: Collection[str]) -> None:
    """Check that a folder has no files except `names`, because an engine would read other files too.

    Raises:
        ControlError: `bad_source`. The message names the first other file.
    """
    for parent, _, files in os.walk(folder):
        for file in sorted(files):
            if (path := Path(parent, file)).relative_to(folder).as_posix() not in names:
                raise bad_source(path, "is no file of this source")


def copy_others(manifest: Manifest, base: Path, folder: Path) -> None:
    """Copy the files of a version that contain no tensors from the base folder.

    Raises:
        ControlError: `bad_source`: a file is missing there, or differs.
    """
    for name, sha256 in manifest.files.items():
        if not (base / name).is_file():
            raise bad_source(base / name, "is missing: the version that is built from this folder needs the file")
        shutil.copyfile(base / name, folder / name)
        verify_file(folder / name, sha256)


def _build(
    entry: TensorEntry, base: Tensor, changes: Sequence[Change], target: _Target, on_bytes: OnBytes, scratch: Scratch
) -> None:
    """Build one tensor in memory, and write it if its hash is correct."""
    content = scratch.get(entry.size)
    dense = [number for number, change in enumerate(changes) if change.delta.encoding == "dense"]
    if not dense:
        _read(base.file, base.begin, content)
    for change in changes[dense[-1] if dense else 0 :]:
        try:
            apply_delta(_read_change(change), content, entry.item_bytes)
        except DeltaError as error:
            problem = f"the tensor {entry.name[:200]!r} cannot be made of {change.file.name}: {error}"
            raise bad_source(problem) from error
    sha = hashlib.sha256()
    for begin in range(0, entry.size, PIECE_BYTES):
        piece = content.data[begin : begin + PIECE_BYTES]
        sha.update(piece)
        on_bytes(len(piece))
    _check_sha256(entry, sha.hexdigest())
    with open_file(target.path, os.O_WRONLY | os.O_NOFOLLOW) as fd:
        _write(fd, content, target.offset)


def _verify(entry: TensorEntry, path: Path, offset: int, on_bytes: OnBytes, scratch: Scratch) -> None:
    """Read one tensor from its file and verify its hash."""
    _check_sha256(entry, hash_range(path, offset, entry.size, on_bytes, scratch))


def _check_sha256(entry: TensorEntry, found: str) -> None:
    if found != entry.sha256:
        raise bad_source(
            f"the tensor {entry.name[:200]!r} has the SHA-256 {found}; expected: {entry.sha256}, as in the manifest"
        )


def _read_change(change: Change) -> Encoded:
    """Read a change from its object, whose size was compared with it before the fetch."""
    delta = change.delta
    data = np.empty(delta.num_bytes, np.uint8)
    _read(change.file, delta.offset, data)
    return Encoded(delta.encoding, delta.num_changed, delta.body_bytes, data.tobytes())


def _check_header(path: Path, file: FileLayout) -> None:
    if not path.is_file() or path.stat().st_size != file.size:
        raise bad_source(f"{file.name} is missing, or its size is not the {file.size} bytes of the manifest")
    header = np.empty(len(file.header), np.uint8)
    _read(path, 0, header)
    if header.tobytes() != file.header:
        raise bad_source(f"{file.name} has another header than the manifest requires")


def _delete_others(folder: Path, files: Iterable[FileLayout]) -> None:
    """Delete everything except the files of a version. The folder may contain files of another version."""
    names = {file.name for file in files}
    for entry in list(folder.iterdir()):
        if entry.is_symlink() or not entry.is_dir():
            if entry.name not in names:
                entry.unlink()
        else:
            shutil.rmtree(entry)


def _read(path: Path, offset: int, into: Uint8s) -> None:
    """Fill `into` from a file.

    Raises:
        ControlError: `bad_source`: the file is too short.
    """
    with open_file(path, os.O_NOFOLLOW) as fd:
        rest = into.data
        while rest:
            count = os.preadv(fd, [rest], offset)
            if not count:
                raise bad_source(path, f"ends at byte {offset}; expected: {len(rest)} more")
            rest, offset = rest[count:], offset + count


def _write(fd: int, content: Uint8s, offset: int) -> None:
    rest = content.data
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count
