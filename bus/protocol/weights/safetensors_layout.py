"""The layout of tensors in safetensors files: 8 bytes with the length of the JSON, the JSON, then the contents.

Publisher and workers use the same layout, so a file has the same bytes whether it was fetched or built.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from ....schemas.manifest import TensorEntry

__all__ = ["INDEX", "FileLayout", "index_of", "layouts", "ordered"]

INDEX: Final = "model.safetensors.index.json"
"""The file that maps tensors to files, if there are several files."""
_ALIGNMENT: Final = 8
"""The alignment of the contents in the file, in bytes, as in safetensors' own writer."""


class FileLayout(NamedTuple):
    """One safetensors file."""

    name: str
    header: bytes
    """All bytes before the contents."""
    entries: tuple[TensorEntry, ...]
    """The tensors in the order of their contents."""

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self.header) + sum(entry.size for entry in self.entries)

    def offsets(self) -> Iterator[tuple[TensorEntry, int]]:
        """Yield each tensor with the byte of the file at which its content begins."""
        offset = len(self.header)
        for entry in self.entries:
            yield entry, offset
            offset += entry.size


def layouts(entries: Iterable[TensorEntry]) -> Iterator[FileLayout]:
    """Yield the files of a version, given all of its tensors in the manifest's order."""
    for name, group in itertools.groupby(entries, lambda entry: entry.file):
        in_file = tuple(group)
        yield FileLayout(name, _header(in_file), in_file)


def ordered(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Order the tensors of one file so that each is aligned: those with the largest elements first."""
    return sorted(entries, key=lambda entry: -entry.item_bytes)


def index_of(entries: Sequence[TensorEntry]) -> bytes:
    """Return the index of a checkpoint with several files."""
    sizes = sum(entry.size for entry in entries)
    index = {"metadata": {"total_size": sizes}, "weight_map": {entry.name: entry.file for entry in entries}}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


def _header(entries: Iterable[TensorEntry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    data = msgspec.json.encode(header)
    data += b" " * (-len(data) % _ALIGNMENT)
    return len(data).to_bytes(8, "little") + data
