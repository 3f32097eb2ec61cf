"""Chunking and assembly are inverse, whatever the steps, the split and the sizes; and no fault passes for a result."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.protocol.assembly import Assembly
from bus.protocol.chunking import ChunkWriter, chunk_bytes
from bus.protocol.step import RequestStep
from bus.protocol.stream import Stream
from schemas.chunk import Chunk, ChunkError, FinishReason, PromptLogprobs, TopLogprobs
from schemas.errors import ErrorCode, LocalProtocolError, RemoteProtocolError
from schemas.messages import WIRE_VERSION, Frame, RequestKey, encode
from schemas.presence import RoutedExpertsInfo
from schemas.request import GenerateRequest
from schemas.rows import DTYPES, dtype_for
from schemas.sampling import SamplingParams


@dataclass(frozen=True)
class Scenario:
    """A request, its model's routing, and the steps of an engine that serves it."""

    request: GenerateRequest
    routing: RoutedExpertsInfo | None
    steps: list[RequestStep]
    tokens: np.ndarray
    logprobs: np.ndarray
    rows: np.ndarray | None


def steps_of(
    cuts: list[int], tokens: np.ndarray, logprobs: np.ndarray, rows: np.ndarray | None, start: int
) -> Iterator[RequestStep]:
    """Cut an answer into steps as an engine does: each brings the rows of what it computed."""
    prompt_rows = 0 if rows is None else len(rows) - (len(tokens) - 1)
    begin = 0
    for index, end in enumerate(cuts):
        first_row = 0 if index == 0 else prompt_rows + begin - 1
        last_row = prompt_rows + end - 1
        yield RequestStep(
            key="k",
            token_ids=tokens[begin:end],
            logprobs=logprobs[begin:end],
            routed_experts=None if rows is None else rows[first_row:last_row],
            routed_experts_start=start + first_row,
            cached_tokens=3 if index == 0 else None,
            finish_reason=FinishReason.LENGTH if end == len(tokens) else None,
        )
        begin = end


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any prompt, start, answer, routing and split into steps."""
    prompt_len = draw(st.integers(1, 30))
    start = draw(st.integers(0, prompt_len))
    num_tokens = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_experts = draw(st.sampled_from([0, 1, 16, 256, 257, 60_000]))
    routing, rows = None, None
    if num_experts:
        layers, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
        dtype = dtype_for(num_experts)
        routing = RoutedExpertsInfo(num_layers=layers, top_k=top_k, num_experts=num_experts, dtype=dtype)
        shape = (prompt_len - start + num_tokens - 1, layers, top_k)
        rows = rng.integers(0, num_experts, shape).astype(DTYPES[dtype])
    tokens = rng.integers(0, 1000, num_tokens).astype(np.int32)
    logprobs = -rng.random(num_tokens).astype(np.float32)
    cuts = sorted(draw(st.sets(st.integers(1, num_tokens), max_size=num_tokens)) | {num_tokens})
    request = GenerateRequest(
        prompt_token_ids=[1] * prompt_len,
        routed_experts_prompt_start=start,
        return_routed_experts=True if num_experts else None,
    )
    return Scenario(request, routing, list(steps_of(cuts, tokens, logprobs, rows, start)), tokens, logprobs, rows)


def writer_for(scenario: Scenario, part_bytes: int = 2**20) -> ChunkWriter:
    """A writer as a worker makes it."""
    return ChunkWriter(
        RequestKey("r", 0, 0),
        prompt_len=scenario.request.prompt_len,
        routing=scenario.routing,
        start=scenario.request.routed_experts_prompt_start,
        part_bytes=part_bytes,
    )


def stream_of(scenario: Scenario) -> Stream:
    """A stream as a client makes it for `complete`."""
    return Stream(scenario.request, child=0, attempt=0, keep=True)


def chunks_of(scenario: Scenario, part_bytes: int = 2**20) -> list[Chunk]:
    """All chunks of a scenario."""
    writer = writer_for(scenario, part_bytes)
    return [chunk for step in scenario.steps for chunk in writer.write(step, 7)]


@given(scenarios(), st.integers(1, 200))
def test_what_is_assembled_is_what_the_engine_made(scenario: Scenario, part_bytes: int) -> None:
    """Any split into steps and parts gives back the tokens, logprobs, versions and rows, in order and complete."""
    stream = stream_of(scenario)
    delivered = [chunk for part in chunks_of(scenario, part_bytes) for chunk in stream.add(part)]
    arrays = stream.arrays()

    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))
    assert stream.end is not None
    assert stream.end.cached_tokens == 3
    np.testing.assert_array_equal(arrays["token_ids"], scenario.tokens)
    np.testing.assert_array_equal(arrays["logprobs"], scenario.logprobs)
    np.testing.assert_array_equal(arrays["weight_versions"], np.full(len(scenario.tokens), 7))
    if scenario.rows is None:
        assert arrays["routed_experts"] is None
    else:
        assert arrays["routed_experts"].dtype == scenario.rows.dtype
        np.testing.assert_array_equal(arrays["routed_experts"], scenario.rows)
    for array in arrays.values():
        assert array is None or array.flags.writeable


@given(scenarios(), st.integers(1, 200))
def test_a_part_is_no_larger_than_allowed(scenario: Scenario, part_bytes: int) -> None:
    """Rows of one chunk stay within `part_bytes` unless a single row is larger, and so does the encoded estimate."""
    for chunk in chunks_of(scenario, part_bytes):
        if chunk.routed_experts is not None:
            rows = chunk.routed_experts
            assert len(rows.data) <= part_bytes or rows.shape[0] == 1
        frame = encode(Frame(WIRE_VERSION, "i", 0, [], [chunk]))
        assert len(frame) <= chunk_bytes(chunk)


@given(scenarios(), st.data())
def test_a_stream_with_a_fault_is_refused(scenario: Scenario, data: st.DataObject) -> None:
    """A missing, doubled or swapped chunk never passes: the stream raises, or has no end."""
    chunks = chunks_of(scenario, 40)
    at = data.draw(st.integers(0, len(chunks) - 1))
    fault = data.draw(st.sampled_from(["missing", "doubled", "swapped"]))
    if fault == "missing":
        broken = chunks[:at] + chunks[at + 1 :]
    elif fault == "doubled":
        broken = [*chunks[: at + 1], chunks[at], *chunks[at + 1 :]]
    else:
        broken = [*chunks[:at], *chunks[at:][::-1]]
    assembly = Assembly(scenario.request)
    try:
        for chunk in broken:
            assembly.add(chunk)
    except RemoteProtocolError:
        return

    assert broken == chunks or assembly.end is None


def simple() -> Scenario:
    """A prompt of 2 and 2 tokens in two steps, with routing of 1 layer, top 1."""
    rows = np.array([[[1]], [[2]], [[3]]], np.uint8)
    tokens, logprobs = np.array([5, 6], np.int32), np.array([-1, -2], np.float32)
    routing = RoutedExpertsInfo(num_layers=1, top_k=1, num_experts=4, dtype="u1")
    request = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=2))
    return Scenario(request, routing, list(steps_of([1, 2], tokens, logprobs, rows, 0)), tokens, logprobs, rows)


def test_engine_rows_that_skip_a_position_are_refused() -> None:
    """Rows that do not continue the ones before are the engine's fault and are never sent."""
    scenario = simple()
    scenario.steps[1].routed_experts_start += 1
    with pytest.raises(LocalProtocolError, match="rows from 3; 2 comes next"):
        chunks_of(scenario)


