"""Rebuilds tensors from a version's objects as a worker does, and verifies their hashes."""

import hashlib
import itertools
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from rollbus.bus.protocol.weights.tensors import Encoded, apply_delta
from rollbus.bus.publish.draft import Draft
from rollbus.schemas.manifest import TensorEntry, delta_name

Contents = dict[str, bytes]


def draw(draft: Draft, tensors: Iterable[tuple[str, object]]) -> dict[str, bytes]:
    """Pass tensors through a draft and return its objects by name."""
    stored = [found for name, tensor in tensors for found in draft.add(name, tensor)]
    objects = {}
    for found in itertools.chain(stored, draft.finish()):
        objects[found.name] = b"".join(found.pieces())
        assert len(objects[found.name]) == found.num_bytes
    return objects


def from_anchor(entries: Iterable[TensorEntry], objects: Mapping[str, bytes]) -> Contents:
    """Read tensors from safetensors files."""
    contents = {}
    for entry in entries:
        file = objects[entry.file]
        length = int.from_bytes(file[:8], "little")
        header = msgspec.json.decode(file[8 : 8 + length])
        found = header[entry.name]
        assert (found["dtype"], tuple(found["shape"])) == (entry.dtype, entry.shape)
        begin, end = found["data_offsets"]
        contents[entry.name] = file[8 + length + begin : 8 + length + end]
    return _checked(entries, contents)


def from_delta(entries: Iterable[TensorEntry], objects: Mapping[str, bytes], before: Contents) -> Contents:
    """Apply a delta to the previous contents."""
    contents = {}
    for entry in entries:
        content = np.frombuffer(before[entry.name], np.uint8).copy()
        if (delta := entry.delta) is not None:
            data = objects[delta_name(delta.object)][delta.offset : delta.offset + delta.num_bytes]
            encoded = Encoded(delta.encoding, delta.num_changed, delta.body_bytes, data)
            apply_delta(encoded, content, entry.item_bytes)
        contents[entry.name] = content.tobytes()
    return _checked(entries, contents)


def _checked(entries: Iterable[TensorEntry], contents: Contents) -> Contents:
    for entry in entries:
        assert hashlib.sha256(contents[entry.name]).hexdigest() == entry.sha256, entry.name
    return contents
