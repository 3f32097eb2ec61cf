"""The chain record of a model's published weights: who may publish, what was committed, and what is kept for whom.

It is JSON in the metadata `CHAIN` of the object `CHAIN_OBJECT` of the model's bucket, which has no content. Publishers
change it by compare-and-set alone.
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
"""In the metadata of the object: the record, as JSON."""
CHAIN_OBJECT: Final = "versions/chain"
"""Name of the object."""
MAX_HISTORY: Final = 4 * MAX_LINKS
"""Links in a record: the chains of the recorded version, of the one before, and of what was published since."""
MAX_NOTED: Final = 2 * (limits.MAX_LORAS + 1)
"""The recorded version and the one before, of the weights and of each adapter."""
MAX_REASON_CHARS: Final = 500
"""Of why a publication was taken back: the record stays small."""

Epoch = Annotated[int, Meta(ge=0, le=2**53)]
Name = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher that holds the lease."""

    publisher: Name
    """The name of its client."""
    incarnation: Name
    """Tells two processes of one name apart."""


class OpenedVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that other ranks may join."""

    objects: Objects
    """Its folder."""
    version: Version
    epoch: Epoch
    adapter: str | None = None
    has_delta: bool = False
    """It has what changed since the version before."""
    has_anchor: bool = True
    """It has the whole checkpoint."""


class WithdrawnVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A publication of several ranks that was taken back."""

    objects: Objects
    """Its folder."""
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
    """With the rank that failed."""


class ChainRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What publishers of one model agree on. Readers ignore fields that they do not know."""

    v: int = 1
    """Wire version."""
    model: str
    epoch: Epoch = 0
    """Of the newest lease; the next one's is higher."""
    holder: Holder | None = None
    """Who has the lease; it counts from when the record was stored. None: it was given back."""
    links: Annotated[tuple[Link, ...], Meta(max_length=MAX_HISTORY)] = ()
    """Versions of the weights in the order in which they were committed, as far as they are kept."""
    noted: Annotated[tuple[Objects, ...], Meta(max_length=MAX_NOTED)] = ()
    """Folders that were recorded last and before, of the weights and of each adapter; older ones first."""
    opened: OpenedVersion | None = None
    """What ranks join."""
    withdrawn: WithdrawnVersion | None = None
    """What they joined last, if a rank failed; for those that wait for its commit."""


class RankObject(msgspec.Struct, frozen=True, kw_only=True):
    """An object that a rank has uploaded, of which no description is stored yet."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    """Below the folder."""
    nuid: Annotated[str, Meta(pattern="^[A-Za-z0-9]{1,64}$")]
    size: Annotated[int, Meta(ge=0, le=2**62)]
    chunks: Annotated[int, Meta(ge=0, le=2**40)]
    digest: Annotated[str, Meta(max_length=100)]
    mtime: Annotated[str, Meta(max_length=64)] = ""
    part_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 0


class RankList(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank gives to a publication."""

    version: Version
    epoch: Epoch
    rank: Annotated[int, Meta(ge=0, lt=2**16)]
    objects: tuple[RankObject, ...]
    tensors: tuple[TensorEntry, ...]


def decode_chain(text: str) -> ChainRecord:
    """Read a chain record.

    Raises:
        RemoteProtocolError: it is none.
    """
    return decode_document(text, ChainRecord, "a chain record")


def decode_rank_list(data: bytes) -> RankList:
    """Read what a rank has given.

    Raises:
        RemoteProtocolError: it is none.
    """
    return decode_document(data, RankList, "the list of a rank")
