"""The chain record of a model's published weights: the publisher's lease, the committed versions, and the kept folders.

The record is JSON in the metadata field `CHAIN` of the object `CHAIN_OBJECT` in the model's bucket. That object has no
content. Publishers change the record only by compare-and-set.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from . import limits
from .json_documents import decode_document
from .manifest import MAX_LINKS, Link, Objects, TensorEntry, Version

__all__ = [
    "CHAIN",
    "CHAIN_OBJECT",
    "MAX_HISTORY",
    "MAX_REASON_CHARS",
    "ChainRecord",
    "Holder",
    "OpenedVersion",
    "RankList",
    "RankObject",
    "WithdrawnVersion",
    "decode_chain",
    "decode_rank_list",
]

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

Epoch = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher that holds the lease."""

    publisher: Name
    """Name of the publisher's client."""
    incarnation: Name
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


def decode_chain(text: str) -> ChainRecord:
    """Decode a chain record.

    Raises:
        RemoteProtocolError: the text is not a valid chain record.
    """
    return decode_document(text, ChainRecord, "a chain record")


def decode_rank_list(data: bytes) -> RankList:
    """Decode the list of objects and tensors that a rank contributes.

    Raises:
        RemoteProtocolError: the data is not a valid list of a rank.
    """
    return decode_document(data, RankList, "the list of a rank")
