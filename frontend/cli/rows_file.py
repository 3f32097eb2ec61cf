"""Routed experts of many results in one `.npz`, written so that a crash at any moment loses no array that was added.

An `.npz` is readable only once the directory at its end is written. So while results come in, each array is a file of
its own in a folder beside it (`NAME.npz.partial/KEY.npy`). At the end, also an early one, they move into the `.npz`,
which is replaced as a whole. After a crash, the next run takes up the files that it finds.
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
    """Arrays by key, for one writer. Leaving it, also by an error, makes them readable with `numpy.load`.

    Raises:
        CommandFailed: what lies at `path` is no `.npz`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = path.with_name(path.name + ".partial")
        self._saved = _saved_names(path)
        self._folder.mkdir(exist_ok=True)

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<RowsFile {self.path} saved={len(self._saved)}>"

    def __contains__(self, key: str) -> bool:
        """Whether the array of `key` is there."""
        return f"{key}.npy" in self._saved or (self._folder / f"{key}.npy").exists()

    def __enter__(self) -> Self:
        """Open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move what the folder holds into the `.npz`."""
        added = sorted(self._folder.glob("*.npy"))
        if added:
            self._merge(added)
        shutil.rmtree(self._folder)

    def append(self, key: str, rows: Rows) -> None:
        """Add an array, u1 or <u2, of three dimensions; it survives the end of this process from here on."""
        draft = self._folder / "draft"
        with draft.open("wb") as file:
            np.save(file, rows, allow_pickle=False)
        draft.replace(self._folder / f"{key}.npy")

    def _merge(self, added: Sequence[Path]) -> None:
        draft = self.path.with_name(self.path.name + ".tmp")
        # A prompt whose line was lost was computed again; a name must not stand twice in an archive.
        kept = self._saved - {file.name for file in added}
        with zipfile.ZipFile(draft, "w") as archive:
            if kept:
                _copy_members(self.path, archive, kept)
            for file in added:
                archive.write(file, file.name)
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
        raise CommandFailed(f"{path} is no .npz ({exc}); choose another --output", ExitCode.USAGE) from None


def _copy_members(source: Path, target: zipfile.ZipFile, names: frozenset[str]) -> None:
    with zipfile.ZipFile(source) as archive:
        for name in sorted(names):
            with archive.open(name) as old, target.open(name, "w", force_zip64=True) as new:
                shutil.copyfileobj(old, new)
