"""The encoded bytes equal the checked-in golden files, and these decode to the same messages as before."""

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.acks import Ack
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import AnyCommand, DesiredState
from rollbus.schemas.messages import (
    Frame,
    LinkMessage,
    RequestMessage,
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
)
from rollbus.schemas.presence import ClientPresence, WorkerPresence
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.rows import expected_rows
from rollbus.schemas.telemetry import ServiceMessage
from tests.golden.generate import ROOT, captured_runs, generate
from tests.golden.vectors import FULL_REQUEST, VECTORS, Message
from tests.schemas.strategies import plain


def files(root: Path) -> dict[str, bytes]:
    """Return all golden files below `root` by name, without captured runs and files of earlier releases."""
    paths = (path for path in root.rglob("*") if path.is_file() and path.parent.name != "earlier")
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in paths
        if not (path.parent.name == "captured" and path.suffix == ".msgpack")
    }


@pytest.mark.proves("P31")
def test_encoding_gives_the_checked_in_bytes(tmp_path: Path) -> None:
    """Each golden message encodes to the bytes that other programs know.

    `python -m tests.golden.generate` writes them.
    """
    generate(tmp_path)

    assert files(tmp_path) == files(ROOT)


@pytest.mark.parametrize("name", VECTORS)
def test_the_checked_in_bytes_decode_to_their_messages(name: str) -> None:
    """Each golden file decodes to the message from which it was made."""
    check_decodes_to(golden_bytes(name), VECTORS[name])


def golden_bytes(name: str) -> bytes:
    """Return the content of the golden file with this name."""
    [path] = (path for suffix in ("msgpack", "json") if (path := ROOT / f"{name}.{suffix}").exists())
    return path.read_bytes()


@pytest.mark.proves("P31")
@pytest.mark.parametrize("path", sorted((ROOT / "earlier").iterdir()), ids=lambda path: path.name)
def test_bytes_of_earlier_releases_decode_to_the_same_message(path: Path) -> None:
    """Bytes from before a field was appended decode to the same message, with the field's default."""
    check_decodes_to(path.read_bytes(), VECTORS[path.name.partition(".")[0]])


def check_decodes_to(data: bytes, expected: Message) -> None:
    """Assert that these bytes decode to `expected`."""
    match expected:
        case Frame():
            assert decode_frame(data) == expected
        case LinkMessage():
            assert decode_link_message(data) == expected
        case RequestMessage():
            message = decode_request_message(data)
            assert envelope(message) == envelope(expected)
            # The same request, though not always the same bytes: a map of 16 known fields has a longer header.
            assert plain(decode_request(message.request)) == plain(decode_request(expected.request))
        case ClientPresence():
            assert decode_client_presence(data) == expected
        case ServiceMessage():
            assert decode_service_message(data) == expected
        case WorkerPresence():
            assert decode_presence(data) == expected
        case Ack():
            assert decode_ack(data) == expected
        case DesiredState():
            assert decode_desired(data) == expected
        case _:
            assert decode_command(data) == expected


def envelope(message: RequestMessage) -> tuple[object, ...]:
    """Return the fields of a request message except the request."""
    fields = message.__struct_fields__
    return tuple(getattr(message, name) for name in fields if name != "request")


def test_golden_requests_decode_to_their_fields() -> None:
    """A full request keeps every field, and a prompt may also be a list of integers."""
    requests = {
        name: decode_request(decode_request_message((ROOT / f"{name}.msgpack").read_bytes()).request)
        for name in VECTORS
        if name.startswith("request_")
    }

    assert plain(requests["request_full"]) == plain(FULL_REQUEST)
    assert plain(requests["request_prompt_as_list"]) == plain(requests["request_minimal"])
    assert plain(requests["request_plain"]) == plain(requests["request_minimal"])
    assert plain(requests["request_minimal"]) == plain(GenerateRequest(prompt_token_ids=[1, 2, 3], request_id="r"))


def test_the_golden_full_request_leaves_no_field_at_its_default() -> None:
    """The golden vectors contain each field of a request and its sampling with a value other than its default."""
    values: list[msgspec.Struct] = [FULL_REQUEST, FULL_REQUEST.sampling]
    # `n` has its default: a client sends n child requests instead of one request for n samples.
    optional = [(value, field) for value in values for field in msgspec.structs.fields(value) if not field.required]
    left = [field.name for value, field in optional if getattr(value, field.name) == field.default]

    # The bytes of this golden message stay; others have the fields that were appended later.
    # `id_scope` is never sent.
    assert left == ["return_sampling_mask", "group_id", "tracestate", "id_scope", "n"]
    assert decode_request(decode_request_message(golden_bytes("request_sampling_mask")).request).return_sampling_mask
    assert decode_request(decode_request_message(golden_bytes("request_siblings")).request).group_id == "group 1"


def test_captured_runs_of_a_real_engine_keep_the_contract() -> None:
    """Frames of a real engine decode, are complete, encode to equal frames, and follow the row rule."""
    runs = captured_runs()
    assert runs
    for run in runs.values():
        message, frames = run.decoded()
        request = decode_request(message.request)
        chunks = [chunk for frame in frames for chunk in frame.chunks]

        assert [decode_frame(encode(frame)) for frame in frames] == frames
        check_complete(request, chunks)


def check_complete(request: GenerateRequest, chunks: list[Chunk]) -> None:
    """Assert that a stream is complete, that the experts of a row differ, and that no logprob is above 0."""
    stream = ResponseStream(request, child=0, attempt=0, keep=True)
    for chunk in chunks:
        stream.add(chunk)
    assert stream.end.error is None
    arrays = stream.arrays()
    rows = arrays["routed_experts"]
    assert len(rows) == expected_rows(request.prompt_len, stream.start, len(arrays["token_ids"]))
    assert all(len(set(row)) == len(row) for row in rows.reshape(-1, rows.shape[2]).tolist())
    assert np.all(arrays["logprobs"] <= 0)


def test_there_is_a_golden_command_of_every_kind() -> None:
    """The golden vectors contain each kind of command."""
    kinds = {type(message) for message in VECTORS.values()}

    assert set(get_args(AnyCommand)) <= kinds
