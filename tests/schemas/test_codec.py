"""Codecs restore encoded messages, and decoders raise only documented errors for any bytes."""

import json
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.schemas import limits
from rollbus.schemas.chunk import (
    Chunk,
    ChunkError,
    End,
    FinishReason,
    PromptLogprobs,
    RoutedExperts,
    TopLogprobs,
    json_logprobs,
)
from rollbus.schemas.errors import ErrorCode, LocalProtocolError
from rollbus.schemas.limits import MAX_COUNT
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestKey,
    decode_ack,
    decode_client_presence,
    decode_command,
    decode_desired,
    decode_frame,
    decode_link_message,
    decode_presence,
    decode_request,
    decode_request_message,
    decode_service_message,
    encode,
    encode_json,
)
from rollbus.schemas.presence import WorkerCounters
from rollbus.schemas.request import GenerateRequest, request_id_of
from rollbus.schemas.request_fields import request_from_json
from rollbus.schemas.rows import DTYPES, RowDtype, dtype_for, expected_rows, rows_as_wire
from rollbus.schemas.weights import PublishedVersion
from tests.schemas import strategies as wire
from tests.support.scenarios import little_endian

pytestmark = pytest.mark.slow

Decode = Callable[[bytes], object]

MESSAGES: dict[str, tuple[Decode, Callable[[Any], bytes], st.SearchStrategy[Any]]] = {
    "frame": (decode_frame, encode, wire.frames),
    "link_message": (decode_link_message, encode, wire.link_messages),
    "presence": (decode_presence, encode_json, wire.presences),
    "client_presence": (decode_client_presence, encode_json, wire.client_presences),
    "service_message": (decode_service_message, encode_json, wire.service_messages),
    "command": (decode_command, encode_json, wire.commands),
    "ack": (decode_ack, encode_json, wire.acks),
    "desired_state": (decode_desired, encode_json, wire.desired_states),
}


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
# The values of the other fields do not matter.
@settings(max_examples=5)
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


# Chunks as a reader uses them: numpy views, the terminal chunk, and log probabilities for JSON.


def test_arrays_are_read_only_views_of_the_bytes() -> None:
    """Each array property is a read-only view of the little-endian bytes with their shape."""
    top = TopLogprobs(2, little_endian(np.arange(4), "<i4"), little_endian(-np.arange(4.0), "<f4"))
    chunk = Chunk(
        request_id="r", attempt=0, child=0, chunk_index=0, weight_version=3,
        token_ids_data=b"\x01\x00\x00\x00\x00\x01\x00\x00",
        logprobs_data=b"\x00\x00\x80\xbf\x00\x00\x80\xff",
        top_logprobs=top,
        prompt_logprobs=PromptLogprobs(1, little_endian(np.array([-1.0, -2.0]), "<f4"), top),
        routed_experts=RoutedExperts(7, (1, 2, 2), "<u2", b"\x01\x00\x00\x01\x02\x00\x03\x00"),
    )  # fmt: skip

    assert chunk.num_tokens == 2
    assert chunk.token_ids.tolist() == [1, 256]
    assert chunk.logprobs.tolist() == [-1.0, -math.inf]
    assert top.token_ids.tolist() == [[0, 1], [2, 3]]
    assert top.logprobs.tolist() == [[0, -1], [-2, -3]]
    assert chunk.prompt_logprobs.logprobs.tolist() == [-1, -2]
    assert chunk.routed_experts.numpy().tolist() == [[[1, 256], [2, 3]]]
    for array in (chunk.token_ids, chunk.logprobs, top.token_ids, top.logprobs, chunk.routed_experts.numpy()):
        assert not array.flags.writeable


def test_rows_are_encoded_without_a_copy() -> None:
    """A worker's `RoutedExperts` share the engine's memory and are encoded without a copy."""
    rows = np.arange(12, dtype="<u2").reshape(2, 3, 2)
    wrapped = RoutedExperts.from_rows(rows, 5)

    assert np.shares_memory(wrapped.numpy(), rows)
    assert not wrapped.numpy().flags.writeable
    assert rows.flags.writeable
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(wrapped)) == [5, [2, 3, 2], "<u2", rows.tobytes()]


def test_an_array_of_zero_rows_has_the_shape_of_layers_and_top_k() -> None:
    """An array of zero rows has the shape of layers and top-k."""
    assert RoutedExperts.from_rows(np.empty((0, 3, 2), "u1"), 5).numpy().shape == (0, 3, 2)


def test_reason_and_error_of_a_terminal_chunk_are_those_of_its_end() -> None:
    """Reason and error of a chunk are those of its `end`. A chunk without an `end` is not terminal."""
    error = ChunkError(ErrorCode.TIMEOUT, "late")
    head = {"request_id": "r", "attempt": 0, "child": 0, "chunk_index": 0, "weight_version": 0}
    plain = msgspec.convert(head, dict)
    open_chunk = Chunk(**plain)
    last = Chunk(**plain, end=End(FinishReason.STOP, 0, 0))
    failed = Chunk(**plain, end=End(FinishReason.ERROR, 0, 0, error=error))

    assert (open_chunk.is_terminal, open_chunk.finish_reason, open_chunk.error) == (False, None, None)
    assert (last.is_terminal, last.finish_reason, last.error) == (True, FinishReason.STOP, None)
    assert (failed.is_terminal, failed.finish_reason, failed.error) == (True, FinishReason.ERROR, error)


