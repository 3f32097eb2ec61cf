"""Assembly is the inverse of chunking for any steps and sizes, and no faulty stream passes as a result."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.response_stream import ChunkVerifier, ResponseStream
from rollbus.bus.protocol.stream.result_arrays import TokenMasks, kv_arrays
from rollbus.schemas.chunk import Chunk, End, FinishReason, RoutedExperts, SamplingMask
from rollbus.schemas.errors import LocalProtocolError, RemoteProtocolError
from rollbus.schemas.limits import MAX_MASK_IDS
from rollbus.schemas.messages import RequestKey, decode_frame
from rollbus.schemas.presence import RoutedExpertsInfo
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.support.scenarios import (
    Scenario,
    assert_complete,
    drain,
    little_endian,
    make_scenario,
    scenarios,
    simple,
    with_masks,
)


@pytest.mark.proves("P33")
@given(scenarios() | scenarios(uses_lora=True), st.integers(1, 200), st.integers(1, 5))
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
    writer.append_step(first, 1)
    drain(writer)
    writer.append_step(second, 1)
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
    """The terminal chunk of an aborted stream counts delivered tokens and rows, but no rows that wait for tokens.

    Before its first chunk, a stream has nothing to count.
    """
    none = ResponseStream(request(), child=0, attempt=3, keep=False).abort()
    assert (none.chunk_index, none.end.num_tokens, none.end.num_rows) == (0, 0, 0)
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


def test_a_worker_may_abort_between_the_rows_of_a_prompt_and_its_first_token() -> None:
    """The end of a request that was stopped before its first token is no fault, and drops the rows before it."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    assert stream.add(chunk(0, rows=(0, 2))) == []
    (last,) = stream.add(replace(chunk(1), end=End(FinishReason.ABORT, 0, 2, routed_experts_start=0)))

    assert (last.finish_reason, last.end.num_rows, stream.arrays()["routed_experts"]) == ("abort", 0, None)


