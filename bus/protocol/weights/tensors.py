"""The bytes of tensors: their layout in safetensors files, and their new content as a difference from the old one.

A file has 8 bytes with the length of the JSON, the JSON, then the contents. Publisher and workers use the same layout,
so a file has the same bytes whether it was fetched or built.

A difference is bit-exact and works for any dtype. Content is bytes: elements of 1, 2, 4 or 8 bytes that are compared
and copied, without arithmetic on their values. So -0.0 differs from 0.0, and a NaN equals itself. There are three
encodings:

- `same`: nothing changed; no bytes.
- `sparse`: the positions of the changed elements as gaps, then their steps in byte planes. A step is the new element
  minus the old one, as integers that wrap around, with the sign in the lowest bit: -1, 1, -2, 2 become 1, 2, 3, 4. An
  optimizer moves most floats to a neighbour, so nearly all steps are small, and zstd needs a few bits for each. Steps
  give the new content only if they are added to exactly the old content. The receiver therefore checks the hash of the
  result.
- `dense`: the whole content in byte planes.

A byte plane has one byte of every element: the first plane all first bytes, and so on. So the repeating exponents of
floats are adjacent, and zstd finds them. A gap is the number of unchanged elements before a changed one. It takes one
byte up to 254. The value 255 means 255 unchanged elements, and the gap continues in the next byte.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ....schemas.manifest import TensorEntry

INDEX: Final = "model.safetensors.index.json"
"""The file that maps tensors to files, if there are several files."""
ADAPTER_CONFIG: Final = "adapter_config.json"
"""The file with an adapter's configuration in PEFT."""
ADAPTER_TENSORS: Final = "adapter_model.safetensors"
"""The file with an adapter's tensors in PEFT."""
_ALIGNMENT: Final = 8
"""The alignment of the contents in the file, in bytes, as in safetensors' own writer."""
Encoding = Literal["same", "sparse", "dense"]
Parts = Sequence[Sequence[npt.NDArray[np.uint8]]]
"""The gaps and planes of a body, each in pieces of u1[any]."""
BLOCK: Final = 1 << 20
"""Bytes of gaps that are processed together: they fit into a core's cache, which is four times faster."""
COMPARED: Final = 1 << 19
"""Elements that are compared and encoded together, for the same reason: elements that differ are read a second time."""
DENSE: Final = zstandard.ZstdCompressionParameters.from_level(1)
"""The zstd settings for a whole content: higher levels take several times the time for 1 to 2 % fewer bytes."""
SPARSE: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
)
"""The zstd settings for gaps and steps. Their bytes repeat only by chance, so a search for repetitions gains nothing,
but codes for single bytes do. Level 1 searches a larger table, takes 1.4 times the time, and leaves 1 to 2 % more
bytes."""
MAX_WINDOW_BYTES: Final = 8 << 20
"""The memory that zstd may request besides the body itself. Level 1 requests 512 KiB."""
GO_ON: Final = 255
"""The byte of a gap that continues in the next byte."""


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
        yield FileLayout(name, _encode_header(in_file), in_file)


