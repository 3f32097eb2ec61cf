"""Messages that attack a decoder: each has one defined outcome."""

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from rollbus.schemas import limits
from rollbus.schemas.chunk import Chunk, ChunkError, End, FinishReason, PromptLogprobs, RoutedExperts, TopLogprobs
from rollbus.schemas.errors import ErrorCode, InvalidRequest, RemoteProtocolError
from rollbus.schemas.manifest import decode_manifest
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestKey,
    command_id_of,
    decode_ack,
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
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.request import GenerateRequest, request_id_of
from tests.support.fleet import capabilities, presence

pack = msgspec.msgpack.encode
PROMPT = b"\x01\x00\x00\x00"
DEEP = 100_000


def request_with(**fields: object) -> bytes:
    """Return an encoded request with one prompt token and these fields, valid or not."""
    return pack({"prompt_token_ids": PROMPT, "request_id": "r", **fields})


def chunk_with(**fields: object) -> list[object]:
    """Return the wire elements of a chunk with these fields replaced."""
    chunk = Chunk(request_id="r", attempt=0, child=0, chunk_index=0, weight_version=0)
    elements = dict(zip(Chunk.__struct_fields__, msgspec.msgpack.decode(pack(chunk)), strict=True))
    return list((elements | fields).values())


def frame_with(chunk: list[object]) -> bytes:
    """Return an encoded frame with one chunk."""
    return pack([1, "i", 0, [], [chunk]])


MSGPACK_NEST = b"\x91" * DEEP + b"\xc0"
JSON_NEST = b"[" * DEEP


@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (decode_request, b"\x81\xa1a" + MSGPACK_NEST),
        (decode_request, b"\x81\xa8sampling\x81\xa5extra\x81\xa1a" + MSGPACK_NEST),
        (decode_request_message, b"\x81\xa7request" + MSGPACK_NEST),
        (decode_frame, b"\x98\x01\xa1i\x00\x90\x90\x00\xa0" + MSGPACK_NEST),
        (decode_link_message, b"\x99\x01\x90\xa0\xa0\x00\x00\x00\xc2" + MSGPACK_NEST),
        (decode_presence, b'{"x":' + JSON_NEST),
        (decode_command, b'{"command":"init_weight_transfer","id":"x","info":{"a":' + JSON_NEST),
        (decode_ack, b'{"state":' + JSON_NEST),
        (decode_desired, b'{"future":' + JSON_NEST),
        (decode_manifest, b'{"x":' + JSON_NEST),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_deep_nesting_is_a_protocol_error(decode: Callable[[bytes], object], data: bytes) -> None:
    """Nesting beyond Python's recursion limit raises a protocol error, in known and unknown fields."""
    with pytest.raises(RemoteProtocolError, match="recursion"):
        decode(data)
    assert request_id_of(b"\x81\xa1a" + MSGPACK_NEST) is None
    assert command_id_of(b'{"x":' + JSON_NEST) is None


def test_invalid_utf8_is_a_protocol_error() -> None:
    """Strings that are not UTF-8 raise a protocol error."""
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        decode_frame(b"\x95\x01\xa1\xff\x00\x90\x90")
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        decode_request_message(b"\x81\xa6client\xa1\xff")
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        decode_request(b"\x81\xaarequest_id\xa1\xff")
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        decode_presence(b'{"worker":"\xff"}')
    assert request_id_of(b"\x81\xaarequest_id\xa1\xff") is None


@pytest.mark.proves("P11")
@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_huge_header_is_refused_before_memory_is_allocated(header: bytes) -> None:
    """A header that announces four billion elements or bytes is rejected before memory is allocated for them."""
    tracemalloc.start()
    try:
        for decode, data in (
            (decode_request, b"\x81\xb0prompt_token_ids" + header),
            (decode_request, b"\x81\xa8sampling\x81\xa5extra\x81\xa1a" + header),
            (decode_request, b"\x81\xa8sampling\x81\xaestop_token_ids" + header),
            (decode_request_message, b"\x81\xa7request" + header),
            (decode_request_message, b"\x81\xa8siblings" + header),
            (decode_frame, b"\x95\x01\xa1i\x00\x90" + header),
            (decode_frame, b"\x95\x01\xa1i\x00" + header),
            (decode_link_message, b"\x92\x01" + header),
        ):
            with pytest.raises(RemoteProtocolError):
                decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


def test_more_chunks_than_a_frame_may_hold_are_refused() -> None:
    """The lists of a frame and of a link message have a maximum length."""
    many = [["r"]] * (limits.MAX_CHUNKS_PER_FRAME + 1)
    with pytest.raises(RemoteProtocolError, match="length <= 65536"):
        decode_frame(pack([1, "i", 0, many, []]))
    with pytest.raises(RemoteProtocolError, match="length <= 65536"):
        decode_link_message(pack([1, many]))


