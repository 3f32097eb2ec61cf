"""What a publication needs of the store that it belongs to."""

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
    """What a publication needs of its `VersionStore`."""

    nats: Connection
    key: ChainKey
    model: str
    publisher: str
    change: Callable[[Callable[[ChainRecord], ChainRecord]], Awaitable[None]]
    """Writes the chain record while the lease is held."""
    record: Callable[[], ChainRecord]
    """The chain record, as it was last read."""
    ended: Callable[["Publication"], None]
    """Called when the publication was committed or taken back."""
    make_room: Callable[[], Awaitable[None]]
    """Deletes what may go, when the bucket has no room."""
