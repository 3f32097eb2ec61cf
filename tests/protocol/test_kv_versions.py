"""The weight versions of a result's KV, derived from the tokens' versions and from recomputations of the KV."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.chunk_writer import ChunkWriter
from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.bus.protocol.stream.result_arrays import kv_arrays
from rollbus.schemas.chunk import Chunk, FinishReason
from rollbus.schemas.messages import RequestKey
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams

PROMPT_LEN = 5


def chunk(
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
    chunks = [chunk([version] * count, recomputed=is_anew) for version, is_anew, count in steps]
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


def test_after_an_update_the_kv_of_the_last_old_token_has_the_new_version() -> None:
    """The KV of the last old token is computed when the first new token is sampled, so it has the new version."""
    arrays = kv_arrays([chunk([1, 1, 1]), chunk([2, 2])], PROMPT_LEN)

    assert arrays["kv_version_spans"] == ((0, 1), (PROMPT_LEN + 2, 2))
    assert arrays["kv_mixed"].tolist() == [False, False, False, True, True]


def test_adapters_have_their_own_spans() -> None:
    """A new version of the adapter has its own span and mixes KV as new weights do."""
    arrays = kv_arrays([chunk([1, 1], lora=3), chunk([1], lora=4)], PROMPT_LEN)

    assert arrays["kv_version_spans"] == ((0, 1),)
    assert arrays["kv_lora_version_spans"] == ((0, 3), (PROMPT_LEN + 1, 4))
    assert arrays["kv_mixed"].tolist() == [False, False, True]


def test_spans_are_unknown_if_a_worker_does_not_report_recomputations() -> None:
    """Without the field, as from an earlier release, the spans are unknown until all KV is recomputed."""
    silent = kv_arrays([chunk([1, 1]), chunk([2], recomputed=None), chunk([2])], PROMPT_LEN)
    later = kv_arrays([chunk([1, 1], recomputed=None), chunk([2], recomputed=True)], PROMPT_LEN)
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
        writer.add_step(RequestStep(key="r", token_ids=np.full(1, number, np.int32), kv_recomputed=number == 2), 1)
    chunks = []
    while writer.has_unsent:
        chunks.append(writer.next_chunk())

    assert [one.token_ids.tolist() for one in chunks if one] == [[0, 1], [2, 3, 4, 5, 6], [7]]
    assert [one.kv_recomputed for one in chunks if one] == [False, True, False]


def test_the_field_is_absent_if_the_engine_does_not_report_recomputations() -> None:
    """If the engine does not report recomputations, the field is absent."""
    writer = ChunkWriter(RequestKey("r"), prompt_len=2, routing=None, start=0, segment_bytes=1 << 20)
    writer.add_step(RequestStep(key="r", token_ids=np.zeros(1, np.int32), finish_reason=FinishReason.LENGTH), 1)
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
        stream.add(chunk([1, 1]))
        stream.next_attempt()
        [first] = stream.add(chunk([2], recomputed=reported))
        stream.add(chunk([2], recomputed=reported, index=1))

        assert first.kv_recomputed is (None if reported is None else True)
        assert stream.arrays()["kv_version_spans"] == expected