def test_minus_infinity_becomes_a_finite_logprob_in_json() -> None:
    """In JSON, -inf becomes -9999.0, and every other value stays its float32 value."""
    logprobs = np.array([-0.5, -np.inf, 0.0, -1e-30], "f4")

    assert json_logprobs(logprobs) == [-0.5, -9999.0, 0.0, float(np.float32(-1e-30))]
    assert json.loads(json.dumps(json_logprobs(logprobs), allow_nan=False)) == json_logprobs(logprobs)
    assert json_logprobs(np.empty(0, "f4")) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_plus_infinity_as_logprobs_raise_an_error_in_json(value: float) -> None:
    """NaN and +inf raise an error, because they are a fault of the engine that no number may hide."""
    with pytest.raises(LocalProtocolError, match=r"NaN or \+inf"):
        json_logprobs(np.array([-1.0, value], "f4"))


# The row rule, and the dtype of expert ids on the wire.


@pytest.mark.proves("P14")
@pytest.mark.parametrize(("num_experts", "dtype"), [(1, "u1"), (256, "u1"), (257, "<u2"), (limits.MAX_EXPERTS, "<u2")])
def test_the_dtype_follows_the_number_of_experts(num_experts: int, dtype: str) -> None:
    """The dtype is u1 for up to 256 experts and <u2 above. It does not depend on the ids in a sample."""
    assert dtype_for(num_experts) == dtype
    assert num_experts - 1 <= np.iinfo(DTYPES[dtype]).max


@pytest.mark.parametrize("num_experts", [-1, 0, limits.MAX_EXPERTS + 1])
def test_impossible_numbers_of_experts_are_refused(num_experts: int) -> None:
    """A model has at least one expert, and at most as many as <u2 can number."""
    with pytest.raises(ValueError, match=f"num_experts is {num_experts}; allowed: 1 to 65536"):
        dtype_for(num_experts)


@pytest.mark.proves("P14")
@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 50))
def test_a_sequence_has_a_row_for_every_position_but_the_last(prompt_len: int, start: int, num_tokens: int) -> None:
    """The rule equals a simple count of the positions from start up to the last generated token, without that token."""
    start = min(start, prompt_len)
    positions = [position for position in range(prompt_len + num_tokens) if position >= start]

    assert expected_rows(prompt_len, start, num_tokens) == len(positions[:-1])


@pytest.mark.parametrize(("prompt_len", "start"), [(5, 0), (5, 5), (1, 0)])
def test_a_request_without_a_token_has_no_rows(prompt_len: int, start: int) -> None:
    """A request without a token, for example after an abort, has no rows."""
    assert expected_rows(prompt_len, start, 0) == 0


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
@pytest.mark.parametrize("given_dtype", ["u1", "i2", "<u2", ">u2", "i4", "i8"])
def test_rows_of_any_type_and_order_keep_their_ids(dtype: RowDtype, given_dtype: str) -> None:
    """Rows of any integer type, byte order and memory order keep their ids.

    They become C-contiguous rows of the model's dtype.
    """
    ids = np.arange(2 * 3 * 4).reshape(4, 3, 2).astype(given_dtype).transpose(2, 1, 0)
    rows = rows_as_wire(ids, dtype)

    assert rows.dtype == DTYPES[dtype]
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows, ids)


@pytest.mark.parametrize(
    ("rows", "dtype", "text"),
    [
        (np.full((1, 1, 1), 256), "u1", "expert ids 256 to 256 do not fit u1"),
        (np.full((1, 1, 1), -1), "u1", "expert ids -1 to -1 do not fit u1"),
        (np.full((1, 1, 1), 65_536), "<u2", "do not fit <u2"),
        (np.zeros((1, 1), "u1"), "u1", r"uint8 of shape \(1, 1\), not integers in three dimensions"),
        (np.zeros((1, 1, 1)), "u1", r"float64 of shape \(1, 1, 1\), not integers"),
        (np.zeros((1, 1, 1), bool), "u1", "bool of shape"),
    ],
)
def test_rows_are_never_narrowed_silently(rows: Any, dtype: RowDtype, text: str) -> None:
    """An id that does not fit the dtype is an error and never becomes another expert's id."""
    with pytest.raises(ValueError, match=text):
        rows_as_wire(rows, dtype)


@pytest.mark.parametrize("given_dtype", ["u1", "i4"])
def test_zero_rows_keep_the_shape_of_layers_and_top_k(given_dtype: str) -> None:
    """Zero rows keep the shape of layers and top-k."""
    assert rows_as_wire(np.zeros((0, 3, 2), given_dtype), "<u2").shape == (0, 3, 2)


# Presence with numbers that no table and no metric can hold is rejected.


@pytest.mark.parametrize(
    ("kind", "field"),
    [(WorkerCounters, "requests"), (PublishedVersion, "used_bytes"), (PublishedVersion, "chain_length")],
)
def test_a_count_too_large_for_a_float_is_refused(kind: type[msgspec.Struct], field: str) -> None:
    """A count too large for a float is rejected.

    JSON integers are unbounded, and one worker could break `/metrics` for all.
    """
    largest = msgspec.json.decode(f'{{"version": 1, "{field}": {MAX_COUNT}}}', type=kind)
    assert float(getattr(largest, field)) > 0
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(f'{{"version": 1, "{field}": 1{"0" * 400}}}', type=kind)
