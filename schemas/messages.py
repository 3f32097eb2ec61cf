"""The messages that carry requests and chunks, with their codecs; each subject has one struct.

Decoders raise `InvalidRequest` for a wrong field of a caller and `RemoteProtocolError` for any other invalid message.
They raise nothing else for any input.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta

from . import limits
from .acks import Ack
from .checks import check_request_id, check_subject_token, describe
from .chunk import Chunk, Index, RequestId
from .control import AnyCommand, DesiredState
from .decoding import MALFORMED, WIRE_VERSION, Form, other_version, why_malformed, wrong_command
from .errors import InvalidRequest, RemoteProtocolError
from .limits import Name, NonEmptyName, Version
from .presence import ClientPresence, WorkerPresence
from .request import GenerateRequest, check_given_id
from .request_fields import build_request, decode_token_ids
from .telemetry import LostAttempt, ServiceMessage

FrameNumber = Annotated[int, Meta(ge=0, le=2**53)]
ByteOffset = Annotated[int, Meta(ge=0, le=2**62)]
_untyped_decoder = msgspec.msgpack.Decoder()
_command_decoder = msgspec.json.Decoder(AnyCommand)
_commands = {str(kind.__struct_config__.tag): kind for kind in get_args(AnyCommand)}
_T = TypeVar("_T")
_chunks_decoder = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)])
_chunk_decoder = msgspec.msgpack.Decoder(Chunk)


class RequestKey(msgspec.Struct, array_like=True, frozen=True, gc=False, order=True):
    """One attempt of one child request."""

    request_id: RequestId
    """Id of the request, chosen by the client."""
    attempt: Index = 0
    """Number of the attempt, from 0."""
    child: Index = 0
    """Number of the sample, 0 to n - 1."""


class KvTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The transfer of a prompt's KV cache from a prefill worker to a decode worker: a msgpack map.

    Without `params`, the request is a prefill phase: one token, and the worker keeps the prompt's KV cache. With
    `params`, it is a decode phase: the worker can fetch the KV cache of the prompt except its last tokens, or
    recomputes it.
    """

    params: Annotated[bytes, Meta(max_length=limits.MAX_KV_PARAMS_BYTES)] = b""
    """`End.kv_params` of the prefill phase: a msgpack map in the connector's format."""
    connector: Name | None = None
    """`Capabilities.kv_connector` of the prefill worker; others cannot use `params`."""
    weight_version: Version | None = None
    """Version of the weights that computed the KV cache; workers with another one cannot use it."""
    lora_version: Version | None = None
    """Version of the request's adapter, with the same effect; None: no adapter."""

    @property
    def is_prefill(self) -> bool:
        """True for a prefill phase, False for a decode phase."""
        return not self.params


class Sibling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One more sample of the request in a message: the same request with another seed."""

    child: Index
    """Number of the sample, 0 to n - 1."""
    seed: Annotated[int, Meta(ge=0, le=limits.MAX_SEED)] | None = None
    """`sampling.seed` of this sample."""


# The same few names come with every request.
_check_client = lru_cache(1024)(partial(check_subject_token, "client"))


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to a worker: a msgpack map, so that programs without this library can write it."""

    v: Literal[1] = WIRE_VERSION
    """Wire version."""
    client: str
    """Name of the client, to whose subject frames go."""
    incarnation: Name = ""
    """Incarnation of the client; empty if `reply_to` is set."""
    reply_to: Annotated[str, Meta(max_length=limits.MAX_SUBJECT_CHARS)] | None = None
    """Plain mode: subject for frames, below `plain.<client>.`."""
    attempt: Index = 0
    """Number of earlier publications of the request."""
    child: Index = 0
    """Number of the sample, 0 to n - 1; `request.sampling.n` is 1."""
    target_version: Version | None = None
    """Target version at submission, from which `max_weight_lag` counts; None without it and in later attempts."""
    kv: KvTransfer | None = None
    """KV transfer of a prefill or decode phase; None: one worker serves the whole request."""
    stream: bool = True
    """False: the caller reads no single chunks, so the worker may batch tokens."""
    request: msgspec.Raw
    """Encoded `GenerateRequest`, decoded separately, so that the client learns of a wrong field."""
    siblings: Annotated[tuple[Sibling, ...], Meta(max_length=limits.MAX_SIBLINGS)] = ()
    """Further samples of the same request and attempt; only in direct messages to workers with `request_groups`."""
    may_wait: bool = False
    """True: the requests may wait at the worker behind an accepted one of their group (`group_id`, else `request_id`),
    or as turns of a session; only in direct messages to workers with `group_backlog`."""
    placed_for: Name = ""
    """Reason that the worker counts: `placed_prefix`, `placed_group`, `placed_session`, `placed_able`; empty: none."""
    lost: Annotated[tuple[LostAttempt, ...], Meta(max_length=limits.MAX_ATTEMPTS)] = ()
    """Attempts that the client has lost before, oldest first."""
    given_id: str = ""
    """Id that the caller gave the request, if it is not `request.request_id`."""

    def __post_init__(self) -> None:
        """Check that the client is a subject token, that an answer is possible, and that ids and siblings are valid."""
        _check_client(self.client)
        if self.given_id:
            check_given_id("given_id", self.given_id)
        if (self.reply_to is None) != bool(self.incarnation):
            raise ValueError("a request message needs either the client's incarnation or reply_to")
        if self.siblings:
            self._check_siblings()

    def _check_siblings(self) -> None:
        children = [self.child, *(sibling.child for sibling in self.siblings)]
        if len(set(children)) != len(children):
            raise ValueError(f"child and siblings name {len(children)} samples and repeat one; allowed: each once")
        if self.reply_to is not None:
            raise ValueError("a request message with reply_to has siblings; allowed: none")
        if self.kv is not None and not self.kv.is_prefill:
            # A prefill worker transfers the KV cache of a prompt only once.
            raise ValueError("the message of a decode phase has siblings; allowed: none")


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One message from a worker to one client: the new output of that client's requests."""

    v: Literal[1]
    """Wire version."""
    incarnation: NonEmptyName
    """Incarnation of the worker."""
    number: FrameNumber
    """Number of the frame on its link, contiguous from 0. A heartbeat (without content) has that of the next one."""
    admitted: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Offers: requests that the worker has just accepted, or that waited and that its engine has now received."""
    chunks: Annotated[list[Chunk], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Chunks; those of one request are in order."""
    link: FrameNumber = 0
    """Number of the link within this incarnation."""
    client_incarnation: Name = ""
    """Incarnation of the receiving client; others of its name drop the frame. Empty in plain mode."""

    @property
    def is_heartbeat(self) -> bool:
        """True if the frame only announces the next frame number, so that the client detects a lost last frame."""
        return not self.admitted and not self.chunks


class LinkMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A client's message to a worker: requests to abort, received frames, and granted credit."""

    v: Literal[1]
    """Wire version."""
    abort: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Requests to abort; the worker ignores unknown requests."""
    client_incarnation: Name = ""
    """Incarnation of the client; the worker ends requests of earlier ones."""
    incarnation: Name = ""
    """Incarnation of the worker that owns the link; empty: only `abort` counts."""
    link: FrameNumber = 0
    """`Frame.link` of the link that the following fields describe."""
    acked: FrameNumber = 0
    """Frame ack: the client has received every frame below this number."""
    credit: ByteOffset = 0
    """Byte offset up to which frames may be sent, over all frames of this link; never decreases."""
    resend: bool = False
    """True: send all frames from `acked` on again."""


def _enc_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _enc_hook_json(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _dec_hook(kind: type, value: object) -> object:
    """Convert the `<i4` bytes of token ids, or a list of integers, to an array. The struct checks the array."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"no decoder for {kind}")
    return decode_token_ids(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_enc_hook_json)
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest, dec_hook=_dec_hook)


class _CommandHead(msgspec.Struct):
    # Raw: an invalid value of one field does not hide the other.
    id: msgspec.Raw = msgspec.Raw(b"null")
    command: msgspec.Raw = msgspec.Raw(b"null")


_command_head_decoder = msgspec.json.Decoder(_CommandHead)


class _OnlyPriority(msgspec.Struct):
    priority: int = 0


_only_priority_decoder = msgspec.msgpack.Decoder(_OnlyPriority)


def encode(message: GenerateRequest | RequestMessage | Frame | LinkMessage) -> bytes:
    """Encode a message as msgpack."""
    return _encoder.encode(message)


def encode_json(message: object) -> bytes:
    """Encode a struct as JSON; token ids become lists of integers."""
    return _json_encoder.encode(message)


def priority_of(raw: bytes | msgspec.Raw) -> int:
    """Return the priority of an encoded `GenerateRequest`, even if other fields are wrong; 0 if not an integer."""
    try:
        return _only_priority_decoder.decode(raw).priority
    except MALFORMED:
        return 0


def _decoder(kind: type[_T], what: str, form: Form = "json") -> Callable[[bytes], _T]:
    """Return the function that decodes messages of one kind. `what` is their name in errors."""
    decode: Callable[[bytes], _T]
    decode = msgspec.json.Decoder(kind).decode if form == "json" else msgspec.msgpack.Decoder(kind).decode

    def decode_message(data: bytes) -> _T:
        try:
            return decode(data)
        except MALFORMED as exc:
            raise RemoteProtocolError(f"{what}: {why_malformed(exc, data, form)}") from None

    return decode_message


