"""The draft of a publication: a trainer's tensors, compared with the last version, and their packed changes.

A thread draws and compares the tensors, and the event loop uploads complete objects.
"""

import asyncio
import contextlib
import hashlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from ...schemas.checks import describe
from ...schemas.errors import BusClosed, InvalidRequest
from ...schemas.manifest import MAX_DELTA_OBJECTS, TensorDelta, TensorEntry, delta_name
from ...schemas.rows import Uint8s
from ..protocol.weights.chain import Contents
from ..protocol.weights.tensors import INDEX, Encoded, apply_delta, encode_delta, index_of, layouts, ordered, undo_delta
from ..thread_calls import is_set_within
from .tensors import FolderFile, Snapshot, SnapshotTensor, TensorKind, bad_tensor, read_tensor

DELTA_BYTES: Final = 64 * 1024**2
"""Maximum size of a delta object, except for a single larger tensor. An interrupted reader loses at most one object."""
SHARD_BYTES: Final = 512 * 1024**2
"""Maximum size of the tensors in a file of an anchor, except for a single larger tensor."""
SINGLE_FILE: Final = "model.safetensors"
"""File name if the whole model fits into one file."""
MAX_SHARDS: Final = 4000
"""Maximum number of files of an anchor, about 2 TB. It is below the limit of a folder."""
Piece = bytes | memoryview
SAME: Final = Encoded("same", 0, 0, b"")
MAX_WAITING: Final = 2
"""Maximum number of objects that wait for upload: enough to keep the upload busy with little memory."""
STOP_S: Final = 5.0
"""Seconds for the drawing thread to notice a stop. It checks after each tensor."""
NamedTensors = Iterable[tuple[str, Any]] | Mapping[str, Any]
Item = TypeVar("Item")


class StoredObject(NamedTuple):
    """An object to store."""

    name: str
    num_bytes: int
    pieces: Callable[[], Iterator[Piece]]
    """Yields the content. Call it off the event loop, because it may compute the content."""


@dataclass(slots=True)
class _Packer(Generic[Item]):
    """Groups items, in the order in which they are added, into objects: changes of a delta, or tensors of an anchor."""

    number: int
    """Number of the object that is not complete. The first one is the rank."""
    num_ranks: int
    """Each rank uses every `num_ranks`-th number."""
    max_bytes: float
    """Maximum size of an object, except for a single larger item."""
    max_objects: int
    items: list[Item] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, item: Item, num_bytes: int) -> tuple[int, list[Item]] | None:
        """Add an item. Return the number and the items of an object that is complete without it, or None.

        Raises:
            InvalidRequest: there are too many objects.
        """
        full = self.flush() if self.num_bytes + num_bytes > self.max_bytes else None
        if self.number >= self.max_objects:
            problem = f"needs more than {self.max_objects} objects of {self.max_bytes:g} bytes"
            allowed = "a smaller change, or an anchor, which a new publisher stores first"
            raise InvalidRequest("named_tensors", problem, allowed)
        self.items.append(item)
        self.num_bytes += num_bytes
        return full

    def flush(self) -> tuple[int, list[Item]] | None:
        """Return the number and the items of the object that is not complete, or None if it is empty."""
        if not self.items:
            return None
        found = self.number, self.items
        self.number, self.items, self.num_bytes = self.number + self.num_ranks, [], 0
        return found


@dataclass(slots=True)
class _Drafted:
    """A tensor that was added to a draft."""

    kind: TensorKind
    sha256: str
    encoded: Encoded
    """Encoding relative to the snapshot. It is `same` if `content` is set. If it is sparse, the snapshot already has
    the new content."""
    content: Uint8s | None
    """u1[size]: content of the tensor. None if there is a snapshot."""
    delta: TensorDelta | None = None


