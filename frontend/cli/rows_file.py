"""Routed experts of many results in one `.npz`, written so that a crash at any moment loses no array that was added.

An `.npz` is readable only once the directory at its end is written. So while results come in, arrays are appended to
a journal beside it (`NAME.npz.partial`); at the end, also an early one, they move into the `.npz`, which is replaced
as a whole. After a crash, the next run takes up the journal that it finds.

The journal is a sequence of records: one line of JSON with the array's key, dtype and shape, then its bytes.
"""

import math
import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import numpy as np

from frontend.cli.exits import CommandFailed, ExitCode
from schemas.rows import Rows, dtype_of

__all__ = ["RowsFile"]

MAX_HEADER_BYTES = 4096
"""Far more than a record's header takes; bounds what is read while looking for its end."""


class _Header(msgspec.Struct, frozen=True):
    key: str
    dtype: str
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class RowsFile:
    """Arrays by key, for one writer. Leaving it, for whatever reason, makes them readable with `numpy.load`.

    Raises:
        CommandFailed: what lies at `path` is no `.npz`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal_path = path.with_name(path.name + ".partial")
        self._saved = _saved_keys(path)
        self._journal = self._journal_path.open("a+b")
        # Where each array's record starts; an array added twice counts as added last.
        self._offsets = _recover(self._journal)

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<RowsFile {self.path} saved={len(self._saved)} journal={len(self._offsets)}>"

    def __contains__(self, key: str) -> bool:
        """Whether the array of `key` is there."""
        return key in self._offsets or key in self._saved

    def __enter__(self) -> Self:
        """Open already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Move what the journal holds into the `.npz`."""
        with self._journal:
            if self._offsets:
                self._merge()
        self._journal_path.unlink()

    def append(self, key: str, rows: Rows) -> None:
        """Add an array, u1 or <u2, of three dimensions; it survives the end of this process from here on."""
        header = _Header(key, dtype_of(rows), rows.shape)
        self._offsets[key] = self._journal.seek(0, os.SEEK_END)
        self._journal.write(msgspec.json.encode(header) + b"\n")
        self._journal.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        self._journal.flush()

    def _merge(self) -> None:
        draft = self.path.with_name(self.path.name + ".tmp")
        draft.unlink(missing_ok=True)
        # A prompt whose line was lost was computed again; a name must not stand twice in an archive.
        stale = self._saved & self._offsets.keys()
        if self._saved and not stale:
            shutil.copyfile(self.path, draft)
        with zipfile.ZipFile(draft, "a") as archive:
            if stale:
                _copy_members(self.path, archive, self._saved - stale)
            for key, offset in self._offsets.items():
                self._journal.seek(offset)
                header = msgspec.json.decode(self._journal.readline(), type=_Header)
                rows = np.frombuffer(self._journal.read(header.num_bytes), header.dtype).reshape(header.shape)
                with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                    np.save(member, rows, allow_pickle=False)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self.path)


def _saved_keys(path: Path) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(name.removesuffix(".npy") for name in archive.namelist())
    except zipfile.BadZipFile as exc:
        raise CommandFailed(f"{path} is no .npz ({exc}); choose another --output", ExitCode.USAGE) from None


def _copy_members(source: Path, target: zipfile.ZipFile, keys: Iterable[str]) -> None:
    with zipfile.ZipFile(source) as archive:
        for key in sorted(keys):
            with archive.open(f"{key}.npy") as old, target.open(f"{key}.npy", "w", force_zip64=True) as new:
                shutil.copyfileobj(old, new)


def _recover(journal: IO[bytes]) -> dict[str, int]:
    """Find the complete records and cut off what a crash left behind them."""
    size = journal.seek(0, os.SEEK_END)
    offsets: dict[str, int] = {}
    offset = journal.seek(0)
    while offset < size:
        try:
            header = msgspec.json.decode(journal.readline(MAX_HEADER_BYTES), type=_Header)
            end = journal.tell() + header.num_bytes
        except (msgspec.DecodeError, TypeError):
            break
        if end > size:
            break
        offsets[header.key] = offset
        offset = journal.seek(end)
    journal.truncate(offset)
    return offsets
