"""The interface of a version store that a publication uses."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.chain import ChainRecord
from ..nats.connection import Connection
from .chain_key import ChainKey

if TYPE_CHECKING:
    from .publication import Publication

__all__ = ["PublicationHome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationHome:
    """The operations of a `VersionStore` that a publication uses."""

    nats: Connection
    key: ChainKey
    model: str
    publisher: str
    change: Callable[[Callable[[ChainRecord], ChainRecord]], Awaitable[None]]
    """Writes the chain record while the lease is held."""
    record: Callable[[], ChainRecord]
    """Returns the chain record as last read."""
    ended: Callable[["Publication"], None]
    """Called when the publication was committed or discarded."""
    make_room: Callable[[], Awaitable[None]]
    """Deletes removable objects if the bucket is full."""
