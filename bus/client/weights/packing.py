"""Packs tensors: encoded tensors into the objects of a delta, whole tensors into the files of an anchor."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import MAX_DELTA_OBJECTS, delta_name

__all__ = ["DELTA_BYTES", "SHARD_BYTES", "DeltaPacker", "ShardPlan", "StoredObject"]

DELTA_BYTES: Final = 64 * 1024**2
"""Maximum size of a delta object, except for a single larger tensor. An interrupted reader loses at most one object."""
SHARD_BYTES: Final = 512 * 1024**2
"""Maximum size of the tensors in a file of an anchor, except for a single larger tensor."""
SINGLE_FILE: Final = "model.safetensors"
"""File name if the whole model fits into one file."""
MAX_SHARDS: Final = 4000
"""Maximum number of files of an anchor, about 2 TB. It is below the limit of a folder."""

Piece = bytes | memoryview


class StoredObject(NamedTuple):
    """An object to store."""

    name: str
    num_bytes: int
    pieces: Callable[[], Iterator[Piece]]
    """Yields the content. Call it off the event loop, because it may compute the content."""


class DeltaPacker:
    """Packs encoded tensors into objects, in the order in which they are added.

    Args:
        rank: rank of this process among `num_ranks`. Each rank uses every `num_ranks`-th object number.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._number = rank
        self._num_ranks = num_ranks
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.total_bytes = 0

    def __repr__(self) -> str:
        """Return one line with the packed bytes."""
        return f"<DeltaPacker number={self._number} bytes={self.total_bytes}>"

    def add(self, data: bytes) -> tuple[int, int, StoredObject | None]:
        """Pack `data`. Return its object number, its offset in the object, and an object that is now complete, or None.

        Raises:
            InvalidRequest: a manifest cannot name another object.
        """
        full = self.flush() if self._num_bytes + len(data) > DELTA_BYTES else None
        if self._number >= MAX_DELTA_OBJECTS:
            raise InvalidRequest(
                field="named_tensors",
                problem=f"needs more than {MAX_DELTA_OBJECTS} delta objects of {DELTA_BYTES} bytes",
                allowed="a smaller change, or an anchor, which a new publisher stores first",
            )
        offset = self._num_bytes
        self._pieces.append(data)
        self._num_bytes += len(data)
        self.total_bytes += len(data)
        return self._number, offset, full

    def flush(self) -> StoredObject | None:
        """Return the incomplete object, or None if there is none."""
        if not self._num_bytes:
            return None
        pieces, num_bytes, number = self._pieces, self._num_bytes, self._number
        self._pieces, self._num_bytes = [], 0
        self._number += self._num_ranks
        return StoredObject(delta_name(number), num_bytes, lambda: iter(pieces))


class ShardPlan:
    """Assigns tensors to the files of a first anchor, in the order in which they are added.

    The name of the first file depends on whether a second file exists. A file's name is therefore known only when the
    next file begins.

    Args:
        single: name of the single file for all tensors of any size. None: as many files as necessary.
    """

    def __init__(self, rank: int, num_ranks: int, single: str | None) -> None:
        self._single = single
        self._number = rank + 1
        self._num_ranks = num_ranks
        self._names: list[str] = []
        self._num_bytes = 0
        self._is_first = True

    def __repr__(self) -> str:
        """Return one line with the present file."""
        return f"<ShardPlan number={self._number} tensors={len(self._names)}>"

    def add(self, name: str, num_bytes: int) -> tuple[str, list[str]] | None:
        """Add a tensor. Return a file that is now complete with the names of its tensors, or None.

        Raises:
            InvalidRequest: the folder cannot have another file.
        """
        full = None
        if self._single is None and self._names and self._num_bytes + num_bytes > SHARD_BYTES:
            full = self._close(is_last=False)
        if self._number > MAX_SHARDS:
            raise InvalidRequest(
                field="named_tensors",
                problem=f"needs more than {MAX_SHARDS} files",
                allowed=f"at most {MAX_SHARDS} files",
            )
        self._names.append(name)
        self._num_bytes += num_bytes
        return full

    def flush(self) -> tuple[str, list[str]] | None:
        """Return the incomplete file with the names of its tensors, or None if there is none."""
        return self._close(is_last=True) if self._names else None

    def _close(self, *, is_last: bool) -> tuple[str, list[str]]:
        is_single = is_last and self._is_first and self._num_ranks == 1
        file = self._single or (SINGLE_FILE if is_single else f"model-{self._number:05d}.safetensors")
        names, self._names, self._num_bytes = self._names, [], 0
        self._number += self._num_ranks
        self._is_first = False
        return file, names
