"""JSON documents that are stored for later readers: manifests, chain records, lists of ranks."""

from typing import TypeVar

import msgspec

from .errors import RemoteProtocolError
from .wire_version import MALFORMED

__all__ = ["decode_document"]

T = TypeVar("T")


def decode_document(data: str | bytes, kind: type[T], what: str) -> T:
    """Decode a stored document; `what` is its name in the error message.

    Raises:
        RemoteProtocolError: the data is not such a document, or it contradicts itself.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (*MALFORMED, UnicodeEncodeError) as error:
        # An object's metadata is text and may hold half of a surrogate pair.
        raise RemoteProtocolError(f"{what} does not decode: {error}") from error