@pytest.mark.parametrize(
    "reply", [{}, {"incarnation": "i", "reply_to": "plain"}, {"incarnation": ""}, {"reply_to": None}]
)
def test_a_request_message_has_either_an_incarnation_or_a_reply_subject(reply: dict[str, object]) -> None:
    """A request message must have exactly one of the client's incarnation and a reply subject."""
    with pytest.raises(RemoteProtocolError, match="either the client's incarnation or reply_to"):
        decode_request_message(pack({"client": "c", "request": {}} | reply))


def message_with(**fields: object) -> bytes:
    """Return an encoded request message, valid except for these fields."""
    return pack({"client": "c", "incarnation": "i", "request": {}} | fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"siblings": [[child] for child in range(1, 257)]}, "length <= 255"),
        ({"child": 3, "siblings": [[1], [3]]}, "child and siblings name 3 samples and repeat one"),
        ({"siblings": [[1], [2], [1, 5]]}, "child and siblings name 4 samples and repeat one"),
        ({"siblings": [[1]], "incarnation": "", "reply_to": "plain"}, "with reply_to has siblings; allowed: none"),
        ({"siblings": [[1]], "kv": {"params": b"kv"}}, "decode phase has siblings; allowed: none"),
        ({"siblings": [[-1]]}, "`int` >= 0"),
        ({"siblings": [[2**31]]}, "<= 2147483647"),
        ({"siblings": [[1, -1]]}, "`int` >= 0"),
        ({"siblings": [[1, 2**63]]}, "<= 9223372036854775807"),
        ({"siblings": [[1, 0.5]]}, "Expected `int | null`"),
        ({"siblings": [[]]}, "length 1"),
        ({"siblings": [1]}, "Expected `array`"),
        ({"siblings": None}, "Expected `array`"),
        ({"siblings": {"1": 2}}, "Expected `array`"),
    ],
)
def test_a_message_with_repeated_invalid_or_too_many_samples_is_refused(fields: dict[str, Any], text: str) -> None:
    """A message with repeated, invalid or too many samples is rejected as a whole."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_request_message(message_with(**fields))

    assert text in str(caught.value)


def test_a_message_holds_all_samples_of_the_largest_request() -> None:
    """One message can contain all 256 samples of a request in their order, also in a prefill phase."""
    children = list(reversed(range(1, limits.MAX_N)))
    legs: list[dict[str, object] | None] = [None, {}]
    for kv in legs:
        message = decode_request_message(message_with(siblings=[[child] for child in children], kv=kv))
        assert [sibling.child for sibling in message.siblings] == children


@pytest.mark.parametrize("client", ["", "a.b", "*", ">", "a b", "ü", "a\n", "c" * 65, 5, None])
def test_a_client_name_that_is_no_subject_token_is_refused(client: object) -> None:
    """A client's name is part of a subject, so names with a dot or a wildcard are rejected.

    They would match subjects of others.
    """
    with pytest.raises(RemoteProtocolError, match="client"):
        decode_request_message(pack({"client": client, "incarnation": "i", "request": {}}))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"request_id": ""}, "length >= 1"),
        ({"request_id": "r" * 129}, "length <= 128"),
        ({"request_id": 5}, "Expected `str`"),
        ({"attempt": -1}, "`int` >= 0"),
        ({"attempt": 2**31}, "<= 2147483647"),
        ({"attempt": True}, "Expected `int`"),
        ({"child": 2**64 - 1}, "<= 2147483647"),
        ({"chunk_index": 1.5}, "Expected `int`"),
        ({"weight_version": -1}, "`int` >= 0"),
        ({"weight_version": 2**31}, "<= 2147483647"),
        ({"token_ids_data": b"abc"}, "token ids of 3 bytes"),
        ({"token_ids_data": [1]}, "Expected `bytes`"),
        ({"token_ids_data": PROMPT, "logprobs_data": b""}, "1 token ids but 0 logprobs"),
        ({"logprobs_data": b"abc"}, "0 token ids but 0.75 logprobs"),
        ({"top_logprobs": [0, b"", b""]}, "`int` >= 1"),
        ({"top_logprobs": [129, b"", b""]}, "<= 128"),
        ({"top_logprobs": [1, PROMPT, b""]}, "top logprobs"),
        ({"top_logprobs": [2, PROMPT, PROMPT]}, "top logprobs"),
        ({"top_logprobs": [1, PROMPT, PROMPT]}, "0 token ids but 1 top logprobs"),
        ({"prompt_logprobs": [0, b""]}, "`int` >= 1"),
        ({"prompt_logprobs": [1, b"abc"]}, "prompt logprobs of 3 bytes"),
        ({"prompt_logprobs": [1, b"", [1, PROMPT, PROMPT]]}, "0 prompt logprobs"),
        ({"routed_experts": [0, [1, 1, 1], "i4", b"abcd"]}, "'i4'"),
        ({"routed_experts": [0, [1, 1, 1], "u1", b""]}, "take 1 bytes, not 0"),
        ({"routed_experts": [0, [1, 1, 1], "<u2", b"a"]}, "take 2 bytes, not 1"),
        ({"routed_experts": [-1, [1, 1, 1], "u1", b"a"]}, "`int` >= 0"),
        ({"routed_experts": [0, [-1, -1, 1], "u1", b"a"]}, "`int` >= 0"),
        ({"routed_experts": [0, [0, 0, 0], "u1", b""]}, "allowed: 1 to 1024"),
        ({"routed_experts": [0, [0, 1025, 1], "u1", b""]}, "allowed: 1 to 1024"),
        ({"routed_experts": [0, [0, 1, 257], "u1", b""]}, "1 to 256"),
        ({"routed_experts": [0, [2**32, 2**32, 1], "u1", b""]}, "<= 8388608"),
        ({"routed_experts": [limits.MAX_POSITION, [1, 1, 1], "u1", b"a"]}, "allowed: 8388608"),
        ({"end": ["nonsense", 0, 0]}, "nonsense"),
        ({"end": ["stop", -1, 0]}, "`int` >= 0"),
        ({"end": ["stop", 0, 2**53]}, "<= 8388608"),
        ({"end": ["stop", 0, 0, 2**31]}, "<= 2147483647"),
        ({"end": ["stop", 0, 0, None, ["timeout", ""]]}, "finish reason stop with an error"),
        ({"end": ["error", 0, 0]}, "finish reason error without an error"),
        ({"end": ["error", 0, 0, None, ["timeout", "x" * 4097]]}, "length <= 4096"),
    ],
)
def test_chunks_that_contradict_themselves_are_refused(fields: dict[str, Any], text: str) -> None:
    """A receiver validates each bound of a chunk, and each pair of lengths that must be equal."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_frame(frame_with(chunk_with(**fields)))

    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("worker", "a.b"), ("worker", ""), ("model", ""), ("model", "a\x00")),
        *(("lease_s", 0), ("free_slots", -1), ("vocab_size", 2**31 + 1)),
    ],
)
def test_a_presence_with_invalid_names_or_numbers_is_refused(field: str, value: object) -> None:
    """A worker's names and numbers are validated before any message is sent to it."""
    fields = msgspec.to_builtins(presence(capabilities=capabilities()))
    (fields["capabilities"] if field == "vocab_size" else fields)[field] = value
    with pytest.raises(RemoteProtocolError, match="presence"):
        decode_presence(msgspec.json.encode(fields))


