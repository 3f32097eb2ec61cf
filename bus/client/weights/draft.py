"""One publication under way: what it makes of each tensor, and of the snapshot that it compares them with."""

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
    """What a publication stores."""

    has_delta: bool
    """What changed since the snapshot."""
    has_anchor: bool
    """The whole checkpoint."""
    rank: int = 0
    num_ranks: int = 1
    file: str | None = None
    """The file that holds all tensors; None: as many as it takes."""


@dataclass(slots=True)
class _Drafted:
    """A tensor that was added."""

    kind: TensorKind
    sha256: str
    encoded: Encoded
    """Against the snapshot; `same` if `content` is set. If it is sparse, the snapshot's content is the new one."""
    content: npt.NDArray[np.uint8] | None
    """u1[size], where there is no snapshot."""
    delta: TensorDelta | None = None


class Draft:
    """Compares, encodes and packs the tensors of one publication. Lives on the thread that draws them; blocks.

    It takes the content of the snapshot, and makes it the new one while it compares: what was just read is still in the
    processor's cache. `commit` or `take_back` gives the snapshot a content again. Until then it is empty.

    Args:
        snapshot: what was committed before; empty if nothing was.
        kinds: of all tensors that must come, by name; None: whichever come.
    """

    def __init__(self, plan: DraftPlan, snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None) -> None:
        self._plan = plan
        self._snapshot = snapshot
        self._digest, self._before = snapshot.digest, snapshot.tensors
        self._kinds = {name: tensor.kind for name, tensor in self._before.items()} if snapshot else kinds
        self._packer = DeltaPacker(plan.rank, plan.num_ranks)
        self._shards = ShardPlan(plan.rank, plan.num_ranks, plan.file)
        self._drafted: dict[str, _Drafted] = {}
        # By file: the names of its tensors in the manifest's order, and how many of them are still to come.
        self._layout: dict[str, list[str]] = dict(snapshot.layout())
        self._num_missing = {file: len(names) for file, names in self._layout.items()}
        snapshot.digest, snapshot.tensors = "", {}
        self._is_over = False
        self.num_changed = 0
        self.model_bytes = 0
        self.anchor_bytes = 0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Draft tensors={len(self._drafted)} changed={self.num_changed} {self._packer!r}>"

    @property
    def delta_bytes(self) -> int:
        """Bytes of the delta's objects so far."""
        return self._packer.total_bytes

    def add(self, name: str, tensor: object) -> Iterator[StoredObject]:
        """Add a tensor, and yield the objects that are whole with it.

        Raises:
            InvalidRequest: it is none, came twice, or differs from what is expected under this name.
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
        """Yield what remains to be stored when all tensors have been added.

        Raises:
            InvalidRequest: there were none, or one is missing.
        """
        if not self._drafted and self._plan.num_ranks == 1:
            raise InvalidRequest(field="named_tensors", problem="has no tensors", allowed="all tensors of the model")
        missing = next((name for name in self._kinds or () if name not in self._drafted), None)
        if missing is not None and not self._is_partial:
            raise _bad(missing, "is missing", "all tensors that were published before, or are in the checkpoint")
        if self._plan.has_delta and (delta := self._packer.flush()) is not None:
            yield delta
        yield from self._close_shard(self._shards.flush())

    def entries(self) -> list[TensorEntry]:
        """Describe all tensors, in the manifest's order."""
        return [self._entry(name, file) for file in sorted(self._layout) for name in self._layout[file]]

    def commit(self, digest: str) -> None:
        """Make the snapshot what this publication has stored, named by `digest`. If that fails, it is empty. Blocks."""
        self._is_over = True
        tensors: dict[str, SnapshotTensor] = {}
        for file in sorted(self._layout):
            for name in self._layout[file]:
                drafted = self._drafted.pop(name)
                content = drafted.content
                if content is None:
                    content = self._before[name].content
                    if drafted.encoded.encoding == "dense":
                        # In place: a second copy of the model would not fit everywhere.
                        apply_delta(drafted.encoded, content, drafted.kind.item_bytes)
                tensors[name] = SnapshotTensor(drafted.kind, file, drafted.sha256, content)
        self._snapshot.tensors, self._snapshot.digest = tensors, digest

    def take_back(self) -> None:
        """Make the snapshot what it was before this draft, unless that is committed. Blocks.

        Only to be called when no tensor is being added any more. If a content does not come out as it was committed (an
        interrupt may have come at any point), the snapshot stays empty.
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
        """True if other ranks have tensors too, and this rank has published nothing that says which are its own."""
        return self._plan.num_ranks > 1 and not self._before

    def _check(self, name: str, kind: TensorKind) -> None:
        if name in self._drafted:
            raise _bad(name, "came twice", "each tensor once")
        if self._kinds is None:
            return
        expected = self._kinds.get(name)
        where = "as it was published before" if self._before else "as the checkpoint has it"
        if expected is None:
            raise _bad(name, f"is a tensor that is not expected: {kind}", f"the names {where}")
        if kind != expected:
            raise _bad(name, f"is {kind}", f"{expected}, {where}")

    def _compare(self, name: str, kind: TensorKind, content: npt.NDArray[np.uint8]) -> Iterator[StoredObject]:
        before = self._before[name]
        encoded = encode_delta(before.content, content, kind.item_bytes)
        is_same = encoded.encoding == "same"
        # An anchor alone does not build on hashes of before: workers may have refused the version because of one.
        is_known = is_same and self._plan.has_delta
        drafted = self._drafted[name] = _Drafted(kind, before.sha256, encoded, None)
        if encoded.encoding == "sparse":
            before.content[:] = content
        if not is_known:
            # Of what the next version is compared with, even if the caller's memory has changed since.
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
        """Fix the order of a file's tensors, and yield the file."""
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
