"""A response stream whose workers are lost, or that has two phases, has the same result as one of a single worker."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import split
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.errors import ErrorCode
from rollbus.schemas.messages import KvTransfer, RequestKey
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.engines.synthetic.model import SyntheticModel
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


def config(num_experts: int = WIDE, role: str = "both", *, has_masks: bool = False) -> SyntheticConfig:
    """Return the configuration of engines that generate the same tokens in each role."""
    shape = {"vocab_size": 50, "num_layers": 2, "top_k": 2, "num_experts": num_experts}
    return SyntheticConfig.from_args(shape | {"role": role, "sampling_mask": has_masks})


MODEL = SyntheticModel(config(has_masks=True), None)


async def phase_chunks(
    request: GenerateRequest,
    attempt: int,
    engine: SyntheticEngine,
    kv: KvTransfer | None,
    segment_bytes: int,
    gather: int = 1,
) -> AsyncIterator[Chunk]:
    """Yield the chunks that one message causes, after every `gather` steps."""
    await engine.add("k", request, kv)
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
            assert step.error is None
            writer.append_step(step, attempt)
            count += 1
            if count % gather and step.finish_reason is None:
                continue
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
    gather: int = 1,
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
            engine = SyntheticEngine(config(num_experts, role, has_masks=bool(request.sampling.top_k)))
            async for chunk in phase_chunks(asked, stream.attempt, engine, kv, segment_bytes, gather):
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


losses = st.lists(st.integers(0, 14).map(lambda count: Attempt(lost_after=count)), max_size=5)
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
def test_after_losses_a_greedy_request_has_the_result_of_an_undisturbed_run(
    request: GenerateRequest, losses: list[Attempt], gather: int
) -> None:
    """After losses, a greedy request has the same result as an undisturbed run.

    Delivered tokens are not generated again.
    """
    expected, _ = asyncio.run(serve(request, []))
    stream, delivered = asyncio.run(serve(request, losses, gather=gather))

    assert_same(stream, expected)
    assert stream.is_exact
    versions = stream.arrays()["weight_versions"]
    assert list(versions) == sorted(versions)
    assert [chunk.chunk_index for chunk in delivered] == list(range(len(delivered)))


@given(requests(continuable=False), losses, gathers)
def test_a_seeded_request_without_delivered_chunks_starts_again(
    request: GenerateRequest, losses: list[Attempt], gather: int
) -> None:
    """A seeded request whose chunks the caller has not received starts again, and equals the undisturbed run."""
    expected, _ = asyncio.run(serve(request, []))
    stream, _ = asyncio.run(serve(request, losses, gather=gather))

    assert_same(stream, expected)
    assert stream.is_exact


@given(requests(continuable=False), losses, gathers)
def test_a_resumed_stream_keeps_delivered_chunks_and_is_marked_as_not_exact(
    request: GenerateRequest, losses: list[Attempt], gather: int
) -> None:
    """Delivered chunks stay valid, and the resumed request is marked as not exact.

    Totals and the row rule hold for the whole request.
    """
    stream, delivered = asyncio.run(serve(request, losses, keep=False, gather=gather))
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
    stream, delivered = await serve(request, [Attempt(lost_after=lost_after)], keep=False, segment_bytes=50)
    expected, _ = await serve(request, [])

    rows = [chunk.routed_experts.numpy() for chunk in delivered if chunk.routed_experts is not None]
    np.testing.assert_array_equal(np.concatenate(rows), expected.arrays()["routed_experts"])
    assert stream.num_attempts == 2


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