class Draft:
    """Compares, encodes and packs the tensors of one publication. It runs on the thread that draws them, and blocks.

    The draft removes the content from the snapshot and updates it during the comparison, while the data is still in the
    processor's cache. `commit` or `restore` gives the snapshot a content again. Until then the snapshot is empty.

    Args:
        contents: what the publication stores: the changes since the snapshot, the whole checkpoint, or both.
        snapshot: last committed version. Empty if none was committed.
        kinds: kinds of all required tensors, by name. None: any tensors are valid.
        rank: rank of this process among `num_ranks`.
        file: name of the single file for all tensors. None: as many files as necessary.
    """

    def __init__(
        self,
        contents: Contents,
        snapshot: Snapshot,
        kinds: Mapping[str, TensorKind] | None,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        file: str | None = None,
    ) -> None:
        self._contents = contents
        self._num_ranks = num_ranks
        self._snapshot = snapshot
        self._digest, self._before = snapshot.digest, snapshot.tensors
        self._kinds = {name: tensor.kind for name, tensor in self._before.items()} if snapshot else kinds
        self._changes = _Packer[bytes](rank, num_ranks, DELTA_BYTES, MAX_DELTA_OBJECTS)
        self._shards = _Packer[str](rank, num_ranks, SHARD_BYTES if file is None else math.inf, MAX_SHARDS)
        self._single_file = file
        self.delta_bytes = 0
        """Bytes of the delta's objects so far."""
        self._drafted: dict[str, _Drafted] = {}
        # By file: the names of its tensors in the manifest's order, and the number of tensors not added yet.
        self._layout: dict[str, list[str]] = dict(snapshot.layout())
        self._num_missing = {file: len(names) for file, names in self._layout.items()}
        snapshot.digest, snapshot.tensors = "", {}
        self._is_over = False
        self.num_changed = 0

    def add(self, name: str, tensor: object) -> Iterator[StoredObject]:
        """Add a tensor, and yield the objects that it completes.

        Raises:
            InvalidRequest: it is no tensor, was given twice, or differs from the expected tensor of this name.
        """
        kind, content = read_tensor(name, tensor)
        self._check(name, kind)
        if self._before:
            yield from self._compare(name, kind, content)
            return
        own = content.copy()
        self._drafted[name] = _Drafted(kind, hashlib.sha256(own.data).hexdigest(), SAME, own)
        self.num_changed += 1
        yield from self._close_shard(self._shards.add(name, kind.size), is_last=False)

    def finish(self) -> Iterator[StoredObject]:
        """Yield the remaining objects. Call this after all tensors have been added.

        Raises:
            InvalidRequest: there are no tensors, or one is missing.
        """
        if not self._drafted and self._num_ranks == 1:
            raise InvalidRequest("named_tensors", "has no tensors", "all tensors of the model")
        missing = next((name for name in self._kinds or () if name not in self._drafted), None)
        # Other ranks may have it, if this rank has not published its own tensors before.
        if missing is not None and (self._num_ranks == 1 or self._before):
            raise bad_tensor(missing, "is missing", "all tensors of the last published version or the checkpoint")
        yield from _delta_object(self._changes.flush())
        yield from self._close_shard(self._shards.flush(), is_last=True)

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

    def _check(self, name: str, kind: TensorKind) -> None:
        if name in self._drafted:
            raise bad_tensor(name, "was given twice", "each tensor once")
        if self._kinds is None:
            return
        expected = self._kinds.get(name)
        where = "of the last published version" if self._before else "of the checkpoint"
        if expected is None:
            raise bad_tensor(name, f"is an unexpected tensor, {kind}", f"the tensor names {where}")
        if kind != expected:
            raise bad_tensor(name, f"is {kind}", f"{expected}, the kind {where}")

    def _compare(self, name: str, kind: TensorKind, content: Uint8s) -> Iterator[StoredObject]:
        before = self._before[name]
        encoded = encode_delta(before.content, content, kind.item_bytes)
        is_same = encoded.encoding == "same"
        # An anchor without a delta does not use earlier hashes, because workers may have rejected a version for a wrong
        # hash.
        is_known = is_same and self._contents.delta
        drafted = self._drafted[name] = _Drafted(kind, before.sha256, encoded, None)
        if encoded.encoding == "sparse":
            before.content[:] = content
        if not is_known:
            # Hash the content that the next version is compared with, even if the caller's memory has changed since.
            hashed = content if encoded.encoding == "dense" else before.content
            drafted.sha256 = hashlib.sha256(hashed.data).hexdigest()
        if not is_same:
            self.num_changed += 1
            if self._contents.delta:
                yield from _delta_object(self._changes.add(encoded.data, len(encoded.data)))
                self.delta_bytes += len(encoded.data)
                drafted.delta = TensorDelta(
                    encoding="dense" if encoded.encoding == "dense" else "sparse",
                    object=self._changes.number,
                    offset=self._changes.num_bytes - len(encoded.data),
                    num_bytes=len(encoded.data),
                    body_bytes=encoded.body_bytes,
                    num_changed=encoded.num_changed,
                )
        self._num_missing[before.file] -= 1
        if not self._num_missing[before.file] and self._contents.anchor:
            yield self._shard(before.file)

    def _close_shard(self, shard: tuple[int, list[str]] | None, *, is_last: bool) -> Iterator[StoredObject]:
        """Fix the name of a file and the order of its tensors, and yield the file as an object.

        The name of the first file depends on whether a second file exists.
        """
        if shard is not None:
            number, names = shard
            is_whole = is_last and not number and self._num_ranks == 1
            file = self._single_file or (SINGLE_FILE if is_whole else f"model-{number + 1:05d}.safetensors")
            self._layout[file] = [entry.name for entry in ordered(self._entry(name, file) for name in names)]
            if self._contents.anchor:
                yield self._shard(file)

    def _shard(self, file: str) -> StoredObject:
        names = self._layout[file]
        [layout] = layouts(self._entry(name, file) for name in names)

        def pieces() -> Iterator[Piece]:
            yield layout.header
            for name in names:
                yield self._content(name, self._drafted[name]).data

        return StoredObject(file, layout.size, pieces)

    def _entry(self, name: str, file: str) -> TensorEntry:
        drafted = self._drafted[name]
        dtype, shape = drafted.kind
        return TensorEntry(name=name, dtype=dtype, shape=shape, sha256=drafted.sha256, file=file, delta=drafted.delta)

    def _content(self, name: str, drafted: _Drafted) -> Uint8s:
        if drafted.content is not None:
            return drafted.content
        content = self._before[name].content
        if drafted.encoded.encoding == "dense":
            content = np.empty_like(content)
            apply_delta(drafted.encoded, content, drafted.kind.item_bytes)
        return content


