"""A response stream whose worker is lost at any points ends with the same result as an undisturbed one."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import split
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticModel
from tests.support.scenarios import drain

pytestmark = pytest.mark.slow

CONFIG = SyntheticConfig(vocab_size=50, num_layers=2, top_k=2, num_experts=300)
MASKING = replace(CONFIG, sampling_mask=True)
"""Configuration for requests with a `top_k`."""
MODEL = SyntheticModel(MASKING, None)


async def attempt_chunks(
    request: GenerateRequest, attempt: int, segment_bytes: int, gather: int
) -> AsyncIterator[Chunk]:
    """Yield the chunks of one attempt on its own engine, after every `gather` steps."""
    engine = SyntheticEngine(MASKING if request.sampling.top_k else CONFIG)
    await engine.add("k", request)
    writer = ChunkWriter(
        RequestKey(request.request_id, attempt, 0),
        prompt_len=request.prompt_len,
        routing=engine.capabilities.routed_experts,
        start=request.routed_experts_prompt_start,
        segment_bytes=segment_bytes,
    )
    count = 0
    async for steps in engine.steps():
        for step in split(steps):
            writer.add_step(step, attempt)
            count += 1
            if count % gather and step.finish_reason is None:
                continue
            for chunk in drain(writer):
                yield chunk
            if step.finish_reason is not None:
                return


async def run(
    request: GenerateRequest, losses: list[int], *, keep: bool, segment_bytes: int = 64, gather: int = 1
) -> tuple[ResponseStream, list[Chunk]]:
    """Run a request until it ends, and lose the i-th attempt after `losses[i]` chunks."""
    stream = ResponseStream(request, child=0, attempt=0, keep=keep)
    delivered: list[Chunk] = []
    remaining = [*losses]
    current: GenerateRequest | Chunk = request
    while stream.end is None and isinstance(current, GenerateRequest):
        limit = remaining.pop(0) if remaining else None
        count = 0
        async for chunk in attempt_chunks(current, stream.attempt, segment_bytes, gather):
            if count == limit:
                break
            delivered += stream.add(chunk)
            count += 1
        if stream.end is None:
            current = stream.next_attempt()
            if isinstance(current, Chunk):
                delivered.append(current)
    return stream, delivered


@st.composite
def requests(draw: st.DrawFn, *, continuable: bool) -> GenerateRequest:
    """Draw a request whose sampling can, or cannot, continue from its tokens."""
    prompt_len = draw(st.integers(1, 12))
    max_tokens = draw(st.integers(1, 12))
    has_masks = draw(st.booleans())
    top_k = 0 if not has_masks else 1 if continuable else 9
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        # Sampling with `top_k` 1 is greedy too.
        temperature=0 if continuable and not has_masks else 1,
        top_k=top_k,
        seed=None if continuable and has_masks else draw(st.integers(0, 5)),
        stop_token_ids=draw(st.lists(st.integers(0, 49), max_size=8)),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, 0, 1])),
    )
    return GenerateRequest(
        prompt_token_ids=draw(st.lists(st.integers(0, 49), min_size=prompt_len, max_size=prompt_len)),
        sampling=sampling,
        routed_experts_prompt_start=draw(st.integers(0, prompt_len)),
        return_routed_experts=draw(st.sampled_from([None, True])),
    )


losses = st.lists(st.integers(0, 14), max_size=5)
gathers = st.integers(1, 4)


def assert_same(stream: ResponseStream, expected: ResponseStream) -> None:
    """Assert that all arrays and the end are equal, byte for byte."""
    assert stream.end.finish_reason == expected.end.finish_reason
    assert stream.end.stop_reason == expected.end.stop_reason
    got, wanted = stream.arrays(), expected.arrays()
    for name, array in wanted.items():
        if name == "weight_versions":
            # In these tests, the weight version identifies the attempt.
            assert len(got[name]) == len(array)
        elif array is None:
            assert got[name] is None
        elif isinstance(array, TokenMasks):
            np.testing.assert_array_equal(got[name].counts, array.counts)
            np.testing.assert_array_equal(got[name].token_ids, array.token_ids)
        else:
            assert got[name].dtype == array.dtype
            np.testing.assert_array_equal(got[name], array, err_msg=name)


@given(requests(continuable=True), losses, gathers)
@settings(max_examples=300)
def test_after_losses_a_greedy_request_has_the_result_of_an_undisturbed_run(
    request: GenerateRequest, losses: list[int], gather: int
) -> None:
    """After losses, a greedy request has the same result as an undisturbed run.

    Delivered tokens are not generated again.
    """
    expected, _ = asyncio.run(run(request, [], keep=True))
    stream, delivered = asyncio.run(run(request, losses, keep=True, gather=gather))

    assert_same(stream, expected)
    assert stream.is_exact
    versions = stream.arrays()["weight_versions"]
    assert list(versions) == sorted(versions)
    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))


@given(requests(continuable=False), losses, gathers)
@settings(max_examples=150)
def test_a_seeded_request_without_delivered_chunks_starts_again(
    request: GenerateRequest, losses: list[int], gather: int
) -> None:
    """A seeded request whose chunks the caller has not received starts again, and equals the undisturbed run."""
    expected, _ = asyncio.run(run(request, [], keep=True))
    stream, _ = asyncio.run(run(request, losses, keep=True, gather=gather))

    assert_same(stream, expected)
    assert stream.is_exact


@given(requests(continuable=False), losses, gathers)
@settings(max_examples=150)
def test_a_resumed_stream_keeps_delivered_chunks_and_is_marked_as_not_exact(
    request: GenerateRequest, losses: list[int], gather: int
) -> None:
    """Delivered chunks stay valid, and the resumed request is marked as not exact.

    Totals and the row rule hold for the whole request.
    """
    stream, delivered = asyncio.run(run(request, losses, keep=False, gather=gather))
    num_tokens = sum(chunk.num_tokens for chunk in delivered)
    num_rows = sum(0 if chunk.routed_experts is None else chunk.routed_experts.shape[0] for chunk in delivered)

    assert stream.end is not None
    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))
    assert [chunk.is_terminal for chunk in delivered] == [False] * (len(delivered) - 1) + [True]
    assert (delivered[-1].end.num_tokens, delivered[-1].end.num_rows) == (num_tokens, num_rows)
    assert num_rows == request.prompt_len - request.routed_experts_prompt_start + num_tokens - 1
    for chunk in delivered:
        masks = b"".join(MODEL.sampling_mask(int(t), 9).token_ids_data for t in chunk.token_ids)
        found = None if chunk.sampling_mask is None else chunk.sampling_mask.token_ids_data
        assert found == (masks if request.sampling.top_k and chunk.num_tokens else None)
    resumed_midway = stream.num_attempts > 1 and any(chunk.attempt < stream.attempt for chunk in delivered)
    assert stream.is_exact or resumed_midway


def test_the_client_creates_the_terminal_chunk_if_only_that_chunk_is_lost() -> None:
    """If only the terminal chunk is lost, the client creates it and starts no further attempt."""
    request = GenerateRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=1, temperature=0))
    stream = ResponseStream(request, child=0, attempt=0, keep=True)
    token = Chunk(
        request_id=request.request_id,
        attempt=0,
        child=0,
        chunk_index=0,
        weight_version=4,
        token_ids_data=b"\x05\0\0\0",
        logprobs_data=b"\0\0\0\0",
    )
    stream.add(token)
    last = stream.next_attempt()

    assert isinstance(last, Chunk)
    assert stream.end is last.end
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.chunk_index, last.weight_version) == (1, 4)


@pytest.mark.parametrize("lost_after", [0, 1, 2, 3, 4])
async def test_prompt_rows_of_a_lost_attempt_are_not_delivered_without_their_tokens(lost_after: int) -> None:
    """If an attempt is lost between several chunks of prompt rows, it leaves no rows behind."""
    request = GenerateRequest(prompt_token_ids=range(20), sampling=SamplingParams(max_tokens=2, temperature=0))
    stream, delivered = await run(request, [lost_after], keep=False, segment_bytes=50)
    expected, _ = await run(request, [], keep=True)

    rows = [chunk.routed_experts.numpy() for chunk in delivered if chunk.routed_experts is not None]
    np.testing.assert_array_equal(np.concatenate(rows), expected.arrays()["routed_experts"])
    assert stream.num_attempts == 2
