"""One publication in progress: the encoded tensors, and the snapshot that they are compared with."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ....schemas.errors import InvalidRequest
from ....schemas.manifest import TensorDelta, TensorEntry
from ...protocol.weights.safetensors_layout import layouts, ordered
from ...protocol.weights.tensor_delta import Encoded, apply_delta, encode_delta, undo_delta
from .packing import DeltaPacker, Piece, ShardPlan, StoredObject
from .snapshot import Snapshot, SnapshotTensor
from .tensors import TensorKind, read_tensor

__all__ = ["Draft", "DraftPlan"]

SAME: Final = Encoded("same", 0, 0, b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """The parts of a version that a publication stores."""

    has_delta: bool
    """True if it stores the changes since the snapshot."""
    has_anchor: bool
    """True if it stores the whole checkpoint."""
    rank: int = 0
    num_ranks: int = 1
    file: str | None = None
    """Name of the single file for all tensors. None: as many files as necessary."""


@dataclass(slots=True)
class _Drafted:
    """A tensor that was added to a draft."""

    kind: TensorKind
    sha256: str
    encoded: Encoded
    """Encoding relative to the snapshot. It is `same` if `content` is set. If it is sparse, the snapshot already has
    the new content."""
    content: npt.NDArray[np.uint8] | None
    """u1[size]: content of the tensor. None if there is a snapshot."""
    delta: TensorDelta | None = None


class Draft:
    """Compares, encodes and packs the tensors of one publication. It runs on the thread that draws them, and blocks.

    The draft removes the content from the snapshot and updates it during the comparison, while the data is still in the
    processor's cache. `commit` or `restore` gives the snapshot a content again. Until then the snapshot is empty.

    Args:
        snapshot: last committed version. Empty if none was committed.
        kinds: kinds of all required tensors, by name. None: any tensors are valid.
    """

    def __init__(self, plan: DraftPlan, snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None) -> None:
        self._plan = plan
        self._snapshot = snapshot
        self._digest, self._before = snapshot.digest, snapshot.tensors
        self._kinds = {name: tensor.kind for name, tensor in self._before.items()} if snapshot else kinds
        self._packer = DeltaPacker(plan.rank, plan.num_ranks)
        self._shards = ShardPlan(plan.rank, plan.num_ranks, plan.file)
        self._drafted: dict[str, _Drafted] = {}
        # By file: the names of its tensors in the manifest's order, and the number of tensors not added yet.
        self._layout: dict[str, list[str]] = dict(snapshot.layout())
        self._num_missing = {file: len(names) for file, names in self._layout.items()}
        snapshot.digest, snapshot.tensors = "", {}
        self._is_over = False
        self.num_changed = 0
        self.model_bytes = 0
        self.anchor_bytes = 0

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<Draft tensors={len(self._drafted)} changed={self.num_changed} {self._packer!r}>"

    @property
    def delta_bytes(self) -> int:
        """Bytes of the delta's objects so far."""
        return self._packer.total_bytes

    def add(self, name: str, tensor: object) -> Iterator[StoredObject]:
        """Add a tensor, and yield the objects that it completes.

        Raises:
            InvalidRequest: it is no tensor, was given twice, or differs from the expected tensor of this name.
        """
        kind, content = read_tensor(name, tensor)
        self._check(name, kind)
        self.model_bytes += kind.size
        if self._before:
            yield from self._compare(name, kind, content)
            return
        own = content.copy()
        self._drafted[name] = _Drafted(kind, hashlib.sha256(own.data).hexdigest(), SAME, own)
        self.num_changed += 1
        yield from self._close_shard(self._shards.add(name, kind.size))

    def finish(self) -> Iterator[StoredObject]:
        """Yield the remaining objects. Call this after all tensors have been added.

        Raises:
            InvalidRequest: there are no tensors, or one is missing.
        """
        if not self._drafted and self._plan.num_ranks == 1:
            raise InvalidRequest(field="named_tensors", problem="has no tensors", allowed="all tensors of the model")
        missing = next((name for name in self._kinds or () if name not in self._drafted), None)
        if missing is not None and not self._is_partial:
            raise _bad(missing, "is missing", "all tensors of the last published version or the checkpoint")
        if self._plan.has_delta and (delta := self._packer.flush()) is not None:
            yield delta
        yield from self._close_shard(self._shards.flush())

    def entries(self) -> list[TensorEntry]:
        """Return the entries of all tensors, in the manifest's order."""
        return [self._entry(name, file) for file in sorted(self._layout) for name in self._layout[file]]

    def commit(self, digest: str) -> None:
        """Set the snapshot to this publication's content with `digest`. If that fails, it stays empty. Blocks."""
        self._is_over = True
        tensors: dict[str, SnapshotTensor] = {}
        for file in sorted(self._layout):
            for name in self._layout[file]:
                drafted = self._drafted.pop(name)
                content = drafted.content
                if content is None:
                    content = self._before[name].content
                    if drafted.encoded.encoding == "dense":
                        # Undo in place, because not every machine has memory for a second copy of the model.
                        apply_delta(drafted.encoded, content, drafted.kind.item_bytes)
                tensors[name] = SnapshotTensor(drafted.kind, file, drafted.sha256, content)
        self._snapshot.tensors, self._snapshot.digest = tensors, digest

    def restore(self) -> None:
        """Restore the snapshot to its state before this draft, unless the draft is committed. This blocks.

        Do not call this while a tensor is being added. If a restored tensor does not have its committed hash, because
        an interrupt can arrive at any point, the snapshot stays empty.
        """
        if self._is_over:
            return
        self._is_over = True
        for name, drafted in self._drafted.items():
            before = self._before.get(name)
            if before is None or drafted.encoded.encoding != "sparse":
                continue
            undo_delta(drafted.encoded, before.content, drafted.kind.item_bytes)
            if hashlib.sha256(before.content.data).hexdigest() != before.sha256:
                return
        self._snapshot.tensors, self._snapshot.digest = self._before, self._digest

    @property
    def _is_partial(self) -> bool:
        """True if other ranks have tensors too, and this rank has not published its own tensors before."""
        return self._plan.num_ranks > 1 and not self._before

    def _check(self, name: str, kind: TensorKind) -> None:
        if name in self._drafted:
            raise _bad(name, "was given twice", "each tensor once")
        if self._kinds is None:
            return
        expected = self._kinds.get(name)
        where = "of the last published version" if self._before else "of the checkpoint"
        if expected is None:
            raise _bad(name, f"is an unexpected tensor, {kind}", f"the tensor names {where}")
        if kind != expected:
            raise _bad(name, f"is {kind}", f"{expected}, the kind {where}")

    def _compare(self, name: str, kind: TensorKind, content: npt.NDArray[np.uint8]) -> Iterator[StoredObject]:
        before = self._before[name]
        encoded = encode_delta(before.content, content, kind.item_bytes)
        is_same = encoded.encoding == "same"
        # An anchor without a delta does not use earlier hashes, because workers may have rejected a version for a wrong
        # hash.
        is_known = is_same and self._plan.has_delta
        drafted = self._drafted[name] = _Drafted(kind, before.sha256, encoded, None)
        if encoded.encoding == "sparse":
            before.content[:] = content
        if not is_known:
            # Hash the content that the next version is compared with, even if the caller's memory has changed since.
            hashed = content if encoded.encoding == "dense" else before.content
            drafted.sha256 = hashlib.sha256(hashed.data).hexdigest()
        if not is_same:
            self.num_changed += 1
            if self._plan.has_delta:
                drafted.delta, full = self._pack(encoded)
                if full is not None:
                    yield full
        self._num_missing[before.file] -= 1
        if not self._num_missing[before.file] and self._plan.has_anchor:
            yield self._shard(before.file)

    def _pack(self, encoded: Encoded) -> tuple[TensorDelta, StoredObject | None]:
        number, offset, full = self._packer.add(encoded.data)
        delta = TensorDelta(
            encoding="dense" if encoded.encoding == "dense" else "sparse",
            object=number,
            offset=offset,
            num_bytes=len(encoded.data),
            body_bytes=encoded.body_bytes,
            num_changed=encoded.num_changed,
        )
        return delta, full

    def _close_shard(self, shard: tuple[str, list[str]] | None) -> Iterator[StoredObject]:
        """Fix the order of a file's tensors, and yield the file as an object."""
        if shard is not None:
            file, names = shard
            self._layout[file] = [entry.name for entry in ordered(self._entry(name, file) for name in names)]
            if self._plan.has_anchor:
                yield self._shard(file)

    def _shard(self, file: str) -> StoredObject:
        names = self._layout[file]
        [layout] = layouts(self._entry(name, file) for name in names)
        self.anchor_bytes += layout.size

        def pieces() -> Iterator[Piece]:
            yield layout.header
            for name in names:
                yield self._content(name, self._drafted[name]).data

        return StoredObject(file, layout.size, pieces)

    def _entry(self, name: str, file: str) -> TensorEntry:
        drafted = self._drafted[name]
        dtype, shape = drafted.kind
        return TensorEntry(name=name, dtype=dtype, shape=shape, sha256=drafted.sha256, file=file, delta=drafted.delta)

    def _content(self, name: str, drafted: _Drafted) -> npt.NDArray[np.uint8]:
        if drafted.content is not None:
            return drafted.content
        content = self._before[name].content
        if drafted.encoded.encoding == "dense":
            content = np.empty_like(content)
            apply_delta(drafted.encoded, content, drafted.kind.item_bytes)
        return content


def _bad(name: str, problem: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(field=f"named_tensors[{name[:200]!r}]", problem=problem, allowed=allowed)