@pytest.mark.parametrize("kind", [None, (1, 2, "u1"), (2, 1, "u1"), (1, 1, "<u2")])
def test_an_attempt_with_rows_unlike_those_of_an_earlier_one_is_refused(kind: tuple[int, int, str] | None) -> None:
    """Rows of other layers, top-k or dtype, or none, cannot follow the rows of an earlier attempt."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    stream.add(chunk(0, 7, rows=(0, 2)))
    stream.next_attempt()
    last = replace(chunk(0, 8, 9, attempt=1), end=End(FinishReason.LENGTH, 2, 0))
    if kind is not None:
        rows = RoutedExperts.from_rows(np.zeros((2, *kind[:2]), kind[2]), 2)
        last = replace(last, routed_experts=rows, end=End(FinishReason.LENGTH, 2, 2, routed_experts_start=2))
    with pytest.raises(RemoteProtocolError, match=r"routed experts changed|no start of routed experts"):
        stream.add(last)


@pytest.mark.proves("P50")
def test_a_withdrawn_attempt_does_not_count() -> None:
    """A withdrawn attempt changes only the number on the wire. It does not count as an attempt."""
    stream = ResponseStream(request(), child=0, attempt=0, keep=True)
    assert stream.add(chunk(0, rows=(0, 2))) == []
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


def i4(*values: int) -> bytes:
    """Return token ids or counts in the wire format."""
    return little_endian(np.array(values, np.int64), "<i4")


def chunk_of_masks(index: int, masks: SamplingMask | None, *, attempt: int = 0, end: End | None = None) -> Chunk:
    """Return a chunk with one token and these masks."""
    plain = chunk(index, 5, attempt=attempt)
    return replace(plain, weight_version=0, lora_version=None, sampling_mask=masks, end=end)


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
        chunk_of_masks(0, SamplingMask(i4(1, 1), i4(5, 5)))
    with pytest.raises(ValueError, match="counts_data of 3 bytes"):
        SamplingMask(b"abc", b"")
    frame = [1, "i", 0, [], [["r", 0, 0, 0, 0, i4(5), *[None] * 9, [i4(2), i4(5)]]], 0, ""]
    with pytest.raises(RemoteProtocolError):
        decode_frame(msgspec.msgpack.encode(frame))


@pytest.mark.parametrize("asked", [None, True])
def test_a_token_without_a_mask_after_tokens_with_masks_is_refused(asked: bool | None) -> None:
    """A token without a mask after tokens with masks is rejected, because the result would look complete."""
    verifier = ChunkVerifier(request_with_mask(asked))
    verifier.add(chunk_of_masks(0, SamplingMask(i4(1), i4(5))))
    with pytest.raises(RemoteProtocolError, match="without sampling masks"):
        verifier.add(chunk_of_masks(1, None))


def test_declined_masks_and_missing_required_masks_are_refused() -> None:
    """Masks that the request declined are rejected, and so are missing masks that it requires."""
    with pytest.raises(RemoteProtocolError, match="came with sampling masks"):
        ChunkVerifier(request_with_mask(False)).add(chunk_of_masks(0, SamplingMask(i4(1), i4(5))))
    with pytest.raises(RemoteProtocolError, match="came without sampling masks"):
        ChunkVerifier(request_with_mask(True)).add(chunk_of_masks(0, None))


@pytest.mark.parametrize("second_makes_masks", [False, True])
def test_a_result_has_masks_for_all_tokens_or_none(second_makes_masks: bool) -> None:
    """A result has masks only if all attempts returned masks."""
    mask = SamplingMask(i4(2), i4(5, 6))
    stream = ResponseStream(request_with_mask(None), child=0, attempt=0, keep=True)
    stream.add(chunk_of_masks(0, mask))
    stream.next_attempt()
    end = End(FinishReason.STOP, 1, 0)
    stream.add(chunk_of_masks(0, mask if second_makes_masks else None, attempt=1, end=end))

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
            writer.append_step(RequestStep(key="r", token_ids=np.array([5], np.int32), sampling_mask=mask), 0)
    assert not writer.has_unsent


# The weight versions of a result's KV, derived from the tokens' versions and from recomputations of the KV.


PROMPT_LEN = 5


def chunk_of_kv_versions(
    versions: Sequence[int], *, recomputed: bool | None = False, lora: int | None = None, index: int = 0
) -> Chunk:
    """Return a chunk whose tokens have one version."""
    [version] = set(versions)
    return Chunk(
        request_id="r",
        attempt=0,
        child=0,
        chunk_index=index,
        weight_version=version,
        token_ids_data=bytes(4 * len(versions)),
        lora_version=lora,
        kv_recomputed=recomputed,
    )


def simulated(versions: Sequence[int], recomputed: Sequence[bool]) -> tuple[list[int], list[bool]]:
    """Return the version of each KV position at the end, and whether KV was mixed for each token, token by token."""
    kv: list[int] = []
    mixed = []
    for number, (version, is_anew) in enumerate(zip(versions, recomputed, strict=True)):
        if number == 0 or is_anew:
            kv = [version] * (PROMPT_LEN + number)
        else:
            kv.append(version)
        mixed.append(set(kv) != {version})
    return kv, mixed


@pytest.mark.proves("P17")
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 3)), min_size=1, max_size=8))
def test_spans_and_mask_equal_a_simulation_token_by_token(steps: list[tuple[int, bool, int]]) -> None:
    """Spans and mask equal a simulation token by token, for any updates and preemptions."""
    chunks = [chunk_of_kv_versions([version] * count, recomputed=is_anew) for version, is_anew, count in steps]
    versions = [version for version, _, count in steps for _ in range(count)]
    marks = [is_anew and i == 0 for _, is_anew, count in steps for i in range(count)]

    arrays = kv_arrays(chunks, PROMPT_LEN)
    kv, mixed = simulated(versions, marks)

    spans = arrays["kv_version_spans"]
    starts = [start for start, _ in spans]
    found = [
        version for (start, version), end in zip(spans, [*starts[1:], len(kv)], strict=True) for _ in range(start, end)
    ]
    assert found == kv
    assert all(one[1] != other[1] for one, other in pairwise(spans))
    assert arrays["kv_mixed"].tolist() == mixed
    assert arrays["kv_lora_version_spans"] is None


def test_adapters_have_their_own_spans() -> None:
    """A new version of the adapter has its own span and mixes KV as new weights do."""
    arrays = kv_arrays([chunk_of_kv_versions([1, 1], lora=3), chunk_of_kv_versions([1], lora=4)], PROMPT_LEN)

    assert arrays["kv_version_spans"] == ((0, 1),)
    assert arrays["kv_lora_version_spans"] == ((0, 3), (PROMPT_LEN + 1, 4))
    assert arrays["kv_mixed"].tolist() == [False, False, True]


def test_spans_are_unknown_if_a_worker_does_not_report_recomputations() -> None:
    """Without the field, as from an earlier release, the spans are unknown until all KV is recomputed."""
    silent = kv_arrays(
        [chunk_of_kv_versions([1, 1]), chunk_of_kv_versions([2], recomputed=None), chunk_of_kv_versions([2])],
        PROMPT_LEN,
    )
    later = kv_arrays(
        [chunk_of_kv_versions([1, 1], recomputed=None), chunk_of_kv_versions([2], recomputed=True)], PROMPT_LEN
    )
    empty = kv_arrays([], PROMPT_LEN)

    assert silent == dict.fromkeys(("kv_version_spans", "kv_lora_version_spans", "kv_mixed"))
    assert (later["kv_version_spans"], later["kv_mixed"]) == (((0, 2),), None)
    assert empty["kv_version_spans"] is None
    assert empty["kv_mixed"].tolist() == []


def test_a_chunk_starts_at_each_step_that_recomputed_kv() -> None:
    """A chunk starts at each step that recomputed KV, and only this chunk reports the recomputation."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=None, start=0, segment_bytes=20)
    writer.reports_kv = True
    for number in range(8):
        writer.append_step(RequestStep(key="r", token_ids=np.full(1, number, np.int32), kv_recomputed=number == 2), 1)
    chunks = []
    while writer.has_unsent:
        chunks.append(writer.next_chunk())

    assert [one.token_ids.tolist() for one in chunks if one] == [[0, 1], [2, 3, 4, 5, 6], [7]]
    assert [one.kv_recomputed for one in chunks if one] == [False, True, False]