def ordered(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Order the tensors of one file so that each is aligned: those with the largest elements first."""
    return sorted(entries, key=lambda entry: -entry.item_bytes)


def index_of(entries: Sequence[TensorEntry]) -> bytes:
    """Return the index of a checkpoint with several files."""
    sizes = sum(entry.size for entry in entries)
    index = {"metadata": {"total_size": sizes}, "weight_map": {entry.name: entry.file for entry in entries}}
    return msgspec.json.format(msgspec.json.encode(index), indent=2)


def _encode_header(entries: Iterable[TensorEntry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for entry in entries:
        end = begin + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (begin, end)}
        begin = end
    data = msgspec.json.encode(header)
    data += b" " * (-len(data) % _ALIGNMENT)
    return len(data).to_bytes(8, "little") + data


class DeltaError(ValueError):
    """An encoded tensor is damaged, or does not belong to the tensor that it is applied to."""


class Encoded(NamedTuple):
    """The encoded new content of a tensor."""

    encoding: Encoding
    num_changed: int
    """Number of changed elements. 0 unless `sparse`."""
    body_bytes: int
    """The size of the body before compression."""
    data: bytes
    """The body, compressed with zstd if this is shorter than `body_bytes`, else uncompressed."""


def encode_delta(old: npt.NDArray[np.uint8] | None, new: npt.NDArray[np.uint8], item_bytes: int) -> Encoded:
    """Encode `new` as its difference from `old`, in the smaller of the encodings.

    Args:
        old: u1[num_bytes], the previous content; None: there is none.
        new: u1[num_bytes], the new content.
        item_bytes: bytes of an element: 1, 2, 4 or 8.
    """
    sparse = None if old is None else _encode_sparse(_view(old, item_bytes), _view(new, item_bytes), item_bytes)
    if sparse is not None:
        return sparse
    planes = np.ascontiguousarray(new.reshape(-1, item_bytes).T)
    return Encoded("dense", 0, len(new), _compress([[plane] for plane in planes], DENSE))


def apply_delta(encoded: Encoded, content: npt.NDArray[np.uint8], item_bytes: int) -> None:
    """Replace the previous content with the new content, in place.

    Args:
        encoded: the received delta; this function validates every field.
        content: u1[num_bytes], the previous content; has no effect if `encoded` is `dense`.
        item_bytes: as in `encode_delta`.

    Raises:
        DeltaError: `encoded` is damaged or of another tensor; `content` may be partly new.
    """
    items = _view(content, item_bytes)
    if not 0 <= encoded.num_changed <= len(items):
        raise DeltaError(f"the delta changes {encoded.num_changed} elements of {len(items)}")
    if encoded.body_bytes > max_body_bytes(encoded.encoding, encoded.num_changed, len(items), item_bytes):
        raise DeltaError(
            f"{encoded.body_bytes} bytes are too many for {encoded.num_changed} changes of {len(items)} elements"
        )
    body = _decompress(encoded.data, encoded.body_bytes)
    if encoded.encoding == "dense":
        if len(body) != len(content):
            raise DeltaError(f"a dense encoding of {len(body)} bytes for a tensor of {len(content)} bytes")
        content[:] = _join_planes(body, item_bytes)
    elif encoded.encoding == "sparse":
        _apply_steps(items, *_split_body(body, encoded.num_changed, item_bytes), np.add)
    elif len(body):
        raise DeltaError(f"{len(body)} bytes for a tensor that is the same")


def undo_delta(encoded: Encoded, content: npt.NDArray[np.uint8], item_bytes: int) -> None:
    """Replace the new content with the previous content, in place: the inverse of `apply_delta`.

    Args:
        encoded: a result of `encode_delta`, `sparse` or `same`. A `dense` result does not have the previous content.
        content: u1[num_bytes], the new content.
        item_bytes: as in `encode_delta`.

    Raises:
        DeltaError: `encoded` is dense, or of another tensor.
    """
    if encoded.encoding == "dense":
        raise DeltaError("a dense encoding does not contain the previous content")
    if encoded.encoding == "sparse":
        body = _decompress(encoded.data, encoded.body_bytes)
        parts = _split_body(body, encoded.num_changed, item_bytes)
        _apply_steps(_view(content, item_bytes), *parts, np.subtract)


def max_body_bytes(encoding: Encoding, count: int, num_items: int, item_bytes: int) -> int:
    """Return the maximum bytes of a body of this encoding before compression."""
    if encoding == "dense":
        return num_items * item_bytes
    return count * (item_bytes + 1) + num_items // GO_ON if encoding == "sparse" else 0


def _view(content: npt.NDArray[np.uint8], item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    return content.view(f"<u{item_bytes}")


def _encode_sparse(
    old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger], item_bytes: int
) -> Encoded | None:
    """Encode the elements that differ. Return None if they are so many that the whole content is smaller."""
    gap_bytes: list[npt.NDArray[np.uint8]] = []
    planes: list[list[npt.NDArray[np.uint8]]] = [[] for _ in range(item_bytes)]
    before, num_changed = -1, 0
    for start in range(0, len(new), COMPARED):
        end = start + COMPARED
        positions, steps = _find_changes(old[start:end], new[start:end])
        if not len(positions):
            continue
        num_changed += len(positions)
        if num_changed > len(new) // 2:
            return None
        steps = _lower_sign(steps)
        for number, plane in enumerate(planes):
            plane.append((steps >> steps.dtype.type(8 * number)).astype(np.uint8))
        positions += start
        gap_bytes.append(_encode_gaps(positions, before))
        before = int(positions[-1])
    if not num_changed:
        return Encoded("same", 0, 0, b"")
    parts = [gap_bytes, *planes]
    return Encoded("sparse", num_changed, _count_bytes(parts), _compress(parts, SPARSE))


def _find_changes(
    old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.unsignedinteger]]:
    """Return the positions that differ, and the new elements there minus the old ones.

    Words of 8 bytes are compared first, then the elements of different words, which are few.
    """
    per_word = 8 // new.itemsize
    if len(new) % per_word:
        positions = np.flatnonzero(old != new)
        return positions, new[positions] - old[positions]
    old_words, new_words = old.view(np.uint64), new.view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    near = new_words[words].view(new.dtype)
    near -= old_words[words].view(new.dtype)
    positions = np.flatnonzero(near != 0)
    steps = near[positions]
    # The difference between an element's position and its place in `near`.
    words -= np.arange(len(words))
    words *= per_word
    # Division by a power of two.
    positions += words[positions >> (per_word.bit_length() - 1)]
    return positions, steps


def _encode_gaps(positions: npt.NDArray[np.int64], before: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of the gaps before these positions. The first gap begins after `before`."""
    gaps = np.empty_like(positions)
    gaps[0] = positions[0] - before
    np.subtract(positions[1:], positions[:-1], out=gaps[1:])
    gaps -= 1
    stream = gaps.astype(np.uint8)
    long = np.flatnonzero(gaps >= GO_ON)
    if not len(long):
        return stream
    more, stream[long] = np.divmod(gaps[long], GO_ON)
    return np.insert(stream, np.repeat(long, more), GO_ON)


def _lower_sign(steps: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Move the sign from the highest bit to the lowest, so that the other bits of small steps are zeros."""
    zero, one = steps.dtype.type(0), steps.dtype.type(1)
    signs: npt.NDArray[np.unsignedinteger] = zero - (steps >> steps.dtype.type(8 * steps.itemsize - 1))
    steps = steps << one
    steps ^= signs
    return steps


def _raise_sign(steps: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Undo `_lower_sign`."""
    zero, one = steps.dtype.type(0), steps.dtype.type(1)
    signs: npt.NDArray[np.unsignedinteger] = zero - (steps & one)
    steps = steps >> one
    steps ^= signs
    return steps


def _split_body(
    body: npt.NDArray[np.uint8], num_changed: int, item_bytes: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.unsignedinteger]]:
    """Split a sparse body into the bytes of its gaps, and its steps with their signs in the lowest bit."""
    num_gap_bytes = len(body) - num_changed * item_bytes
    if num_gap_bytes < 0:
        raise DeltaError(f"{len(body)} bytes are too few for {num_changed} changes")
    return body[:num_gap_bytes], _view(_join_planes(body[num_gap_bytes:], item_bytes), item_bytes)


def _apply_steps(
    items: npt.NDArray[np.unsignedinteger],
    stream: npt.NDArray[np.uint8],
    steps: npt.NDArray[np.unsignedinteger],
    by: np.ufunc,
) -> None:
    """Add or subtract `steps` at the elements after the gaps of `stream`, each of which occurs once."""
    num_done, position = 0, 0
    for start in range(0, len(stream), BLOCK):
        block = stream[start : start + BLOCK]
        is_end = block != GO_ON
        # The last byte of a gap passes the gap and the changed element itself.
        after = np.cumsum(block + is_end.astype(np.int64)) + position
        position = int(after[-1])
        if position > len(items):
            raise DeltaError(f"the delta changes element {position - 1}; there are {len(items)}")
        positions = after[is_end]
        positions -= 1
        taken = steps[num_done : num_done + len(positions)]
        if len(taken) < len(positions):
            break
        items[positions] = by(items[positions], _raise_sign(taken))
        num_done += len(positions)
    if num_done != len(steps) or (len(stream) and stream[-1] == GO_ON) or (len(steps) and not len(stream)):
        raise DeltaError(f"the gaps do not match the {len(steps)} changed elements")


def _join_planes(planes: npt.NDArray[np.uint8], item_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(planes.reshape(item_bytes, -1).T).reshape(-1)


def _compress(parts: Parts, parameters: zstandard.ZstdCompressionParameters) -> bytes:
    """Compress a body if this makes it shorter. Each part has its own blocks, with codes for its bytes only."""
    num_bytes = _count_bytes(parts)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=num_bytes)
    packed: list[bytes] = []
    for part in parts:
        packed += [packer.compress(piece.data) for piece in part]
        packed.append(packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    data = b"".join((*packed, packer.flush()))
    return data if len(data) < num_bytes else b"".join(piece.tobytes() for part in parts for piece in part)


def _count_bytes(parts: Parts) -> int:
    return sum(len(piece) for part in parts for piece in part)


def _decompress(data: bytes, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return a body. The memory of zstd is checked before the allocation."""
    if len(data) == num_bytes:
        return np.frombuffer(data, np.uint8)
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != num_bytes or frame.window_size > max(MAX_WINDOW_BYTES, num_bytes):
            raise DeltaError(f"a frame of zstd holds {frame.content_size} bytes; expected: {num_bytes}")
        body = zstandard.ZstdDecompressor().decompress(data, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"{len(data)} bytes do not decompress: {error}") from error
    return np.frombuffer(body, np.uint8)
