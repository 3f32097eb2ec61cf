"""The manifest of a published version of weights: what is in it, and how a worker gets it.

A version is a folder of the object store, `<bucket>/<prefix>`. Its manifest is the object `MANIFEST` of that folder,
and the source of an `update_weights` command names the folder. A version has one or both of

- a delta: `delta-0000`, `delta-0001` ...: what changed in each tensor since the version before it in the chain;
- an anchor: the whole checkpoint as an ordinary folder of safetensors files.

Both give the same folder, byte for byte: the manifest says in which file each tensor lies and in which order, and
`digest` names the content whichever way it came.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name
from .json_documents import decode_document

__all__ = [
    "DELTA_PREFIX",
    "DTYPE_BITS",
    "MANIFEST",
    "MAX_LINKS",
    "MAX_MANIFEST_BYTES",
    "Link",
    "Manifest",
    "Objects",
    "TensorDelta",
    "TensorEntry",
    "Version",
    "content_bytes",
    "content_digest",
    "decode_manifest",
    "delta_name",
    "is_file_name",
    "item_bytes",
]

MANIFEST: Final = "rollbus-manifest.json"
"""The object that makes a folder a published version; older workers leave it unread."""
DELTA_PREFIX: Final = "delta-"
"""Begins the names of the objects that hold a delta."""
MAX_MANIFEST_BYTES: Final = 64 * 1024**2
"""Some 200,000 tensors."""
MAX_TENSORS: Final = 1_000_000
MAX_LINKS: Final = 64
"""Versions that a manifest names: more than a chain may have."""
MAX_DELTA_OBJECTS: Final = 4096

DTYPE_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by the names of safetensors."""

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
NumBytes = Annotated[int, Meta(ge=0, le=2**62)]
Objects = Annotated[str, Meta(min_length=1, max_length=1300)]
"""A folder of the object store, `<bucket>/<prefix>`."""
Version = Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)]
_FILE_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}$"
FileName = Annotated[str, Meta(pattern=_FILE_NAME)]
"""Of a file directly in the folder; no path can lead out of it."""


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a tensor's new content is made of the content before; the fields of `tensor_delta.Encoded`, and where."""

    encoding: Literal["sparse", "dense"]
    object: Annotated[int, Meta(ge=0, lt=MAX_DELTA_OBJECTS)] = 0
    """The number of the object that holds the data, as in its name."""
    offset: NumBytes = 0
    """Of the data in that object, in bytes."""
    num_bytes: NumBytes
    """Of the data."""
    body_bytes: NumBytes
    """Of the data once it is decompressed."""
    num_changed: NumBytes = 0
    """Elements that changed; 0 unless `sparse`."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a version."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """As the checkpoint's index has it."""
    dtype: Annotated[str, Meta(max_length=16)]
    """As safetensors write it: BF16, F32 ..."""
    shape: Annotated[tuple[NumBytes, ...], Meta(max_length=16)]
    """Empty for a scalar."""
    sha256: Sha256
    """Of the whole content, in hexadecimal."""
    file: FileName
    """The safetensors file in which it lies; the tensors of a file lie in it in the manifest's order."""
    delta: TensorDelta | None = None
    """None: it did not change, or the version has no delta."""

    def __post_init__(self) -> None:
        """Refuse a dtype that safetensors do not have, and contents that are no whole number of bytes."""
        if self.name == "__metadata__":
            raise ValueError("a tensor is called __metadata__, which is no name in safetensors")
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"{self.name[:200]!r} has the unknown dtype {self.dtype!r}")
        if math.prod(self.shape) * DTYPE_BITS[self.dtype] % 8:
            raise ValueError(f"{self.name[:200]!r} ends within a byte")

    @property
    def size(self) -> int:
        """Bytes of the whole content."""
        return content_bytes(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, as deltas compare them: 1 where several share a byte."""
        return item_bytes(self.dtype)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the chain."""

    objects: Objects
    """Its folder."""
    version: Version
    digest: Sha256
    """Of its content."""
    delta_bytes: NumBytes | None = None
    """Of the objects that hold its delta; None: it has none, so the chain begins here."""
    anchor_bytes: NumBytes | None = None
    """Of the files of its anchor; None: it has none."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a published version of weights is. Readers ignore fields that they do not know."""

    v: Literal[1] = 1
    """Wire version."""
    model: str
    """Whose weights, or the base of the adapter."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: these are weights of the model. Adapters have anchors alone."""
    version: Version
    digest: Sha256
    """`content_digest` of `tensors` and `files`."""
    epoch: Annotated[int, Meta(ge=0, le=2**53)]
    """Of the publisher's lease: only rises."""
    publisher: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
    """Who published it: the name of its client."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    """All tensors, each once, file by file in the order of the files' names."""
    files: Annotated[dict[FileName, Sha256], Meta(max_length=1024)] = {}
    """The other files of the folder (config.json, tokenizer.json ...) and their SHA-256. They are a part of anchors
    only; who applies deltas takes them from the version before."""
    links: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=MAX_LINKS)]
    """The chain from older to newer; the last one is this version itself."""

    def __post_init__(self) -> None:
        """Check the name, and that the manifest does not contradict itself."""
        check_name("model", self.model)
        if len({entry.name for entry in self.tensors}) != len(self.tensors):
            raise ValueError("it has a tensor twice")
        files = [entry.file for entry in self.tensors]
        if files != sorted(files) or self.files.keys() & set(files) or MANIFEST in self.files:
            raise ValueError("its tensors are not in the order of their files, or a file stands twice")
        if (self.links[-1].version, self.links[-1].digest) != (self.version, self.digest):
            raise ValueError("its last link is of another version")
        if self.digest != content_digest(self.tensors, self.files):
            raise ValueError("its digest is of another content")

    @property
    def own(self) -> Link:
        """The link that is this version."""
        return self.links[-1]


def content_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor's whole content."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def item_bytes(dtype: str) -> int:
    """Return the bytes of an element, as deltas compare them: 1 where several share a byte."""
    return max(1, DTYPE_BITS[dtype] // 8)


def content_digest(tensors: Iterable[TensorEntry], files: Mapping[str, str]) -> str:
    """Name a content: SHA-256 over its tensors, where they lie, and the other files; however they came."""
    sha = hashlib.sha256()
    for entry in tensors:
        sha.update(msgspec.json.encode((entry.file, entry.name, entry.dtype, entry.shape, entry.sha256)))
    sha.update(msgspec.json.encode(sorted(files.items())))
    return sha.hexdigest()


def is_file_name(name: str) -> bool:
    """Return True if a file beside the tensors can be called so: no reader takes it for a part of a delta."""
    return re.fullmatch(_FILE_NAME, name) is not None and not name.startswith(DELTA_PREFIX)


def delta_name(number: int) -> str:
    """Name the object that holds a part of a delta."""
    return f"{DELTA_PREFIX}{number:04d}"


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        RemoteProtocolError: it is none, or it contradicts itself.
    """
    return decode_document(data, Manifest, "a manifest")