def test_the_field_is_absent_if_the_engine_does_not_report_recomputations() -> None:
    """If the engine does not report recomputations, the field is absent."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=None, start=0, segment_bytes=1 << 20)
    writer.append_step(RequestStep(key="r", token_ids=np.zeros(1, np.int32), finish_reason=FinishReason.LENGTH), 1)
    end = writer.next_chunk()

    assert end.kv_recomputed is None


def test_the_first_chunk_of_a_later_attempt_reports_recomputed_kv() -> None:
    """The first chunk of a later attempt reports recomputed KV, if its worker reports recomputations."""
    request = GenerateRequest(
        prompt_token_ids=[1] * PROMPT_LEN,
        sampling=SamplingParams(max_tokens=6, temperature=0.0, logprobs=None),
        request_id="r",
        return_routed_experts=False,
    )
    for reported, expected in ((False, ((0, 2),)), (None, None)):
        stream = ResponseStream(request, child=0, attempt=0, keep=True)
        stream.add(chunk_of_kv_versions([1, 1]))
        stream.next_attempt()
        [first] = stream.add(chunk_of_kv_versions([2], recomputed=reported))
        stream.add(chunk_of_kv_versions([2], recomputed=reported, index=1))

        assert first.kv_recomputed is (None if reported is None else True)
        assert stream.arrays()["kv_version_spans"] == expected
