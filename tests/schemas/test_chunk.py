"""Chunks as a reader uses them: numpy views, the terminal chunk, and log probabilities for JSON."""

import json
import math

import msgspec
import numpy as np
import pytest

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
from tests.support.arrays import little_endian


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
