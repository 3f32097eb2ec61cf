"""The messages that carry requests and chunks: one struct per subject, the codecs beside them.

Decoders raise `InvalidRequest` where a caller's field is wrong and `RemoteProtocolError` where a message is not
what it should be; nothing else leaves them, whatever bytes come in.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from . import limits
from .checks import check_request_id, check_subject_token, describe
from .chunk import Chunk, Index, RequestId
from .control import Ack, AnyCommand
from .desired import DesiredState
from .errors import InvalidRequest, RemoteProtocolError
from .presence import ClientPresence, WorkerPresence
from .request import GenerateRequest
from .request_fields import build_request, decode_token_ids
from .wire_version import MALFORMED, WIRE_VERSION, Form, other_version, why_malformed

__all__ = [
    "WIRE_VERSION",
    "Frame",
    "KvTransfer",
    "LinkMessage",
    "RequestKey",
    "RequestMessage",
    "Sibling",
    "command_id_of",
    "decode_ack",
    "decode_client_presence",
    "decode_command",
    "decode_desired",
    "decode_frame",
    "decode_link_message",
    "decode_presence",
    "decode_request",
    "decode_request_message",
    "encode",
    "encode_json",
    "priority_of",
    "request_id_of",
]

Incarnation = Annotated[str, Meta(min_length=1, max_length=limits.MAX_NAME_CHARS)]
OptionalIncarnation = Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)]
FrameNumber = Annotated[int, Meta(ge=0, le=2**53)]
ByteOffset = Annotated[int, Meta(ge=0, le=2**62)]


class RequestKey(msgspec.Struct, array_like=True, frozen=True, gc=False, order=True):
    """One attempt of one child of one of a client's requests."""

    request_id: RequestId
    """As the client named it."""
    attempt: Index = 0
    """0 for the first publication of the request."""
    child: Index = 0
    """Which of n samples."""


class KvTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The KV cache of a prompt on its way from a prefill worker to a decode worker: a msgpack map.

    Without `params` the request is a prefill leg: one token, and the prompt's KV is kept for another worker. With them
    it is a decode leg: its prompt's KV, all but that of its last tokens, can be fetched. A worker that cannot use it
    computes it anew.
    """

    params: Annotated[bytes, Meta(max_length=limits.MAX_KV_PARAMS_BYTES)] = b""
    """The prefill leg's `End.kv_params`: a msgpack map of the KV connector's own, which the bus does not read."""
    connector: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] | None = None
    """The prefill worker's `Capabilities.kv_connector`: any other cannot read `params`."""
    weight_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)] | None = None
    """Of the weights that made the KV: of no use to any other."""
    lora_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)] | None = None
    """Of the request's adapter, likewise; None: it uses none."""

    @property
    def is_prefill(self) -> bool:
        """It asks for KV rather than bringing it."""
        return not self.params


class Sibling(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One more sample of the request that a message carries: the same request, with a seed of its own."""

    child: Index
    """Which of n samples this is."""
    seed: Annotated[int, Meta(ge=0, le=limits.MAX_SEED)] | None = None
    """Its `sampling.seed`, in place of that of the message's request."""


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request on its way to a worker: a msgpack map, so that programs without this library can write it."""

    v: Literal[1] = WIRE_VERSION
    """Wire version."""
    client: str
    """Who asks; frames go to this client's subject, so it is a subject token."""
    incarnation: OptionalIncarnation = ""
    """Of the client: which life of its asks. Empty where `reply_to` is given."""
    reply_to: Annotated[str, Meta(max_length=limits.MAX_SUBJECT_CHARS)] | None = None
    """Plain mode, for programs that keep no link: frames go to this subject below `plain.<client>.` instead."""
    attempt: Index = 0
    """How often the request was published before."""
    child: Index = 0
    """Which of n samples this is; `request.sampling.n` is 1 here."""
    target_version: Annotated[int, Meta(ge=0, le=limits.MAX_WEIGHT_VERSION)] | None = None
    """The weights that the model's workers should have had when the request was submitted; `max_weight_lag` counts
    from there. None without that, and in later attempts, which it does not drop."""
    kv: KvTransfer | None = None
    """Of a prefill or a decode leg; None: the request is whole."""
    stream: bool = True
    """False: nobody reads the chunks one by one, so that the worker may gather tokens for a moment."""
    request: msgspec.Raw
    """A `GenerateRequest`, decoded on its own so that a bad field still finds its way back to the client."""
    siblings: Annotated[tuple[Sibling, ...], Meta(max_length=limits.MAX_SIBLINGS)] = ()
    """More samples of the same request and attempt; direct messages to workers with `Capabilities.request_groups`
    only. The worker admits or refuses each by itself, as if it had come alone."""
    may_wait: bool = False
    """What gets no slot at once may wait at the worker for one, after a request of its group (`group_id`, else the same
    `request_id`) that had its turn there; direct messages to workers with `Capabilities.group_backlog` only. The worker
    offers what waits, and may still refuse it as `queue_full` before its first token."""
    placed_for: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """Why the client has placed the request at the worker, which counts those that it knows: `placed_prefix`,
    `placed_group`, `placed_session`, `placed_able`. Empty: not placed, or the client does not say."""

    def __post_init__(self) -> None:
        """Refuse a client that cannot stand in a subject, one that nobody could answer, and unusable siblings."""
        check_subject_token("client", self.client)
        if (self.reply_to is None) != bool(self.incarnation):
            raise ValueError("a request message needs either the client's incarnation or reply_to")
        if self.siblings:
            self._check_siblings()

    def _check_siblings(self) -> None:
        children = [self.child, *(sibling.child for sibling in self.siblings)]
        if len(set(children)) != len(children):
            raise ValueError(f"child and siblings name {len(children)} samples, and one of them twice; allowed: once")
        if self.reply_to is not None:
            raise ValueError("a request message with reply_to has siblings; allowed: none")
        if self.kv is not None and not self.kv.is_prefill:
            # A prefill worker hands the KV of a prompt over once.
            raise ValueError("the message of a decode leg has siblings; allowed: none")


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One message from a worker to one client: what one engine step added to that client's requests."""

    v: Literal[1]
    """Wire version."""
    incarnation: Incarnation
    """Of the worker; numbering starts over with each."""
    number: FrameNumber
    """0-based and contiguous on a link. In a heartbeat, which is a frame without content, that of the next frame."""
    admitted: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Requests that the worker has just taken on: an offer, which the client refuses by an abort. What may wait is
    named again when the engine gets it."""
    chunks: Annotated[list[Chunk], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """In the order of their making, for each request."""
    link: FrameNumber = 0
    """Counts the links that this incarnation has opened: numbering starts over with each."""
    client_incarnation: OptionalIncarnation = ""
    """Of the client that it is for: another life of the same name must not take it. Empty in plain mode."""

    @property
    def is_heartbeat(self) -> bool:
        """It says only how far the link is, so that a lost last frame is noticed."""
        return not self.admitted and not self.chunks


class LinkMessage(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a client tells a worker about its requests there, and how far it has read their link."""

    v: Literal[1]
    """Wire version."""
    abort: Annotated[list[RequestKey], Meta(max_length=limits.MAX_CHUNKS_PER_FRAME)]
    """Requests to stop; unknown ones are ignored."""
    client_incarnation: OptionalIncarnation = ""
    """Who speaks; requests of an earlier life of this client are given up."""
    incarnation: OptionalIncarnation = ""
    """Of the worker whose link the rest is about; empty: only `abort` counts."""
    link: FrameNumber = 0
    """The `Frame.link` that the rest is about."""
    acked: FrameNumber = 0
    """Every frame below this number has arrived."""
    credit: ByteOffset = 0
    """Frames may be sent until their sizes on this link, summed up from its first, reach this offset. Never falls."""
    resend: bool = False
    """Frames from `acked` on are missing, although later ones were announced or arrived: send them again."""


def _enc_hook(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.astype("<i4", copy=False).tobytes()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _enc_hook_json(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _dec_hook(kind: type, value: object) -> object:
    """Turn the `<i4` bytes of token ids, or a plain list of integers, into an array; checked by the struct."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"no decoder for {kind}")
    return decode_token_ids(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_json_encoder = msgspec.json.Encoder(enc_hook=_enc_hook_json)
_request_message_decoder = msgspec.msgpack.Decoder(RequestMessage)
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest, dec_hook=_dec_hook)
_untyped_decoder = msgspec.msgpack.Decoder()
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_link_decoder = msgspec.msgpack.Decoder(LinkMessage)
_presence_decoder = msgspec.json.Decoder(WorkerPresence)
_command_decoder = msgspec.json.Decoder(AnyCommand)
_ack_decoder = msgspec.json.Decoder(Ack)
_desired_decoder = msgspec.json.Decoder(DesiredState)
_client_presence_decoder = msgspec.json.Decoder(ClientPresence)


class _OnlyCommandId(msgspec.Struct):
    id: str


_only_command_id_decoder = msgspec.json.Decoder(_OnlyCommandId)


class _OnlyId(msgspec.Struct):
    request_id: str


class _OnlyPriority(msgspec.Struct):
    priority: int = 0


_only_id_decoder = msgspec.msgpack.Decoder(_OnlyId)
_only_priority_decoder = msgspec.msgpack.Decoder(_OnlyPriority)


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
    except (*MALFORMED, InvalidRequest):
        return None


def priority_of(raw: bytes | msgspec.Raw) -> int:
    """The priority in an encoded `GenerateRequest` that may be wrong elsewhere; 0 when there is no integer."""
    try:
        return _only_priority_decoder.decode(raw).priority
    except MALFORMED:
        return 0


def decode_request_message(data: bytes) -> RequestMessage:
    """Decode the envelope of a request; the request itself is left for `decode_request`."""
    return _decode(_request_message_decoder.decode, data, "request message", "map")


def decode_request(raw: bytes | msgspec.Raw) -> GenerateRequest:
    """Decode and check a request.

    Raises:
        InvalidRequest: a field is wrong, missing or of the wrong type.
        RemoteProtocolError: these bytes are no msgpack map.
    """
    try:
        return _request_decoder.decode(raw)
    except msgspec.ValidationError as exc:
        if isinstance(exc.__cause__, InvalidRequest):
            raise exc.__cause__ from None
        problem = str(exc)
    except MALFORMED as exc:
        raise RemoteProtocolError(f"request: {exc}") from None
    # msgspec's errors know no ranges: build the request from plain values, and its own checks name them.
    try:
        fields = _untyped_decoder.decode(raw)
    except MALFORMED as exc:
        raise RemoteProtocolError(f"request: {exc}") from None
    if not isinstance(fields, dict):
        raise RemoteProtocolError(f"request: {describe(fields)}, not a map")
    build_request(fields)
    raise InvalidRequest(field="request", problem=f"does not decode: {problem}", allowed="a map as in docs/wire.md")


def decode_frame(data: bytes) -> Frame:
    """Decode a frame; nothing in it refers to `data` any more."""
    return _decode(_frame_decoder.decode, data, "frame", "array")


def decode_link_message(data: bytes) -> LinkMessage:
    """Decode a client's message to a worker."""
    return _decode(_link_decoder.decode, data, "link message", "array")


def decode_presence(data: bytes) -> WorkerPresence:
    """Decode a worker's presence from JSON."""
    return _decode(_presence_decoder.decode, data, "presence")


def decode_command(data: bytes) -> AnyCommand:
    """Decode a command from JSON.

    Raises:
        InvalidRequest: a field is wrong, missing or unknown, or there is no such command.
        RemoteProtocolError: these bytes are no JSON.
    """
    try:
        command: AnyCommand = _command_decoder.decode(data)
    except msgspec.ValidationError as exc:
        if isinstance(exc.__cause__, InvalidRequest):
            raise exc.__cause__ from None
        if (version := other_version(data, "json")) is not None:
            raise InvalidRequest(field="v", problem=f"is {version}", allowed=str(WIRE_VERSION)) from None
        raise _wrong_command(str(exc)) from None
    except MALFORMED as exc:
        raise RemoteProtocolError(f"command: {exc}") from None
    if command_id_of(data) is None:
        # Each worker would make up its own, and nobody could tell whose the answers are.
        raise InvalidRequest(field="id", problem="is missing", allowed="an id of your own, new for each command")
    return command


_PLACE = re.compile(r"(?P<problem>.*) - at `\$\.(?P<field>[^`]*)`", re.DOTALL)
_NAMED = re.compile(r"Object (?P<problem>.*) field `(?P<field>[^`]*)`", re.DOTALL)
"""How msgspec says where it has found what."""


def _wrong_command(error: str) -> InvalidRequest:
    """What msgspec says of a command, with the field's name where ours stand too."""
    found = _PLACE.fullmatch(error)
    problem, field = (error, "command") if found is None else (found["problem"], found["field"])
    named = _NAMED.fullmatch(problem)
    if named is not None:
        field = named["field"] if found is None else f"{field}.{named['field']}"
        problem = "is unknown" if "unknown" in named["problem"] else "is missing"
    else:
        problem = f"does not decode: {problem}"
    return InvalidRequest(field=field, problem=problem, allowed="docs/wire.md")


def command_id_of(data: bytes) -> str | None:
    """The id in a command that may be wrong elsewhere; None when there is no valid one."""
    try:
        return check_request_id("id", _only_command_id_decoder.decode(data).id)
    except (*MALFORMED, InvalidRequest):
        return None


def decode_ack(data: bytes) -> Ack:
    """Decode a worker's word on a command from JSON."""
    return _decode(_ack_decoder.decode, data, "ack")


def decode_desired(data: bytes) -> DesiredState:
    """Decode a model's desired state from JSON."""
    return _decode(_desired_decoder.decode, data, "desired state")


def decode_client_presence(data: bytes) -> ClientPresence:
    """Decode a client's presence from JSON."""
    return _decode(_client_presence_decoder.decode, data, "client presence")


_T = TypeVar("_T")


def _decode(decode: Callable[[bytes], _T], data: bytes, what: str, form: Form = "json") -> _T:
    try:
        return decode(data)
    except MALFORMED as exc:
        raise RemoteProtocolError(f"{what}: {why_malformed(exc, data, form)}") from None
