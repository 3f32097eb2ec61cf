"""A response stream of a prefill and a decode phase equals one of a single worker, with any segmentation and losses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import split
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import KvTransfer, RequestKey
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.protocol.test_resume import assert_same, requests
from tests.support.requests import sized
from tests.support.scenarios import drain

pytestmark = pytest.mark.slow

WIDE, NARROW = 300, 16
"""Numbers of experts whose ids take two bytes and one byte."""


@dataclass(frozen=True)
class Attempt:
    """The course of one attempt."""

    is_cut: bool = False
    """True if the attempt begins with a prefill phase."""
    lost_after: int | None = None
    """Number of chunks of both phases after which the attempt is lost; None if it is not lost."""
    keeps_kv: bool = True
    """True if the prefill phase leaves its KV."""


def config(num_experts: int, role: str = "both") -> SyntheticConfig:
    """Return the configuration of engines that generate the same tokens in each role."""
    return SyntheticConfig.from_args(
        {"vocab_size": 50, "num_layers": 2, "top_k": 2, "num_experts": num_experts, "role": role}
    )


async def phase_chunks(
    request: GenerateRequest, attempt: int, engine: SyntheticEngine, kv: KvTransfer | None, segment_bytes: int
) -> AsyncIterator[Chunk]:
    """Yield the chunks that one message causes."""
    await engine.add("k", request, kv)
    writer = ChunkWriter(
        RequestKey(request.request_id, attempt, 0),
        prompt_len=request.prompt_len,
        routing=engine.capabilities.routed_experts,
        start=request.routed_experts_prompt_start,
        segment_bytes=segment_bytes,
    )
    async for steps in engine.steps():
        for step in split(steps):
            assert step.error is None
            writer.add_step(step, 0)
            for chunk in drain(writer):
                yield chunk
            if step.finish_reason is not None:
                return


async def serve(
    request: GenerateRequest,
    attempts: list[Attempt],
    *,
    num_experts: int = WIDE,
    keep: bool = True,
    segment_bytes: int = 64,
) -> tuple[ResponseStream, list[Chunk]]:
    """Run a request until it ends: by `attempts`, and then by one whole attempt."""
    stream = ResponseStream(request, child=0, attempt=0, keep=keep)
    delivered: list[Chunk] = []
    plans = iter(attempts)
    asked: GenerateRequest | Chunk = request
    while stream.end is None and isinstance(asked, GenerateRequest):
        plan = next(plans, Attempt())
        left = plan.lost_after

        async def run_phase(asked: GenerateRequest, role: str, kv: KvTransfer | None) -> None:
            nonlocal left
            engine = SyntheticEngine(config(num_experts, role))
            async for chunk in phase_chunks(asked, stream.attempt, engine, kv, segment_bytes):
                if left == 0:
                    return
                delivered.extend(stream.add(chunk))
                left = None if left is None else left - 1

        if plan.is_cut:
            await run_phase(stream.cut_to_prefill("synthetic"), "prefill", KvTransfer() if plan.keeps_kv else None)
        if stream.is_prefilled:
            await run_phase(stream.next_phase(), "decode", stream.handover)
        elif not plan.is_cut:
            await run_phase(asked, "both", None)
        if stream.end is None:
            asked = stream.next_attempt()
            if isinstance(asked, Chunk):
                delivered.append(asked)
    return stream, delivered


attempts = st.lists(
    st.builds(
        Attempt,
        is_cut=st.booleans(),
        lost_after=st.none() | st.integers(0, 14),
        keeps_kv=st.booleans(),
    ),
    max_size=4,
)


@pytest.mark.proves("P53")
@given(requests(continuable=True), attempts, st.sampled_from([WIDE, NARROW]), st.sampled_from([30, 64, 4096]))
@settings(max_examples=300)
def test_a_result_after_phases_and_losses_equals_that_of_one_worker(
    request: GenerateRequest, plans: list[Attempt], num_experts: int, segment_bytes: int
) -> None:
    """Tokens, logprobs, rows, prompt logprobs and the end equal those of one worker.

    The chunks form one response stream.
    """
    expected, _ = asyncio.run(serve(request, [], num_experts=num_experts))
    stream, delivered = asyncio.run(serve(request, plans, num_experts=num_experts, segment_bytes=segment_bytes))

    assert_same(stream, expected)
    assert stream.is_exact
    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))
    assert [chunk.is_terminal for chunk in delivered] == [False] * (len(delivered) - 1) + [True]
    assert delivered[-1].end is stream.end
    assert stream.end.num_tokens == sum(chunk.num_tokens for chunk in delivered)
    assert stream.end.kv_params is None
    num_lost = sum(1 for plan in plans if plan.lost_after is not None)
    assert stream.num_attempts <= 1 + num_lost


async def test_two_phases_are_one_attempt() -> None:
    """Two phases are one attempt: the first token arrives without the end of the prefill phase.

    Transferred tokens count as cached.
    """
    stream, delivered = await serve(sized(40, 5), [Attempt(is_cut=True)], segment_bytes=4096)

    assert [(chunk.attempt, chunk.num_tokens, chunk.is_terminal) for chunk in delivered][:2] == [
        (0, 1, False),
        (1, 1, False),
    ]
    assert stream.num_attempts == 1
    assert stream.end.cached_tokens == 32


async def test_a_stop_token_as_the_first_token_ends_the_request_in_its_prefill_phase() -> None:
    """A stop token as the first token ends the request in its prefill phase. The caller receives no KV parameters."""
    first, _ = await serve(sized(40, 1), [])
    token = int(first.arrays()["token_ids"][0])
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, stop_token_ids=[token])
    request = GenerateRequest(prompt_token_ids=range(40), sampling=sampling)
    stream, delivered = await serve(request, [Attempt(is_cut=True)], segment_bytes=4096)

    assert not stream.is_prefilled
    assert (stream.end.finish_reason, stream.end.stop_reason) == (FinishReason.STOP, token)
    assert delivered[-1].end == stream.end


async def test_a_stop_token_before_min_tokens_ends_only_the_prefill_phase() -> None:
    """A stop token before `min_tokens` ends only the prefill phase, and the decode phase continues."""
    first, _ = await serve(sized(40, 1), [])
    token = int(first.arrays()["token_ids"][0])
    sampling = SamplingParams(max_tokens=5, min_tokens=3, temperature=0, ignore_eos=True, stop_token_ids=[token])
    request = GenerateRequest(prompt_token_ids=range(40), sampling=sampling)
    stream, _ = await serve(request, [Attempt(is_cut=True)])
    expected, _ = await serve(request, [])

    assert stream.attempt == 1
    assert_same(stream, expected)


async def test_kv_parameters_that_do_not_fit_beside_other_data_have_their_own_chunk() -> None:
    """KV parameters that do not fit beside other data have their own chunk, which the caller does not receive."""
    engine = SyntheticEngine(config(WIDE, "prefill"))
    chunks = [chunk async for chunk in phase_chunks(sized(40, 1), 0, engine, KvTransfer(), 30)]
    assert [(chunk.num_tokens, chunk.routed_experts, chunk.is_terminal) for chunk in chunks][-1] == (0, None, True)

    stream, delivered = await serve(sized(40, 3), [Attempt(is_cut=True)], segment_bytes=30)
    expected, _ = await serve(sized(40, 3), [])

    assert_same(stream, expected)
    assert stream.handover is not None
    assert all(chunk.num_tokens or chunk.routed_experts is not None for chunk in delivered)


async def test_a_prefill_phase_that_no_worker_accepts_is_replaced_by_the_whole_request() -> None:
    """If no worker accepts the prefill phase, the next number has the whole request.

    This does not count as an attempt.
    """
    request = sized(40, 5)
    stream = ResponseStream(request, child=0, attempt=3, keep=True)

    assert stream.cut_to_prefill("synthetic").sampling.max_tokens == 1
    assert stream.withdraw() is request
    assert (stream.attempt, stream.num_attempts, stream.has_begun) == (4, 1, False)


async def test_kv_of_other_weights_gives_other_tokens() -> None:
    """KV of other weights leads to other tokens, so the tests that forbid its use can fail."""
    request = sized(40, 5)
    prefill = SyntheticEngine(SyntheticConfig(role="prefill", seed=1))
    stream = ResponseStream(request, child=0, attempt=0, keep=True)
    async for chunk in phase_chunks(stream.cut_to_prefill("synthetic"), 0, prefill, KvTransfer(), 4096):
        stream.add(chunk)
    second = stream.next_phase()
    tokens = []
    for kv in (stream.handover, None):
        decode = SyntheticEngine(SyntheticConfig(role="decode"))
        tokens.append([chunk.token_ids.tolist() async for chunk in phase_chunks(second, 1, decode, kv, 4096)])

    assert tokens[0] != tokens[1]


async def test_the_engine_rejects_kv_of_another_prompt() -> None:
    """The engine rejects KV of another prompt and fails only that request."""
    decode = SyntheticEngine(SyntheticConfig(role="decode"))
    for params in (b"\xc1", b"\x83\xaanum_tokens\x02\xa7context\x03\xa7weights\x04"):
        await decode.add("k", sized(40, 5), KvTransfer(params=params, connector="synthetic", weight_version=0))
        [step] = split(await anext(aiter(decode.steps())))
        assert (step.finish_reason, step.error_code) == (FinishReason.ERROR, ErrorCode.KV_TRANSFER_FAILED)


async def test_rows_of_positions_with_transferred_kv_are_not_valid() -> None:
    """Rows of positions with transferred KV are not valid.

    Only rows from the end of the transferred positions are correct.
    """
    request = sized(40, 2)
    whole, _ = await serve(request, [])
    stream = ResponseStream(request, child=0, attempt=0, keep=True)
    prefill = SyntheticEngine(config(WIDE, "prefill"))
    async for chunk in phase_chunks(stream.cut_to_prefill("synthetic"), 0, prefill, KvTransfer(), 4096):
        stream.add(chunk)
    decode = SyntheticEngine(config(WIDE, "decode"))
    await decode.add("k", request, stream.handover)
    [step] = split(await anext(aiter(decode.steps())))
    rows = whole.arrays()["routed_experts"]

    assert not step.routed_experts[:32].any()
    np.testing.assert_array_equal(step.routed_experts[32:], rows[32:40])