def _delta_object(found: tuple[int, list[bytes]] | None) -> Iterator[StoredObject]:
    """Yield an object of a delta, if one is complete."""
    if found is not None:
        number, pieces = found
        yield StoredObject(delta_name(number), sum(map(len, pieces)), lambda: iter(pieces))


class TensorFeed:
    """The tensors of one publication. `draw` runs on a thread; all other methods belong to the uploading event loop.

    Args:
        named_tensors: (name, tensor) pairs, drawn once.

    Attributes:
        given_bytes: bytes of torch or numpy tensors in a collection. 0 for an iterator.
        compare_s: seconds that the thread needed to read, compare, encode and hash tensors.

    Raises:
        InvalidRequest: `named_tensors` is not iterable.
    """

    def __init__(self, named_tensors: NamedTensors) -> None:
        given: object = named_tensors
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            allowed = "an iterable of (name, tensor)"
            raise InvalidRequest("named_tensors", f"is {describe(named_tensors)}", allowed)
        self._items: Iterable[object] = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
        self.given_bytes = _bytes_of(self._items)
        self._room = threading.Semaphore(MAX_WAITING)
        self._has_begun = threading.Event()
        self._is_stopped = False
        self._failure: Exception | None = None
        # Set by `begin`.
        self._draft: Draft
        self._loop: asyncio.AbstractEventLoop
        self._objects: asyncio.Queue[StoredObject | None] = asyncio.Queue(MAX_WAITING + 2)
        self._ended = asyncio.Event()
        self._is_begun = False
        self.compare_s = 0.0

    def begin(self, draft: Draft) -> None:
        """Start the pass over the tensors. The drawing thread waits for this call."""
        self._draft, self._loop, self._is_begun = draft, asyncio.get_running_loop(), True
        self._has_begun.set()

    async def objects(self) -> AsyncIterator[StoredObject]:
        """Yield the objects of the pass when they are complete.

        Raises:
            Exception: a tensor was rejected with it, or the iterator raised it.
        """
        while (stored := await self._objects.get()) is not None:
            self._room.release()
            yield stored
        if self._failure is not None:
            raise self._failure

    def halt(self) -> None:
        """End the pass after the present tensor. Any thread may call this, also more than once."""
        self._is_stopped = True
        self._has_begun.set()
        self._room.release()

    async def stop(self) -> bool:
        """End the pass and wait for the thread. Return False if it may still compare a tensor after `STOP_S`."""
        self.halt()
        return not self._is_begun or await is_set_within(self._ended, STOP_S)

    def draw(self) -> None:
        """Draw all tensors. This blocks. `objects` raises the errors of this method."""
        self._has_begun.wait()
        if not self._is_begun:
            return
        try:
            self._draw_all()
        except Exception as error:  # noqa: BLE001 # of the caller's iterator: `objects` raises it
            self._failure = error
        except BaseException:
            self._failure = BusClosed("the thread that draws the tensors was interrupted")
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
                self._loop.call_soon_threadsafe(self._on_drawn)

    def _draw_all(self) -> None:
        for item in self._items:
            if self._is_stopped:
                return
            if not isinstance(item, tuple | list) or len(item) != 2:
                allowed = "pairs of a name and a tensor"
                raise InvalidRequest("named_tensors", f"has {describe(item)}", allowed)
            self._pass_on(self._draft.add(*item))
        self._pass_on(self._draft.finish())

    def _pass_on(self, found: Iterator[StoredObject]) -> None:
        started = time.perf_counter()
        for stored in found:
            self.compare_s += time.perf_counter() - started
            self._room.acquire()
            if self._is_stopped:
                return
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._objects.put_nowait, stored)
            started = time.perf_counter()
        self.compare_s += time.perf_counter() - started

    def _on_drawn(self) -> None:
        self._objects.put_nowait(None)
        self._ended.set()