@pytest.mark.proves("P90")
def test_codes_and_states_of_newer_peers_are_read_as_unknown() -> None:
    """An unknown error code or worker state of a newer peer becomes `unknown`.

    Neither the frame nor the worker is lost.
    """
    frame = decode_frame(frame_with(chunk_with(end=["error", 0, 0, None, ["brand_new", "text"]])))
    error = frame.chunks[0].error
    assert (error.code, error.message) == (ErrorCode.UNKNOWN, "text")
    assert WorkerState("on_holiday") is WorkerState.UNKNOWN


def test_a_wrong_type_in_msgpack_has_the_error_message_of_construction() -> None:
    """A wrong type in msgpack has the same error message as on construction, not msgspec's message."""
    with pytest.raises(InvalidRequest) as caught:
        decode_request(request_with(sampling={"max_tokens": "5"}))
    assert caught.value.message == ("sampling.max_tokens is '5', not an integer; allowed: an integer from 1 to 4194304")
    with pytest.raises(InvalidRequest, match="sampling is a list of length 0; allowed: SamplingParams, or a map"):
        decode_request(request_with(sampling=[]))
    with pytest.raises(InvalidRequest, match="prompt_token_ids is missing"):
        decode_request(pack({"request_id": "r"}))
    with pytest.raises(InvalidRequest, match="prompt_token_ids has 3 bytes; allowed: <i4"):
        decode_request(request_with(prompt_token_ids=b"abc"))
    with pytest.raises(InvalidRequest, match=r"request does not decode: .*allowed: a map"):
        decode_request(pack({"prompt_token_ids": PROMPT, 5: 6}))


@pytest.mark.parametrize("value", [5, None, "text", [1, 2], b"raw", True, 1.5])
def test_a_request_that_is_no_map_is_a_protocol_error(value: object) -> None:
    """Bytes that are no map raise a protocol error, because they have no field that a caller could correct."""
    with pytest.raises(RemoteProtocolError, match="request"):
        decode_request(pack(value))
    assert request_id_of(pack(value)) is None


