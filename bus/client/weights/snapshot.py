"""The version that a publisher committed last: the content of each tensor in memory, and its file in the version."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .tensors import TensorKind

__all__ = ["Snapshot", "SnapshotTensor"]


@dataclass(slots=True)
class SnapshotTensor:
    """One tensor of a committed version."""

    kind: TensorKind
    file: str
    """File of the version that contains the tensor."""
    sha256: str
    content: npt.NDArray[np.uint8]
    """u1[size]: content in the publisher's own memory."""


@dataclass(slots=True)
class Snapshot:
    """A committed version. It is empty until the first commit, when tensors and files are not known."""

    digest: str = ""
    """Digest of the content."""
    tensors: dict[str, SnapshotTensor] = field(default_factory=dict)
    """Tensors by name, in the manifest's order."""

    def __bool__(self) -> bool:
        """Return True if there is a version to compare with."""
        return bool(self.tensors)

    def layout(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each file with the names of its tensors."""
        files: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            files.setdefault(tensor.file, []).append(name)
        yield from files.items()
