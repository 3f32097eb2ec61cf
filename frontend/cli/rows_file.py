"""Writes the routed experts of many results into one `.npz`. A crash loses no array that was added.

An `.npz` is readable only after the directory at its end is written. So during the run each array is a separate file in
a folder beside the `.npz` (`NAME.npz.partial/KEY.npy`). At the end, even after an error, all arrays move into a new
`.npz`, which replaces the old one as a whole. After a crash, the next run uses the files in the folder.
"""

import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from ...schemas.rows import Rows
from .exits import CommandFailed, ExitCode

__all__ = ["RowsFile"]


class RowsFile:
    """Arrays by key, for one writer. After the exit, even by an error, `numpy.load` can read the arrays.

    Raises:
        CommandFailed: the file at `path` is not an `.npz`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.with_name(path.name + ".partial")
        self._saved = _saved_names(path)
        self._folder.mkdir(exist_ok=True)
        self.num_bytes = 0
        """Bytes of the arrays that were added."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<RowsFile {self.path} saved={len(self._saved)}>"

    def __contains__(self, key: str) -> bool:
        """Return True if the array of `key` was added in this run or an earlier one."""
        return f"{key}.npy" in self._saved or (self._folder / f"{key}.npy").exists()

    def __enter__(self) -> Self:
        """Return this file, which is already open."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move the arrays of the folder into the `.npz`."""
        added = sorted(self._folder.glob("*.npy"))
        if added:
            self._merge(added)
        shutil.rmtree(self._folder)

    def append(self, key: str, rows: Rows) -> None:
        """Add an array, u1 or <u2, of three dimensions. After the return, it survives a crash of this process."""
        self.num_bytes += rows.nbytes
        draft = self._folder / "draft"
        with draft.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        draft.replace(self._folder / f"{key}.npy")

    def _merge(self, added: Sequence[Path]) -> None:
        draft = self.path.with_name(self.path.name + ".tmp")
        # A prompt whose line was lost was computed again. An archive must not have two members of the same name.
        kept = self._saved - {file.name for file in added}
        try:
            with zipfile.ZipFile(draft, "w") as archive:
                if kept:
                    _copy_members(self.path, archive, kept)
                for file in added:
                    archive.write(file, file.name)
        except OSError:
            # On a full disk, the draft must not take the space of the arrays, which the next run merges.
            draft.unlink(missing_ok=True)
            raise
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(self.path)


def _saved_names(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except zipfile.BadZipFile as exc:
        raise CommandFailed(f"{path} is not an .npz file ({exc}); choose another --output", ExitCode.USAGE) from None


def _copy_members(source: Path, target: zipfile.ZipFile, names: frozenset[str]) -> None:
    with zipfile.ZipFile(source) as archive:
        for name in sorted(names):
            with archive.open(name) as old, target.open(name, "w", force_zip64=True) as new:
                shutil.copyfileobj(old, new)