decode_request_message = _decoder(RequestMessage, "request message", "map")
"""Decodes the envelope of a request. `decode_request` decodes the request in it."""
decode_frame = _decoder(Frame, "frame", "array")
"""Decodes a frame into a copy that does not refer to the bytes."""
decode_link_message = _decoder(LinkMessage, "link message", "array")
decode_presence = _decoder(WorkerPresence, "presence")
decode_client_presence = _decoder(ClientPresence, "client presence")
decode_ack = _decoder(Ack, "ack")
decode_desired = _decoder(DesiredState, "desired state")
decode_service_message = _decoder(ServiceMessage, "service message")


def decode_request(raw: bytes | msgspec.Raw) -> GenerateRequest:
    """Decode and validate a request.

    Raises:
        InvalidRequest: a field is wrong, missing or of the wrong type.
        RemoteProtocolError: the bytes are not a msgpack map.
    """
    try:
        request = _request_decoder.decode(raw)
        # Only callers may write other ids. The wire carries their short form.
        check_request_id("request_id", request.request_id)
        if request.id_scope is not None:
            raise InvalidRequest("id_scope", "is set", "null in a message")
        return request
    except msgspec.ValidationError as exc:
        if isinstance(exc.__cause__, InvalidRequest):
            raise exc.__cause__ from None
        problem = str(exc)
    except MALFORMED as exc:
        raise RemoteProtocolError(f"request: {exc}") from None
    # msgspec's errors name no ranges. The request's own checks do, so build the request from plain values.
    try:
        fields = _untyped_decoder.decode(raw)
    except MALFORMED as exc:
        raise RemoteProtocolError(f"request: {exc}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"request: {describe(fields)}, not a map")
    build_request(fields)
    raise InvalidRequest("request", f"does not decode: {problem}", "a map of its fields")


def decode_command(data: bytes) -> AnyCommand:
    """Decode a command from JSON.

    Raises:
        InvalidRequest: a field is wrong, missing or unknown, or the command does not exist.
        RemoteProtocolError: the bytes are not JSON.
    """
    try:
        command: AnyCommand = _command_decoder.decode(data)
    except msgspec.ValidationError as exc:
        if isinstance(exc.__cause__, InvalidRequest):
            raise exc.__cause__ from None
        if (version := other_version(data, "json")) is not None:
            raise InvalidRequest("v", f"is {version}", str(WIRE_VERSION)) from None
        raise wrong_command(str(exc), _commands, _read_head(data, "command")) from None
    except MALFORMED as exc:
        raise RemoteProtocolError(f"command: {exc}") from None
    if command_id_of(data) is None:
        # Each worker would create its own id, and the acks could not be matched to the command.
        raise InvalidRequest("id", "is missing", "an id that the sender chooses, new for each command")
    return command


def _read_head(data: bytes, field: Literal["id", "command"]) -> object:
    """Return one field of a command; None if it is missing or malformed."""
    try:
        return msgspec.json.decode(getattr(_command_head_decoder.decode(data), field))
    except MALFORMED:
        return None


def command_id_of(data: bytes) -> str | None:
    """Return the id of a command, even if other fields are wrong; None without a valid id."""
    try:
        return check_request_id("id", _read_head(data, "id"))
    except InvalidRequest:
        return None


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
    incarnation: NonEmptyName
    number: FrameNumber
    admitted: msgspec.Raw
    chunks: msgspec.Raw
    link: FrameNumber = 0
    client_incarnation: Name = ""


class _ChunkKey(msgspec.Struct, array_like=True, frozen=True):
    """The first fields of a `Chunk`."""

    request_id: RequestId
    attempt: Index
    child: Index


_header_decoder = msgspec.msgpack.Decoder(_Header)


_offers_decoder = msgspec.msgpack.Decoder(Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)])


_chunk_key_decoder = msgspec.msgpack.Decoder(_ChunkKey)


def decode_frame_header(data: bytes) -> FrameHeader | None:
    """Decode the header of a frame that `decode_frame` rejected. Return None if the header does not decode either."""
    try:
        header = _header_decoder.decode(data)
    except MALFORMED:
        return None
    keys, bad_keys = set[RequestKey](), set[RequestKey]()
    try:
        keys.update(_offers_decoder.decode(header.admitted))
        for raw in _chunks_decoder.decode(header.chunks):
            named = _chunk_key_decoder.decode(raw)
            key = RequestKey(named.request_id, named.attempt, named.child)
            keys.add(key)
            if not _decodes(raw):
                bad_keys.add(key)
    except MALFORMED:
        keys, bad_keys = set(), set()
    own = {name: getattr(header, name) for name in ("incarnation", "number", "link", "client_incarnation")}
    return FrameHeader(**own, keys=frozenset(keys), bad_keys=frozenset(bad_keys))


def _decodes(raw: msgspec.Raw) -> bool:
    try:
        _chunk_decoder.decode(raw)
    except MALFORMED:
        return False
    return True