def _bytes_of(items: Iterable[object]) -> int:
    """Return the bytes of tensors in memory. Items that are no (name, tensor) pair are rejected when they are drawn."""
    if not isinstance(items, Collection):
        return 0
    tensors = (item[1] for item in items if isinstance(item, tuple | list) and len(item) == 2)
    sizes = (getattr(tensor, "nbytes", 0) for tensor in tensors)
    return sum(size for size in sizes if isinstance(size, int))


def with_index(files: Mapping[str, FolderFile], entries: Sequence[TensorEntry]) -> dict[str, FolderFile]:
    """Add the index of `entries` to the files of a folder if the tensors are in several files."""
    if len({entry.file for entry in entries}) < 2:
        return dict(files)
    index = index_of(entries)
    return {**files, INDEX: FolderFile(index, hashlib.sha256(index).hexdigest())}


def file_objects(files: Mapping[str, FolderFile]) -> Iterator[StoredObject]:
    """Yield files as objects to store."""
    for name, file in files.items():
        data = file.data
        yield StoredObject(name, len(data), lambda data=data: iter((data,)))  # type: ignore[misc]


async def read_off_loop(stored: StoredObject) -> AsyncIterator[Piece]:
    """Yield an object's content, one tensor at a time, computed on a thread."""
    pieces = stored.pieces()
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece
