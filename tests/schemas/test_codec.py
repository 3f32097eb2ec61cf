"""Codecs restore encoded messages, and decoders raise only documented errors for any bytes."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.schemas.chunk import Chunk, ChunkError, End, PromptLogprobs, RoutedExperts, TopLogprobs
from rollbus.schemas.errors import InvalidRequest, RemoteProtocolError
from rollbus.schemas.manifest import decode_manifest
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestKey,
    command_id_of,
    decode_ack,
    decode_client_presence,
    decode_command,
    decode_desired,
    decode_frame,
    decode_frame_header,
    decode_link_message,
    decode_presence,
    decode_request,
    decode_request_message,
    encode,
    encode_json,
)
from rollbus.schemas.request import GenerateRequest, request_id_of
from rollbus.schemas.request_fields import request_from_json
from tests.schemas import control_strategies as control
from tests.schemas import strategies as wire
from tests.schemas.test_manifest import manifest

pytestmark = pytest.mark.slow

Decode = Callable[[bytes], object]

MESSAGES: dict[str, tuple[Decode, Callable[[Any], bytes], st.SearchStrategy[Any]]] = {
    "frame": (decode_frame, encode, wire.frames),
    "link_message": (decode_link_message, encode, wire.link_messages),
    "presence": (decode_presence, encode_json, wire.presences),
    "client_presence": (decode_client_presence, encode_json, wire.client_presences),
    "command": (decode_command, encode_json, control.commands),
    "ack": (decode_ack, encode_json, control.acks),
    "desired_state": (decode_desired, encode_json, control.desired_states),
}
DECODERS: dict[str, tuple[Decode, st.SearchStrategy[bytes]]] = {
    **{name: (decode, values.map(encoder)) for name, (decode, encoder, values) in MESSAGES.items()},
    "request": (decode_request, wire.requests().map(encode)),
    "request_message": (decode_request_message, wire.request_messages().map(encode)),
    "request_id": (request_id_of, wire.requests().map(encode)),
    "frame_header": (decode_frame_header, wire.frames.map(encode)),
    "command_id": (command_id_of, control.commands.map(encode_json)),
    "manifest": (decode_manifest, st.just(msgspec.json.encode(manifest()))),
}
AS_JSON = ("presence", "client_presence", "command", "command_id", "ack", "desired_state", "manifest")
every_decoder = pytest.mark.parametrize("name", DECODERS)


def check_survives(decode: Decode, data: bytes) -> None:
    """Decode hostile bytes, and assert that only documented errors are raised."""
    try:
        decode(data)
    except (RemoteProtocolError, InvalidRequest) as exc:
        assert str(exc)


@given(wire.request_messages())
def test_request_message_round_trip(message: Any) -> None:
    """A request message and its request decode to the encoded values."""
    again = decode_request_message(encode(message))

    assert (again.v, again.client, again.attempt, again.child) == (1, message.client, message.attempt, message.child)
    assert (again.incarnation, again.reply_to) == (message.incarnation, message.reply_to)
    assert bytes(again.request) == bytes(message.request)
    assert encode(again) == encode(message)


@given(wire.requests())
def test_request_round_trip(request: GenerateRequest) -> None:
    """A request decodes to equal fields and its own read-only i4 prompt, also from JSON."""
    again = decode_request(encode(request))

    assert wire.plain(again) == wire.plain(request)
    prompt = np.asarray(again.prompt_token_ids)
    assert prompt.dtype == np.dtype("<i4")
    assert not prompt.flags.writeable
    assert wire.plain(request_from_json(msgspec.json.decode(encode_json(request)))) == wire.plain(request)
    assert request_id_of(encode(request)) == request.request_id


@pytest.mark.parametrize("name", MESSAGES)
@given(data=st.data())
def test_a_message_decodes_to_itself(name: str, data: st.DataObject) -> None:
    """A message decodes to the same type and fields, and encodes to the same bytes again."""
    decode, encoder, values = MESSAGES[name]
    message = data.draw(values)
    again = decode(encoder(message))

    assert again == message
    assert type(again) is type(message)
    assert encoder(again) == encoder(message)


@every_decoder
@given(data=st.data())
def test_every_truncated_message_decodes_or_raises_a_protocol_error(name: str, data: st.DataObject) -> None:
    """Each proper prefix of a message raises a protocol error, or decodes if the missing fields have defaults."""
    decode, encoded = DECODERS[name]
    whole = data.draw(encoded)
    for end in range(len(whole)):
        check_survives(decode, whole[:end])


msgpack_values = st.recursive(
    wire.json_values
    | st.binary(max_size=8)
    | st.floats()
    | st.datetimes(min_value=datetime(1970, 1, 2), timezones=st.timezones()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner),
    max_leaves=8,
)


@every_decoder
@given(data=st.data())
def test_any_value_in_any_field_raises_only_documented_errors(name: str, data: st.DataObject) -> None:
    """A well-formed message with any value in any field raises only documented errors."""
    decode, encoded = DECODERS[name]
    codec: Any = msgspec.json if name in AS_JSON else msgspec.msgpack
    message = codec.decode(data.draw(encoded))
    values = message if isinstance(message, dict) else dict(enumerate(message))
    for key in data.draw(st.lists(st.sampled_from(sorted(values)), max_size=3)):
        values[key] = data.draw(msgpack_values)
    changed = values if isinstance(message, dict) else list(values.values())
    check_survives(decode, codec.encode(changed))


STRUCTS: dict[type[msgspec.Struct], st.SearchStrategy[Any]] = {
    Chunk: wire.chunks(),
    ChunkError: wire.chunk_errors,
    End: wire.ends(),
    Frame: wire.frames,
    LinkMessage: wire.link_messages,
    PromptLogprobs: wire.prompt_logprobs(),
    RequestKey: wire.keys,
    RoutedExperts: wire.routed_experts(),
    TopLogprobs: wire.top_logprobs(3),
}


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_an_older_shorter_array_decodes_with_defaults(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    """An array that ends after the required fields decodes with defaults, and a shorter array does not decode."""
    value = data.draw(STRUCTS[kind])
    elements = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]
    if kind is End:
        elements[0] = "stop"
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(elements[: len(required)]), type=kind)

    for field in msgspec.structs.fields(kind)[len(required) :]:
        assert getattr(older, field.name) == field.default
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(elements[: len(required) - 1]), type=kind)
