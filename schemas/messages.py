"""The messages that carry requests and chunks: one struct per subject, the codecs beside them.

Decoders raise `InvalidRequest` where a caller's field is wrong and `RemoteProtocolError` where a message is not
what it should be; nothing else leaves them, whatever bytes come in.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from schemas import limits
from schemas.checks import check_request_id, check_token_ids
from schemas.chunk import Chunk
from schemas.errors import InvalidRequest, RemoteProtocolError
from schemas.presence import WorkerPresence
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams

__all__ = [
    "Frame",
    "LinkMessage",
    "RequestKey",
    "RequestMessage",
    "decode_frame",
    "decode_link_message",
    "decode_presence",
    "decode_request",
    "decode_request_message",
    "encode",
    "encode_json",
    "request_from_json",
    "request_id_of",
]

WIRE_VERSION = 1
Id = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
Index = Annotated[int, Meta(ge=0, le=2**31)]


class RequestKey(msgspec.Struct, array_like=True, frozen=True, gc=False, order=True):
    """One attempt of one child of one of a client's requests."""

    request_id: Id
    attempt: Index = 0
    child: Index = 0


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request on its way to a worker: a msgpack map, so that programs without this library can write it."""

    v: int = WIRE_VERSION
    client: Id
    """Who asks; frames go to this client's subject."""
    attempt: Index = 0
    """How often the request was published before."""
    child: Index = 0
    """Which of n samples this is; `request.sampling.n` is 1 here."""
    request: msgspec.Raw
    """A `GenerateRequest`, decoded on its own so that a bad field still finds its way back to the client."""


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One message from a worker to one client: what one engine step added to that client's requests."""

    v: int
    incarnation: Id
    """Of the worker; numbering starts over with each."""
    number: Index
    """0-based and contiguous on a link."""
    admitted: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Requests that the worker has just taken on."""
    chunks: Annotated[list[Chunk], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]


class LinkMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a client tells a worker about its requests there."""

    v: int
    abort: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Requests to stop; unknown ones are ignored."""


def _enc_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _enc_hook_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _dec_hook(kind: type, value: object) -> object:
    """Turn the `<i4` bytes of token ids, or a plain list of integers, into an array; checked by the struct."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"no decoder for {kind}")
    if isinstance(value, bytes):
        if len(value) % 4:
            raise InvalidRequest(
                field="prompt_token_ids", problem=f"has {len(value)} bytes", allowed="<i4: a multiple of 4 bytes"
            )
        return np.frombuffer(value, "<i4")
    return check_token_ids("prompt_token_ids", value, min_length=1, max_length=limits.MAX_PROMPT_TOKENS)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_enc_hook_json)
_request_message_decoder = msgspec.msgpack.Decoder(RequestMessage)
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest, dec_hook=_dec_hook)
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_link_decoder = msgspec.msgpack.Decoder(LinkMessage)
_presence_decoder = msgspec.json.Decoder(WorkerPresence)


class _OnlyId(msgspec.Struct):
    request_id: str


_only_id_decoder = msgspec.msgpack.Decoder(_OnlyId)


def encode(message: GenerateRequest | RequestMessage | Frame | LinkMessage) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def encode_json(message: object) -> bytes:
    """Encode a struct as JSON; token ids become lists of integers."""
    return _json_encoder.encode(message)


def request_id_of(raw: bytes | msgspec.Raw) -> str | None:
    """The request id in an encoded `GenerateRequest` that may be wrong elsewhere; None when there is no valid one."""
    try:
        return check_request_id("request_id", _only_id_decoder.decode(raw).request_id)
    except (msgspec.DecodeError, InvalidRequest):
        return None


def decode_request_message(data: bytes) -> RequestMessage:
    """Decode the envelope of a request; the request itself is left for `decode_request`."""
    return _decode(_request_message_decoder, data, "request message")


def decode_request(raw: bytes | msgspec.Raw) -> GenerateRequest:
    """Decode and check a request.

    Raises:
        InvalidRequest: a field is wrong, missing or of the wrong type.
        RemoteProtocolError: these bytes are no msgpack map.
    """
    try:
        return _request_decoder.decode(raw)
    except msgspec.ValidationError as exc:
        raise _invalid_request(exc) from None
    except (msgspec.DecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"request: {exc}") from None


def request_from_json(fields: Mapping[str, object]) -> GenerateRequest:
    """Build a request from JSON's types, as in a JSONL file; unknown fields are refused.

    Raises:
        InvalidRequest: a field is wrong, missing, unknown or of the wrong type.
    """
    sampling = fields.get("sampling", {})
    for where, given, known in (
        ("", fields, GenerateRequest.__struct_fields__),
        ("sampling.", sampling, SamplingParams.__struct_fields__),
    ):
        unknown = sorted(set(given) - set(known)) if isinstance(given, Mapping) else []
        if unknown:
            raise InvalidRequest(field=f"{where}{unknown[0]}", problem="is unknown", allowed=", ".join(known))
    try:
        return msgspec.convert(fields, GenerateRequest, dec_hook=_dec_hook, str_keys=True)
    except msgspec.ValidationError as exc:
        raise _invalid_request(exc) from None


def decode_frame(data: bytes) -> Frame:
    """Decode a frame; the routing in it stays a view of `data`."""
    return _decode(_frame_decoder, data, "frame")


def decode_link_message(data: bytes) -> LinkMessage:
    """Decode a client's message to a worker."""
    return _decode(_link_decoder, data, "link message")


def decode_presence(data: bytes) -> WorkerPresence:
    """Decode a worker's presence from JSON."""
    return _decode(_presence_decoder, data, "presence")


_T_co = TypeVar("_T_co", covariant=True)


class _Decoder(Protocol[_T_co]):
    def decode(self, data: bytes, /) -> _T_co: ...


def _decode(decoder: _Decoder[_T_co], data: bytes, what: str) -> _T_co:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise RemoteProtocolError(f"{what}: {exc}") from None


_PATH = re.compile(r"^(?P<problem>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_QUOTED_FIELD = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")


def _invalid_request(exc: msgspec.ValidationError) -> InvalidRequest:
    """Say in our words what msgspec found wrong with a request."""
    if isinstance(exc.__cause__, InvalidRequest):
        return exc.__cause__
    match = _PATH.match(str(exc))
    problem, path = (match["problem"], match["path"] or "") if match else (str(exc), "")
    missing = _QUOTED_FIELD.match(problem)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(field=name, problem="is missing", allowed="this field is required")
    expected, _, got = problem.partition(", got ")
    return InvalidRequest(
        field=path or "request",
        problem=f"is of type {got}" if got else problem,
        allowed=expected.removeprefix("Expected ") if got else "see docs/wire.md",
    )