def test_engine_rows_that_are_missing_at_the_end_are_refused() -> None:
    """A finished request with fewer rows than the row rule says is the engine's fault and is never sent as finished."""
    scenario = simple()
    scenario.steps[1].routed_experts = None
    with pytest.raises(LocalProtocolError, match="2 rows for 2 tokens"):
        chunks_of(scenario)


def test_an_engine_error_before_its_rows_is_told_as_such() -> None:
    """A request that the engine fails before it gave all rows ends with the engine's error, not with one about rows."""
    scenario = simple()
    writer = writer_for(scenario)
    scenario.steps[0].routed_experts = None
    writer.write(scenario.steps[0], 1)
    step = RequestStep(
        key="k", token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ERROR, error="out of numbers"
    )
    (chunk,) = writer.write(step, 1)

    assert chunk.error is not None
    assert (chunk.error.code, chunk.error.message) == (ErrorCode.ENGINE_ERROR, "out of numbers")


def test_an_abort_before_the_first_token_has_no_rows() -> None:
    """Zero tokens are a valid result: their routing is an array of zero rows with the model's shape."""
    scenario = simple()
    step = RequestStep(key="k", token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ABORT)
    stream = stream_of(scenario)
    (chunk,) = writer_for(scenario).write(step, 1)
    stream.add(chunk)

    assert stream.arrays()["routed_experts"].shape == (0, 1, 1)
    assert len(stream.arrays()["token_ids"]) == 0


def test_the_start_at_the_prompt_end_with_one_token_has_no_rows() -> None:
    """`start` == Lp and one token: zero rows, and the applied start is echoed."""
    scenario = simple()
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=scenario.routing, start=2, part_bytes=1000)
    step = RequestStep(
        key="k",
        token_ids=np.array([5], np.int32),
        logprobs=np.zeros(1, np.float32),
        routed_experts=np.empty((0, 1, 1), np.uint8),
        routed_experts_start=2,
        finish_reason=FinishReason.LENGTH,
    )
    (chunk,) = writer.write(step, 1)

    assert chunk.routed_experts is not None
    assert (chunk.routed_experts.start, chunk.routed_experts.shape) == (2, (0, 1, 1))
    assert chunk.end is not None
    assert chunk.end.routed_experts_start == 2


