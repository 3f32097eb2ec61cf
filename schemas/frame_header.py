"""The header of a frame whose content does not decode: its link, its frame number, and the requests that it names."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .chunk import Chunk, Index, RequestId
from .messages import FrameNumber, Incarnation, OptionalIncarnation, RequestKey
from .wire_version import MALFORMED

__all__ = ["FrameHeader", "decode_frame_header"]


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The readable part of a frame that does not decode."""

    incarnation: str
    """Incarnation of the worker."""
    number: int
    """Number of the frame on its link."""
    link: int
    """Number of the link within this incarnation."""
    client_incarnation: str
    """Incarnation of the client that the frame is for."""
    keys: frozenset[RequestKey] = frozenset()
    """All requests that the frame names; empty if their names do not decode."""
    bad_keys: frozenset[RequestKey] = frozenset()
    """Requests whose chunks do not decode; empty if the names of the requests do not decode."""


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
    """Decode the header of a frame that `decode_frame` rejected. Return None if the header does not decode either."""
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
    """Return all requests that a frame names, and the requests whose chunks do not decode.

    Return two empty sets if any name does not decode.
    """
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
