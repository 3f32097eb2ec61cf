"""Assembly is the inverse of chunking for any steps and sizes, and no faulty stream passes as a result."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.verification import ChunkVerifier
from rollbus.schemas.errors import RemoteProtocolError
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.presence import RoutedExpertsInfo
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
    assert stream.end is not None
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
