"""The header of a frame whose content does not decode: which frame of which link it is, and which requests it names."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .chunk import Chunk, Index, RequestId
from .messages import FrameNumber, Incarnation, OptionalIncarnation, RequestKey
from .wire_version import MALFORMED

__all__ = ["FrameHeader", "decode_frame_header"]


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What can be read of a frame that does not decode."""

    incarnation: str
    """Of the worker."""
    number: int
    """On its link."""
    link: int
    """Which link of this incarnation it is."""
    client_incarnation: str
    """Of the client that the frame is for."""
    keys: frozenset[RequestKey] = frozenset()
    """All requests that the frame names; empty if they cannot be read."""
    bad_keys: frozenset[RequestKey] = frozenset()
    """The requests whose chunks do not decode; empty if they cannot be read."""


class _Header(msgspec.Struct, array_like=True, frozen=True):
    """A `Frame` with its content left undecoded."""

    v: Literal[1]
    incarnation: Incarnation
    number: FrameNumber
    admitted: msgspec.Raw
    chunks: msgspec.Raw
    link: FrameNumber = 0
    client_incarnation: OptionalIncarnation = ""


class _ChunkKey(msgspec.Struct, array_like=True, frozen=True):
    """The first fields of a `Chunk`."""

    request_id: RequestId
    attempt: Index
    child: Index


_header_decoder = msgspec.msgpack.Decoder(_Header)
_offers_decoder = msgspec.msgpack.Decoder(Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)])
_chunks_decoder = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)])
_chunk_key_decoder = msgspec.msgpack.Decoder(_ChunkKey)
_chunk_decoder = msgspec.msgpack.Decoder(Chunk)


def decode_frame_header(data: bytes) -> FrameHeader | None:
    """Decode the header of a frame that `decode_frame` refused; None if the header does not decode either."""
    try:
        header = _header_decoder.decode(data)
    except MALFORMED:
        return None
    keys, bad_keys = _requests_in(header)
    return FrameHeader(
        incarnation=header.incarnation,
        number=header.number,
        link=header.link,
        client_incarnation=header.client_incarnation,
        keys=keys,
        bad_keys=bad_keys,
    )


def _requests_in(header: _Header) -> tuple[frozenset[RequestKey], frozenset[RequestKey]]:
    """Return all requests that a frame names, and those whose chunks do not decode; both empty if one is unreadable."""
    keys: set[RequestKey] = set()
    bad_keys: set[RequestKey] = set()
    try:
        keys.update(_offers_decoder.decode(header.admitted))
        for raw in _chunks_decoder.decode(header.chunks):
            named = _chunk_key_decoder.decode(raw)
            key = RequestKey(named.request_id, named.attempt, named.child)
            keys.add(key)
            if not _decodes(raw):
                bad_keys.add(key)
    except MALFORMED:
        return frozenset(), frozenset()
    return frozenset(keys), frozenset(bad_keys)


def _decodes(raw: msgspec.Raw) -> bool:
    try:
        _chunk_decoder.decode(raw)
    except MALFORMED:
        return False
    return True
