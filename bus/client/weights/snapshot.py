"""What a publisher committed last: each tensor's content, in memory, and where it lies in the version's files."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .tensors import TensorKind

__all__ = ["Snapshot", "SnapshotTensor"]


@dataclass(slots=True)
class SnapshotTensor:
    """One tensor as it was committed."""

    kind: TensorKind
    file: str
    """In which it lies."""
    sha256: str
    content: npt.NDArray[np.uint8]
    """u1[size], the publisher's own memory."""


@dataclass(slots=True)
class Snapshot:
    """A committed version. Empty until the first one: then nothing is known of tensors and files."""

    digest: str = ""
    """Of the content."""
    tensors: dict[str, SnapshotTensor] = field(default_factory=dict)
    """In the manifest's order."""

    def __bool__(self) -> bool:
        """True if there is a version to compare with."""
        return bool(self.tensors)

    def layout(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each file with the names of its tensors."""
        files: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            files.setdefault(tensor.file, []).append(name)
        yield from files.items()
