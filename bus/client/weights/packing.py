"""How tensors are packed: encoded ones into the objects of a delta, whole ones into the files of an anchor."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import MAX_DELTA_OBJECTS, delta_name

__all__ = ["DELTA_BYTES", "SHARD_BYTES", "DeltaPacker", "ShardPlan", "StoredObject"]

DELTA_BYTES: Final = 64 * 1024**2
"""Of an object of a delta; only a tensor that is larger by itself takes more. What an interrupted reader loses."""
SHARD_BYTES: Final = 512 * 1024**2
"""Of the tensors in a file of an anchor; only a tensor that is larger by itself takes more."""
SINGLE_FILE: Final = "model.safetensors"
"""Where the whole model fits into one file."""
MAX_SHARDS: Final = 4000
"""Files of an anchor, below what a folder may have; 2 TB."""

Piece = bytes | memoryview


class StoredObject(NamedTuple):
    """An object to store."""

    name: str
    num_bytes: int
    pieces: Callable[[], Iterator[Piece]]
    """Yields the content, which may be computed meanwhile: to be called off the event loop."""


class DeltaPacker:
    """Packs encoded tensors into objects, in the order in which they come.

    Args:
        rank: of this process among `num_ranks`: each rank has every `num_ranks`-th number.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._number = rank
        self._num_ranks = num_ranks
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.total_bytes = 0

    def __repr__(self) -> str:
        """One line with what is packed."""
        return f"<DeltaPacker number={self._number} bytes={self.total_bytes}>"

    def add(self, data: bytes) -> tuple[int, int, StoredObject | None]:
        """Return the number of the object that `data` goes into, the offset there, and an object that is now whole.

        Raises:
            InvalidRequest: it is one object more than a manifest may name.
        """
        full = self.flush() if self._num_bytes + len(data) > DELTA_BYTES else None
        if self._number >= MAX_DELTA_OBJECTS:
            raise InvalidRequest(
                field="named_tensors",
                problem=f"changed in more than {MAX_DELTA_OBJECTS} objects of {DELTA_BYTES} bytes",
                allowed="a smaller change, or an anchor: a new publisher begins with one",
            )
        offset = self._num_bytes
        self._pieces.append(data)
        self._num_bytes += len(data)
        self.total_bytes += len(data)
        return self._number, offset, full

    def flush(self) -> StoredObject | None:
        """Return the object that was begun; None: none was."""
        if not self._num_bytes:
            return None
        pieces, num_bytes, number = self._pieces, self._num_bytes, self._number
        self._pieces, self._num_bytes = [], 0
        self._number += self._num_ranks
        return StoredObject(delta_name(number), num_bytes, lambda: iter(pieces))


class ShardPlan:
    """Assigns tensors to the files of a first anchor, in the order in which they come.

    The first file's name depends on whether there is a second one, so a file is known when the next one begins.

    Args:
        single: name of the one file of all tensors, however large they are; None: as many files as it takes.
    """

    def __init__(self, rank: int, num_ranks: int, single: str | None) -> None:
        self._single = single
        self._number = rank + 1
        self._num_ranks = num_ranks
        self._names: list[str] = []
        self._num_bytes = 0
        self._is_first = True

    def __repr__(self) -> str:
        """One line with the file that is filled."""
        return f"<ShardPlan number={self._number} tensors={len(self._names)}>"

    def add(self, name: str, num_bytes: int) -> tuple[str, list[str]] | None:
        """Add a tensor; return a file that is now whole, and the names of its tensors.

        Raises:
            InvalidRequest: it is one file more than a folder may have.
        """
        full = None
        if self._single is None and self._names and self._num_bytes + num_bytes > SHARD_BYTES:
            full = self._close(is_last=False)
        if self._number > MAX_SHARDS:
            raise InvalidRequest(
                field="named_tensors", problem=f"takes more than {MAX_SHARDS} files", allowed="up to as many"
            )
        self._names.append(name)
        self._num_bytes += num_bytes
        return full

    def flush(self) -> tuple[str, list[str]] | None:
        """Return the file that was begun; None: none was."""
        return self._close(is_last=True) if self._names else None

    def _close(self, *, is_last: bool) -> tuple[str, list[str]]:
        is_single = is_last and self._is_first and self._num_ranks == 1
        file = self._single or (SINGLE_FILE if is_single else f"model-{self._number:05d}.safetensors")
        names, self._names, self._num_bytes = self._names, [], 0
        self._number += self._num_ranks
        self._is_first = False
        return file, names
