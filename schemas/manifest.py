"""What a publisher stores about published weights: the manifest of each version, and the chain record of a model.

A version is a folder of the object store, `<bucket>/<prefix>`. Its manifest is the object `MANIFEST` of that folder.
The source of an `update_weights` command names the folder. A version has one or both of these:

- a delta: `delta-0000`, `delta-0001` ...: the changes of each tensor since the version before it in the chain;
- an anchor: the whole checkpoint as an ordinary folder of safetensors files.

Both give the same folder, byte for byte. The manifest states the file of each tensor and the order of the tensors.
`digest` identifies the content and does not depend on whether it came as a delta or an anchor.

The chain record has the publisher's lease, the committed versions, and the kept folders. It is JSON in the metadata
field `CHAIN` of the object `CHAIN_OBJECT` in the model's bucket. That object has no content. Publishers change the
record only by compare-and-set.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name
from .decoding import decode_document
from .limits import Epoch, Name, NonEmptyName, Version

MANIFEST: Final = "rollbus-manifest.json"
"""Name of the object that makes a folder a published version. Older workers ignore it."""
DELTA_PREFIX: Final = "delta-"
"""Prefix of the names of the objects that hold a delta."""
MAX_MANIFEST_BYTES: Final = 64 * 1024**2
"""Maximum bytes of a manifest, enough for about 200,000 tensors."""
MAX_TENSORS: Final = 1_000_000
MAX_LINKS: Final = 64
"""Maximum number of versions in a manifest, more than a chain may have."""
MAX_DELTA_OBJECTS: Final = 4096
DTYPE_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, by the dtype names of safetensors."""
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
NumBytes = Annotated[int, Meta(ge=0, le=2**62)]
Objects = Annotated[str, Meta(min_length=1, max_length=1300)]
"""A folder of the object store, `<bucket>/<prefix>`."""
_FILE_NAME: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}$"
FileName = Annotated[str, Meta(pattern=_FILE_NAME)]
"""Name of a file directly in the folder. No such name can lead out of the folder."""
CHAIN: Final = "rollbus-chain"
"""Name of the metadata field of the object that holds the record as JSON."""
CHAIN_OBJECT: Final = "versions/chain"
"""Name of the object."""
MAX_HISTORY: Final = 4 * MAX_LINKS
"""Maximum number of links in a record. It covers the chains of the recorded version, of its predecessor, and of all
versions published since."""
MAX_NOTED: Final = 2 * (limits.MAX_LORAS + 1)
"""Maximum number of noted folders: the recorded version and its predecessor, for the weights and for each adapter."""
MAX_REASON_CHARS: Final = 500
"""Maximum length of the reason for a withdrawn publication, so that the record stays small."""


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The change from a tensor's old content to its new content.

    It has the fields of `Encoded` in `bus/protocol/weights/tensors.py`, and the location.
    """

    encoding: Literal["sparse", "dense"]
    object: Annotated[int, Meta(ge=0, lt=MAX_DELTA_OBJECTS)] = 0
    """Number of the object that holds the data, as in the object's name."""
    offset: NumBytes = 0
    """Offset of the data in that object, in bytes."""
    num_bytes: NumBytes
    """Bytes of the data."""
    body_bytes: NumBytes
    """Bytes of the decompressed data."""
    num_changed: NumBytes = 0
    """Number of changed elements; 0 unless `sparse`."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a version."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Name of the tensor, as in the checkpoint's index."""
    dtype: Annotated[str, Meta(max_length=16)]
    """Dtype in the notation of safetensors: BF16, F32 ..."""
    shape: Annotated[tuple[NumBytes, ...], Meta(max_length=16)]
    """Shape of the tensor; empty for a scalar."""
    sha256: Sha256
    """SHA-256 of the whole content, in hexadecimal."""
    file: FileName
    """Name of the safetensors file that holds the tensor. The tensors of a file are stored in the manifest's order."""
    delta: TensorDelta | None = None
    """Delta of the tensor; None: the tensor did not change, or the version has no delta."""

    def __post_init__(self) -> None:
        """Check that safetensors supports the name and dtype and that the content is a whole number of bytes."""
        if self.name == "__metadata__":
            raise ValueError("a tensor has the name __metadata__, which safetensors reserves")
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"{self.name[:200]!r} has the unknown dtype {self.dtype!r}")
        if math.prod(self.shape) * DTYPE_BITS[self.dtype] % 8:
            raise ValueError(f"{self.name[:200]!r} is not a whole number of bytes")

    @property
    def size(self) -> int:
        """Bytes of the whole content."""
        return content_bytes(self.dtype, self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element in comparisons of deltas; 1 if several elements share a byte."""
        return item_bytes(self.dtype)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One version of the chain."""

    objects: Objects
    """Folder of the version."""
    version: Version
    digest: Sha256
    """Digest of the version's content."""
    delta_bytes: NumBytes | None = None
    """Bytes of the objects that hold the version's delta; None: it has no delta, so the chain begins here."""
    anchor_bytes: NumBytes | None = None
    """Bytes of the files of the version's anchor; None: it has no anchor."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a published version of weights. Readers ignore unknown fields."""

    v: Literal[1] = 1
    """Wire version."""
    model: str
    """Name of the model that has these weights, or of the adapter's base model."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: the weights are those of the model. Adapters have only anchors."""
    version: Version
    digest: Sha256
    """`content_digest` of `tensors` and `files`."""
    epoch: Epoch
    """Epoch of the publisher's lease; it only increases."""
    publisher: Name
    """Name of the client that published the version."""
    tensors: Annotated[tuple[TensorEntry, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    """All tensors, each once, file by file in the order of the file names."""
    files: Annotated[dict[FileName, Sha256], Meta(max_length=1024)] = {}
    """SHA-256 of the other files of the folder (config.json, tokenizer.json ...), by name. Only anchors contain these
    files; a reader that applies deltas takes them from the version before."""
    links: Annotated[tuple[Link, ...], Meta(min_length=1, max_length=MAX_LINKS)]
    """The chain from older to newer versions. The last link is this version."""

    def __post_init__(self) -> None:
        """Check the name and that the manifest does not contradict itself."""
        check_name("model", self.model)
        if len({entry.name for entry in self.tensors}) != len(self.tensors):
            raise ValueError("the manifest has a tensor twice")
        files = [entry.file for entry in self.tensors]
        if files != sorted(files) or self.files.keys() & set(files) or MANIFEST in self.files:
            raise ValueError(
                "the tensors of the manifest are not in the order of their files, or a file is listed twice"
            )
        if (self.links[-1].version, self.links[-1].digest) != (self.version, self.digest):
            raise ValueError("the last link of the manifest is another version")
        if self.digest != content_digest(self.tensors, self.files):
            raise ValueError("the digest of the manifest does not match its content")

    @property
    def own(self) -> Link:
        """The link of this version."""
        return self.links[-1]


def content_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor's whole content."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element in comparisons of deltas; 1 if several elements share a byte."""
    return max(1, DTYPE_BITS[dtype] // 8)


def content_digest(tensors: Iterable[TensorEntry], files: Mapping[str, str]) -> str:
    """Return the SHA-256 of a content: its tensors with their locations, and the other files.

    A delta and an anchor of the same content give the same digest.
    """
    sha = hashlib.sha256()
    for entry in tensors:
        sha.update(msgspec.json.encode((entry.file, entry.name, entry.dtype, entry.shape, entry.sha256)))
    sha.update(msgspec.json.encode(sorted(files.items())))
    return sha.hexdigest()


def tensors_digest(
    tensors: Iterable[tuple[str, str, tuple[int, ...], str]], files: Mapping[str, str] | None = None
) -> str:
    """Return the SHA-256 that identifies weights by their tensors, whatever files hold them.

    A checkpoint, a copy in other shards, an anchor and a delta of equal tensors give the same digest.

    Args:
        tensors: name, dtype, shape and SHA-256 of the content of each tensor, as stored, in any order.
        files: SHA-256 of each other file that changes the effect of the weights, by name.
    """
    sha = hashlib.sha256()
    for tensor in sorted(tensors):
        sha.update(msgspec.json.encode(tensor))
    if files:
        sha.update(msgspec.json.encode(sorted(files.items())))
    return sha.hexdigest()


def is_file_name(name: str) -> bool:
    """Return True if a file beside the tensors may have this name.

    Readers must not mistake the file for a part of a delta.
    """
    return re.fullmatch(_FILE_NAME, name) is not None and not name.startswith(DELTA_PREFIX)


def delta_name(number: int) -> str:
    """Return the name of the object that holds part `number` of a delta."""
    return f"{DELTA_PREFIX}{number:04d}"


decode_manifest = partial(decode_document, kind=Manifest, what="a manifest")
"""Decodes a manifest. Raises `RemoteProtocolError` if the data is not one, or if it contradicts itself."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher that holds the lease."""

    publisher: NonEmptyName
    """Name of the publisher's client."""
    incarnation: NonEmptyName
    """Incarnation of the publisher; it distinguishes two processes with the same name."""


class OpenedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that other ranks may join."""

    objects: Objects
    """Folder of the version."""
    version: Version
    epoch: Epoch
    adapter: str | None = None
    has_delta: bool = False
    """True if the version has a delta to its predecessor."""
    has_anchor: bool = True
    """True if the version has the whole checkpoint."""


class WithdrawnVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A publication of several ranks that was withdrawn."""

    objects: Objects
    """Folder of the version."""
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
    """Reason, with the number of the rank that failed."""


class ChainRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shared state of all publishers of one model. Readers ignore unknown fields."""

    v: int = 1
    """Wire version."""
    model: str
    epoch: Epoch = 0
    """Epoch of the newest lease. The next lease has a higher epoch."""
    holder: Holder | None = None
    """Publisher that holds the lease, which counts from when the record was stored. None: the lease was released."""
    links: Annotated[tuple[Link, ...], Meta(max_length=MAX_HISTORY)] = ()
    """Kept versions of the weights, in the order of their commits."""
    noted: Annotated[tuple[Objects, ...], Meta(max_length=MAX_NOTED)] = ()
    """Folders that were recorded last and second to last, of the weights and of each adapter; older folders first."""
    opened: OpenedVersion | None = None
    """Publication that ranks may join; None: no publication is open."""
    withdrawn: WithdrawnVersion | None = None
    """Last joined publication, if a rank failed. Ranks that wait for its commit read this field."""


class RankObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a rank has uploaded and whose description is not stored yet."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Name of the object within the folder."""
    nuid: Annotated[str, Meta(pattern="^[A-Za-z0-9]{1,64}$")]
    size: Annotated[int, Meta(ge=0, le=2**62)]
    chunks: Annotated[int, Meta(ge=0, le=2**40)]
    digest: Annotated[str, Meta(max_length=100)]
    mtime: Annotated[str, Meta(max_length=64)] = ""
    part_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 0


class RankList(msgspec.Struct, frozen=True, kw_only=True):
    """The objects and tensors that one rank contributes to a publication."""

    version: Version
    epoch: Epoch
    rank: Annotated[int, Meta(ge=0, lt=2**16)]
    objects: tuple[RankObject, ...]
    tensors: tuple[TensorEntry, ...]


decode_chain = partial(decode_document, kind=ChainRecord, what="a chain record")
"""Decodes a chain record. Raises `RemoteProtocolError` if the text is not one."""
decode_rank_list = partial(decode_document, kind=RankList, what="the list of a rank")
"""Decodes the objects and tensors that a rank contributes. Raises `RemoteProtocolError` if the data is not a list."""