def test_a_failure_ends_the_stream_with_its_totals() -> None:
    """An error after some chunks is terminal, carries what came, and is accepted by the receiver."""
    scenario = simple()
    writer = writer_for(scenario)
    assembly = Assembly(scenario.request)
    for chunk in writer.write(scenario.steps[0], 1):
        assembly.add(chunk)
    assembly.add(writer.fail(ChunkError(ErrorCode.WORKER_STOPPED, "stopped"), 1))

    assert assembly.end is not None
    assert assembly.end.error is not None
    assert assembly.end.error.code is ErrorCode.WORKER_STOPPED
    assert assembly.end.num_tokens == 1


def test_missing_logprobs_are_loud() -> None:
    """Tokens without the logprobs that were asked for are refused, never filled in."""
    scenario = simple()
    scenario.steps[0].logprobs = None
    assembly = Assembly(scenario.request)
    with pytest.raises(RemoteProtocolError, match="logprobs=0 was asked for"):
        assembly.add(chunks_of(scenario)[0])


def with_prompt_logprobs(prompt_len: int) -> Scenario:
    """A prompt whose logprobs and two best alternatives were asked for, one token, no routing."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=2)
    request = GenerateRequest(prompt_token_ids=[1] * prompt_len, sampling=sampling)
    tokens, logprobs = np.array([5], np.int32), np.zeros(1, np.float32)
    values = np.arange(prompt_len - 1, dtype="<f4")
    tops = np.arange(2 * (prompt_len - 1))
    (step,) = steps_of([1], tokens, logprobs, None, 0)
    step.prompt_logprobs = PromptLogprobs(
        1, values.tobytes(), TopLogprobs(2, tops.astype("<i4").tobytes(), tops.astype("<f4").tobytes())
    )
    return Scenario(request, None, [step], tokens, logprobs, None)


@pytest.mark.parametrize("prompt_len", [1, 2, 101])
def test_prompt_logprobs_are_split_and_joined(prompt_len: int) -> None:
    """Prompt logprobs larger than a part go ahead in several chunks and come out as one array, also an empty one."""
    scenario = with_prompt_logprobs(prompt_len)
    stream = stream_of(scenario)
    chunks = chunks_of(scenario, 64)
    for chunk in chunks:
        stream.add(chunk)
    arrays = stream.arrays()

    assert (len(chunks) > 10) == (prompt_len == 101)
    np.testing.assert_array_equal(arrays["prompt_logprobs"], np.arange(prompt_len - 1))
    np.testing.assert_array_equal(
        arrays["prompt_top_token_ids"], np.arange(2 * (prompt_len - 1)).reshape(prompt_len - 1, 2)
    )


def test_missing_prompt_logprobs_are_loud() -> None:
    """A result without the prompt logprobs that were asked for is refused."""
    scenario = with_prompt_logprobs(5)
    scenario.steps[0].prompt_logprobs = None
    with pytest.raises(RemoteProtocolError, match="0 of 4 prompt logprobs"):
        stream_of(scenario).add(chunks_of(scenario)[0])


def test_changed_routing_is_refused() -> None:
    """A stream whose layers, top-k, dtype or position change midway is refused."""
    scenario = simple()
    chunks = chunks_of(scenario)
    assembly = Assembly(scenario.request)
    assembly.add(chunks[0])
    wide = RoutedExpertsInfo(num_layers=2, top_k=1, num_experts=4, dtype="u1")
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=wide, start=0, part_bytes=1000)
    first, second = scenario.steps
    first.routed_experts = np.zeros((2, 2, 1), np.uint8)
    second.routed_experts = np.zeros((1, 2, 1), np.uint8)
    writer.write(first, 1)
    (wrong,) = writer.write(second, 1)
    with pytest.raises(RemoteProtocolError, match="routing changed"):
        assembly.add(wrong)


def broken_steps() -> dict[str, RequestStep]:
    """Second steps of `simple` that no engine should make, by what is wrong with them."""
    good = RequestStep(
        key="k",
        token_ids=np.array([6], np.int32),
        logprobs=np.zeros(1, np.float32),
        routed_experts=np.array([[[3]]], np.uint8),
        routed_experts_start=2,
        finish_reason=FinishReason.LENGTH,
    )
    return {
        "no rows": replace(good, routed_experts=None),
        "rows elsewhere": replace(good, routed_experts_start=1),
        "too few logprobs": replace(good, logprobs=np.zeros(0, np.float32)),
        "an error and no word of it": replace(good, finish_reason=FinishReason.ERROR),
    }


@pytest.mark.parametrize("name", broken_steps())
def test_a_step_that_makes_no_sense_ends_the_stream_in_order(name: str) -> None:
    """A step that cannot be written leaves no trace: the error that follows is the next chunk, with true totals."""
    scenario = simple()
    writer = writer_for(scenario)
    assembly = Assembly(scenario.request)
    for chunk in writer.write(scenario.steps[0], 1):
        assembly.add(chunk)
    with pytest.raises(LocalProtocolError):
        writer.write(broken_steps()[name], 1)
    assembly.add(writer.fail(ChunkError(ErrorCode.PROTOCOL_ERROR, name), 1))

    assert assembly.end is not None
    assert assembly.end.error is not None
    assert assembly.end.error.message == name
