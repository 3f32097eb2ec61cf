"""Assembly is the inverse of chunking for any steps and sizes, and no faulty stream passes as a result."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.verification import ChunkVerifier
from rollbus.schemas.chunk import Chunk, End, FinishReason, RoutedExperts
from rollbus.schemas.errors import RemoteProtocolError
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.support.scenarios import Scenario, assert_complete, drain, make_scenario, scenarios, simple


@pytest.mark.proves("P33")
@given(scenarios(), st.integers(1, 200), st.integers(1, 5))
def test_the_client_restores_all_arrays_and_versions_of_the_engine(
    scenario: Scenario, segment_bytes: int, gather: int
) -> None:
    """All arrays and versions are restored in order and completely, for any steps, merging and segments."""
    assert_complete(scenario, scenario.chunks(segment_bytes, gather))


def test_the_arrays_of_a_result_are_writable() -> None:
    """The arrays of a result are writable, and the end has the number of cached tokens."""
    scenario = simple()
    stream = scenario.stream()
    for chunk in scenario.chunks():
        stream.add(chunk)

    assert all(array is None or array.flags.writeable for array in stream.arrays().values())
    assert stream.end.cached_tokens == 3


@pytest.mark.proves("P13", "P33")
@given(scenarios(), st.data())
def test_a_stream_with_a_fault_is_refused(scenario: Scenario, data: st.DataObject) -> None:
    """A stream with a missing, duplicate or swapped chunk raises an error or has no end."""
    chunks = scenario.chunks(40)
    at = data.draw(st.integers(0, len(chunks) - 1))
    fault = data.draw(st.sampled_from(["missing", "doubled", "swapped"]))
    if fault == "missing":
        broken = chunks[:at] + chunks[at + 1 :]
    elif fault == "doubled":
        broken = [*chunks[: at + 1], chunks[at], *chunks[at + 1 :]]
    else:
        broken = [*chunks[:at], *chunks[at:][::-1]]
    assembly = ChunkVerifier(scenario.request)
    try:
        for chunk in broken:
            assembly.add(chunk)
    except RemoteProtocolError:
        return

    assert broken == chunks or assembly.end is None


@pytest.mark.proves("P13")
def test_tokens_without_the_requested_logprobs_are_refused() -> None:
    """Tokens without the requested log probabilities are rejected and never filled in."""
    scenario = simple()
    scenario.steps[0].logprobs = None
    assembly = ChunkVerifier(scenario.request)
    with pytest.raises(RemoteProtocolError, match="the request has logprobs=0"):
        assembly.add(scenario.chunks()[0])


def with_prompt_logprobs(prompt_len: int) -> Scenario:
    """Return a request for prompt logprobs with two alternatives, one token, and no routed experts."""
    return make_scenario(np.random.default_rng(0), prompt_len=prompt_len, cuts=[1], widths=(0, 2))


@pytest.mark.parametrize("prompt_len", [1, 2, 101])
def test_prompt_logprobs_are_split_and_joined(prompt_len: int) -> None:
    """Prompt logprobs above the segment size leave in several chunks and become one array, which may be empty."""
    scenario = with_prompt_logprobs(prompt_len)
    chunks = scenario.chunks(64)

    assert (len(chunks) > 10) == (prompt_len == 101)
    assert_complete(scenario, chunks)


def test_a_result_without_the_requested_prompt_logprobs_is_refused() -> None:
    """A result without the requested prompt logprobs is rejected."""
    scenario = with_prompt_logprobs(5)
    scenario.steps[0].prompt_logprobs = None
    with pytest.raises(RemoteProtocolError, match="0 of 4 prompt logprobs"):
        scenario.stream().add(scenario.chunks()[0])


@pytest.mark.proves("P13")
def test_changed_routed_experts_info_is_refused() -> None:
    """A stream whose layers, top-k, dtype or position change is rejected."""
    scenario = simple()
    chunks = scenario.chunks()
    assembly = ChunkVerifier(scenario.request)
    assembly.add(chunks[0])
    wide = RoutedExpertsInfo(num_layers=2, top_k=1, num_experts=4, dtype="u1")
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=wide, start=0, segment_bytes=1000)
    first, second = scenario.steps
    first.routed_experts = np.zeros((2, 2, 1), np.uint8)
    second.routed_experts = np.zeros((1, 2, 1), np.uint8)
    writer.add_step(first, 1)
    drain(writer)
    writer.add_step(second, 1)
    (wrong,) = drain(writer)
    with pytest.raises(RemoteProtocolError, match="routed experts changed"):
        assembly.add(wrong)


def request() -> GenerateRequest:
    """Return a request with two prompt tokens and without log probabilities."""
    sampling = SamplingParams(max_tokens=3, temperature=0, logprobs=None)
    return GenerateRequest(prompt_token_ids=[1, 2], sampling=sampling, request_id="r")


def chunk(index: int, *tokens: int, rows: tuple[int, int] | None = None, attempt: int = 0, end: bool = False) -> Chunk:
    """Return a chunk with tokens, and rows of (first position, count)."""
    experts = None
    if rows is not None:
        experts = RoutedExperts.from_rows(np.zeros((rows[1], 1, 1), "u1"), rows[0])
    total = End(finish_reason=FinishReason.LENGTH, num_tokens=3, num_rows=4, routed_experts_start=0)
    return Chunk(
        request_id="r",
        attempt=attempt,
        child=0,
        chunk_index=index,
        weight_version=5,
        token_ids_data=np.array(tokens, "<i4").tobytes(),
        routed_experts=experts,
        end=total if end else None,
        lora_version=2,
    )


def test_an_aborted_stream_ends_with_what_was_delivered() -> None:
    """The terminal chunk of an aborted stream counts delivered tokens and rows, but no rows that wait for tokens."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    stream.add(chunk(0, 7, rows=(0, 2)))
    assert stream.add(chunk(1, rows=(2, 1))) == []
    last = stream.abort()

    assert (last.finish_reason, last.chunk_index) == ("abort", 1)
    assert (last.weight_version, last.lora_version) == (5, 2)
    assert (last.end.num_tokens, last.end.num_rows, last.end.routed_experts_start) == (1, 2, 0)
    assert stream.end == last.end
    assert list(stream.arrays()["token_ids"]) == [7]
    assert len(stream.arrays()["routed_experts"]) == 2


def test_a_stream_can_be_aborted_before_its_first_chunk() -> None:
    """A stream that is aborted before its first chunk has only a terminal chunk."""
    stream = ResponseStream(request(), child=0, attempt=3, keep=False)
    last = stream.abort()

    assert (last.chunk_index, last.end.num_tokens, last.end.num_rows) == (0, 0, 0)


@pytest.mark.proves("P50")
def test_a_withdrawn_attempt_does_not_count() -> None:
    """A withdrawn attempt changes only the number on the wire. It does not count as an attempt."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    stream.withdraw()
    assert (stream.attempt, stream.num_attempts) == (1, 1)
    delivered = stream.add(chunk(0, 7, 8, 9, rows=(0, 4), attempt=1, end=True))

    assert [each.chunk_index for each in delivered] == [0]
    assert stream.num_attempts == 1


def test_lost_attempts_count_beside_withdrawn_attempts() -> None:
    """A lost attempt counts, before and after a withdrawn attempt."""
    stream = ResponseStream(request(), child=0, attempt=4, keep=True)
    stream.next_attempt()
    stream.withdraw()
    stream.next_attempt()

    assert (stream.attempt, stream.num_attempts) == (7, 3)
