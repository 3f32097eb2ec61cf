"""Sampling masks stay with their tokens in chunks and results, and contradictory masks are rejected."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.bus.protocol.stream.verification import ChunkVerifier
from rollbus.schemas.chunk import Chunk, End, FinishReason, SamplingMask
from rollbus.schemas.errors import LocalProtocolError, RemoteProtocolError
from rollbus.schemas.limits import MAX_MASK_IDS
from rollbus.schemas.messages import RequestKey, decode_frame
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.support.arrays import little_endian
from tests.support.scenarios import assert_complete, make_scenario, with_masks


def i4(*values: int) -> bytes:
    """Return token ids or counts in the wire format."""
    return little_endian(np.array(values, np.int64), "<i4")


def chunk(index: int, masks: SamplingMask | None, *, attempt: int = 0, end: End | None = None) -> Chunk:
    """Return a chunk with one token and these masks."""
    return Chunk(
        request_id="r",
        attempt=attempt,
        child=0,
        chunk_index=index,
        weight_version=0,
        token_ids_data=i4(5),
        sampling_mask=masks,
        end=end,
    )


def request_with_mask(return_sampling_mask: bool | None) -> GenerateRequest:
    """Return a request with this value of `return_sampling_mask`."""
    return GenerateRequest(
        prompt_token_ids=[1],
        request_id="r",
        sampling=SamplingParams(max_tokens=9, logprobs=None, seed=None),
        return_routed_experts=False,
        return_sampling_mask=return_sampling_mask,
    )


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30), min_size=1, max_size=20),
    st.integers(120, 400),
    st.integers(1, 20),
)
def test_masks_stay_with_their_tokens(masks: list[list[int]], segment_bytes: int, gather: int) -> None:
    """However masks are merged and split, each chunk has the masks of its own tokens, and as many tokens as fit."""
    cuts = list(range(1, len(masks) + 1))
    scenario = with_masks(make_scenario(np.random.default_rng(0), prompt_len=3, cuts=cuts), masks)
    scenario.versions[:] = [7] * len(cuts)
    chunks = scenario.chunks(segment_bytes, gather)

    at, sizes = 0, [4 + 4 + 4 + 4 * len(ids) for ids in masks]
    for number, one in enumerate(chunks):
        past = at + one.num_tokens
        if one.num_tokens:
            assert one.sampling_mask is not None
            assert [ids.tolist() for ids in TokenMasks.joined([one.sampling_mask]).split()] == masks[at:past]
            assert sum(sizes[at:past]) <= segment_bytes or one.num_tokens == 1
        if gather >= len(masks) and number < len(chunks) - 1 and past < len(masks):
            assert sum(sizes[at : past + 1]) > segment_bytes
        at = past
    scenario.arrays["weight_versions"] = np.full(len(masks), 7, np.int32)
    assert_complete(scenario, chunks)


@pytest.mark.parametrize(
    ("counts", "ids", "why"),
    [
        ([1, 1], [4], "1 ids, but the counts add up to 2"),
        ([1], [4, 5], "2 ids, but the counts add up to 1"),
        ([0, 1], [4], "tokens with 0 to 1 ids"),
        ([-1, 2], [4], "tokens with -1 to 2 ids"),
        ([MAX_MASK_IDS + 1], [], f"allowed: 1 to {MAX_MASK_IDS}"),
        ([2**31 - 1, 2**31 - 1], [], "allowed"),
        ([1], [-4], "id -4"),
    ],
)
def test_a_mask_that_contradicts_itself_is_refused(counts: list[int], ids: list[int], why: str) -> None:
    """A mask is rejected if its counts contradict its ids or if a count or an id is out of range."""
    with pytest.raises(ValueError, match=why):
        SamplingMask(i4(*counts), i4(*ids))


def test_a_mask_for_another_number_of_tokens_is_refused() -> None:
    """A mask for another number of tokens and invalid bytes are rejected, also in a received frame."""
    with pytest.raises(ValueError, match="1 token ids but 2 sampling masks"):
        chunk(0, SamplingMask(i4(1, 1), i4(5, 5)))
    with pytest.raises(ValueError, match="counts_data of 3 bytes"):
        SamplingMask(b"abc", b"")
    frame = [1, "i", 0, [], [["r", 0, 0, 0, 0, i4(5), *[None] * 9, [i4(2), i4(5)]]], 0, ""]
    with pytest.raises(RemoteProtocolError):
        decode_frame(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize("asked", [None, True])
def test_a_token_without_a_mask_after_tokens_with_masks_is_refused(asked: bool | None) -> None:
    """A token without a mask after tokens with masks is rejected, because the result would look complete."""
    verifier = ChunkVerifier(request_with_mask(asked))
    verifier.add(chunk(0, SamplingMask(i4(1), i4(5))))
    with pytest.raises(RemoteProtocolError, match="without sampling masks"):
        verifier.add(chunk(1, None))


def test_declined_masks_and_missing_required_masks_are_refused() -> None:
    """Masks that the request declined are rejected, and so are missing masks that it requires."""
    with pytest.raises(RemoteProtocolError, match="came with sampling masks"):
        ChunkVerifier(request_with_mask(False)).add(chunk(0, SamplingMask(i4(1), i4(5))))
    with pytest.raises(RemoteProtocolError, match="came without sampling masks"):
        ChunkVerifier(request_with_mask(True)).add(chunk(0, None))


@pytest.mark.parametrize("second_makes_masks", [False, True])
def test_a_result_has_masks_for_all_tokens_or_none(second_makes_masks: bool) -> None:
    """A result has masks only if all attempts returned masks."""
    mask = SamplingMask(i4(2), i4(5, 6))
    stream = ResponseStream(request_with_mask(None), child=0, attempt=0, keep=True)
    stream.add(chunk(0, mask))
    stream.next_attempt()
    end = End(FinishReason.STOP, 1, 0)
    stream.add(chunk(0, mask if second_makes_masks else None, attempt=1, end=end))

    found = stream.arrays()["sampling_mask"]
    if not second_makes_masks:
        assert found is None
        return
    assert isinstance(found, TokenMasks)
    assert found.positions.tolist() == [0, 0, 1, 1]
    assert found.token_ids.tolist() == [5, 6, 5, 6]
    assert found.token_ids.flags.writeable
    assert [ids.tolist() for ids in found.cut(1).split()] == [[5, 6]]
    assert TokenMasks.joined([found]).cut(0).split() == []


def test_a_mask_that_fits_no_chunk_ends_the_request() -> None:
    """A mask that fits no chunk and a mask for another number of tokens reject the whole step."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=1, routing=None, start=0, segment_bytes=40)
    writer.max_mask_bytes = 40
    for mask in (SamplingMask(i4(11), i4(*range(11))), SamplingMask(i4(1, 1), i4(1, 2))):
        with pytest.raises(LocalProtocolError, match=r"a sampling mask of 11 ids|1 tokens but sampling masks of 2"):
            writer.add_step(RequestStep(key="r", token_ids=np.array([5], np.int32), sampling_mask=mask), 0)
    assert not writer.has_unsent