def test_decoded_messages_do_not_keep_the_payload_alive() -> None:
    """A decoded chunk keeps only its own bytes in memory, because a frame contains chunks of many requests."""
    rows = np.arange(60, dtype="u1").reshape(10, 2, 3)
    chunk = Chunk(
        request_id="r", attempt=0, child=0, chunk_index=0, weight_version=0,
        routed_experts=RoutedExperts.from_rows(rows, 0),
    )  # fmt: skip
    payload = bytearray(encode(Frame(1, "i", 0, [], [chunk])))
    routed = decode_frame(bytes(payload)).chunks[0].routed_experts

    assert type(routed.data) is bytes
    np.testing.assert_array_equal(routed.numpy(), rows)

    message = memoryview(request_with(prompt_token_ids=np.arange(5, dtype="<i4").tobytes()))
    request = decode_request(bytes(message))
    prompt = np.asarray(request.prompt_token_ids)
    # Its bytes are a copy that holds nothing else.
    assert prompt.base is None or len(prompt.base) == prompt.nbytes


def test_the_sender_truncates_and_cleans_an_error_text() -> None:
    """The sender truncates and cleans an error text, so that no text can make a frame undecodable."""
    error = ChunkError(ErrorCode.ENGINE_ERROR, "\udcff" + "é" * 5000, allowed="x" * 5000)
    chunk = Chunk(
        request_id="r", attempt=0, child=0, chunk_index=0, weight_version=0,
        end=End(FinishReason.ERROR, 0, 0, error=error),
    )  # fmt: skip
    (again,) = decode_frame(encode(Frame(1, "i", 0, [], [chunk]))).chunks

    assert again.error == error
    assert error.message == "?" + "é" * 4095
    assert len(error.allowed) == limits.MAX_ERROR_CHARS


def test_senders_refuse_contradictions_too() -> None:
    """The checks of related fields also run when a sender creates a chunk."""
    with pytest.raises(ValueError, match="take 4 bytes, not 3"):
        RoutedExperts(0, (1, 2, 2), "u1", b"abc")
    with pytest.raises(ValueError, match="top logprobs"):
        TopLogprobs(2, PROMPT, PROMPT)
    with pytest.raises(ValueError, match="prompt logprobs of 3 bytes"):
        PromptLogprobs(1, b"abc")
    with pytest.raises(ValueError, match="without an error"):
        End(FinishReason.ERROR, 0, 0)
    for rows in (np.zeros((1, 1, 1), ">u2"), np.zeros((1, 1, 1), "i2"), np.zeros((2, 2, 2), "u1")[:, :, ::2]):
        with pytest.raises(ValueError, match="allowed: u1 or <u2, C-contiguous"):
            RoutedExperts.from_rows(rows, 0)


def test_the_encoder_rejects_objects_of_unknown_types() -> None:
    """The encoder rejects objects of unknown types."""
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode(LinkMessage(1, [object()]))  # type: ignore[list-item]
    with pytest.raises(TypeError, match="a object cannot be sent"):
        encode_json(object())
    assert struct.unpack(
        "<i", msgspec.msgpack.decode(encode(GenerateRequest(prompt_token_ids=[7])))["prompt_token_ids"]
    ) == (7,)


GOOD = ["r", 1, 0, 4, 0, b"\1\0\0\0"]
BAD = ["s", 0, 2, 4, 0, b"abc"]


def frame(admitted: object, chunks: object) -> bytes:
    """Return frame 7 of link 3, encoded without validation."""
    return msgspec.msgpack.encode([1, "w", 7, admitted, chunks, 3, "c"])


def test_the_header_of_a_frame_with_a_wrong_chunk_lists_all_requests() -> None:
    """The header has all requests of the frame, and those whose chunks do not decode."""
    header = decode_frame_header(frame([["t"]], [GOOD, BAD]))

    assert (header.incarnation, header.number, header.link, header.client_incarnation) == ("w", 7, 3, "c")
    assert header.keys == {RequestKey("r", 1, 0), RequestKey("s", 0, 2), RequestKey("t")}
    assert header.bad_keys == {RequestKey("s", 0, 2)}


@pytest.mark.parametrize("content", [([5], [BAD]), ([], "no list"), ([], [BAD, ["r"]]), ([], [GOOD, 5])])
def test_the_header_of_a_frame_with_an_unreadable_request_lists_no_requests(content: tuple[object, object]) -> None:
    """If a request of the frame is unreadable, the header has no requests. The readable part may be incomplete."""
    header = decode_frame_header(frame(*content))

    assert (header.number, header.keys, header.bad_keys) == (7, frozenset(), frozenset())


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"+ACK", frame([], [BAD])[:-5], msgspec.msgpack.encode([2, "w", 7, [], []])]
)
def test_truncated_and_other_messages_have_no_header(data: bytes) -> None:
    """A truncated frame, a frame of another wire version and an answer of JetStream have no header."""
    assert decode_frame_header(data) is None
