"""The turns of a conversation give the sequence that they were cut from, or an error that says where they do not."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import Generation
from schemas.chunk import FinishReason
from tests.trainer.builders import FakeTurn, rows_of, sample_of, turn_of
from trainer import Sample, Stitcher, StitchError


def assert_same(found: Sample, wanted: Sample) -> None:
    """Two samples with the same contents, of which the first is writable."""
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions"):
        assert np.array_equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("token_ids", "loss_mask", "logprobs", "weight_versions", "routed_experts"):
        assert getattr(found, name) is None or getattr(found, name).flags.writeable, name
    assert found.start == wanted.start
    if wanted.routed_experts is None:
        assert found.routed_experts is None
    else:
        assert found.routed_experts is not None
        assert np.array_equal(found.routed_experts, wanted.routed_experts)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Sample, list[tuple[int, FakeTurn]]]:
    """A whole sample and its turns with the lengths of their prompts: of any length, zero too, from any start."""
    at = 0
    prompts: list[int] = []
    ends: list[int] = []
    for _ in range(draw(st.integers(1, 5))):
        prompts.append(at := at + draw(st.integers(0 if ends else 1, 4)))
        ends.append(at := at + draw(st.integers(0, 4)))
    mask = np.zeros(at, np.bool_)
    for prompt, end in zip(prompts, ends, strict=True):
        mask[prompt:end] = True
    dtype = draw(st.sampled_from([None, "u1", "u2"]))
    whole = sample_of(at, routed=dtype, loss_mask=mask, weight_versions=np.where(mask, 7, -1).astype(np.int32),
                      logprobs=np.where(mask, -1.5, 0).astype(np.float32), advantage=0.0)  # fmt: skip
    turns, covered = [], 0
    for prompt, end in zip(prompts, ends, strict=True):
        turn = turn_of(whole, prompt, end, start=draw(st.integers(0, covered)))
        rows = turn.routed_experts
        if rows is not None and rows.max(initial=0) < 256 and draw(st.booleans()):
            turn.routed_experts = rows.astype(np.uint8)
        covered = end - 1 if end > prompt else covered
        turns.append((prompt, turn))
    return whole, turns


def sampled_part(whole: Sample) -> Sample:
    """A sample up to its last sampled token; all of it, without routing, if nothing was sampled."""
    if not whole.loss_mask.any():
        return sample_of(len(whole), routed=None, token_ids=whole.token_ids, loss_mask=whole.loss_mask,
                         logprobs=whole.logprobs, weight_versions=whole.weight_versions)  # fmt: skip
    size = int(np.flatnonzero(whole.loss_mask)[-1]) + 1
    rows = whole.routed_experts
    return Sample(
        token_ids=whole.token_ids[:size],
        loss_mask=whole.loss_mask[:size],
        logprobs=whole.logprobs[:size],
        weight_versions=whole.weight_versions[:size],
        routed_experts=None if rows is None else rows[: size - 1],
    )


@given(conversations())
def test_any_turns_come_back(case: tuple[Sample, list[tuple[int, FakeTurn]]]) -> None:
    """A sequence cut into turns of any length, whose rows overlap by any number, comes back as it was."""
    whole, turns = case
    stitcher = Stitcher()
    for prompt_len, turn in turns:
        stitcher.add(whole.token_ids[:prompt_len].tolist(), turn)

    assert_same(stitcher.sample(), sampled_part(whole))


def two_turns(first: FakeTurn, second: FakeTurn, whole: Sample) -> Sample:
    """What the two turns of `spoken` become."""
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)
    stitcher.add(whole.token_ids[:8], second)
    return stitcher.sample()


def spoken(dtype: str = "u1") -> tuple[Sample, FakeTurn, FakeTurn]:
    """Prompt 0 to 2, sampled 3 to 5, a tool's 6 and 7, sampled 8 to 10."""
    mask = np.isin(np.arange(11), [3, 4, 5, 8, 9, 10])
    whole = sample_of(
        11, routed=dtype, loss_mask=mask, weight_versions=np.where(mask, 7, -1).astype(np.int32), advantage=0.0,
        logprobs=np.where(mask, -1, 0).astype(np.float32),
    )  # fmt: skip
    return whole, turn_of(whole, 3, 6), turn_of(whole, 8, 11, start=5)


def test_the_boundary_row_is_the_second_turns() -> None:
    """The last token of a turn gets the row that the next turn computed: once, not a copy, zeros, or appended twice."""
    whole, first, second = spoken()

    found = two_turns(first, second, whole)

    assert first.routed_experts is not None
    assert second.routed_experts is not None
    assert found.routed_experts is not None
    assert len(first.routed_experts) == 5
    assert len(found.routed_experts) == 10
    assert np.array_equal(found.routed_experts[5], second.routed_experts[0])
    assert_same(found, whole)


def test_id_300_survives_the_boundary() -> None:
    """A u2 turn after a u1 turn: everything is u2, and no id is cut to eight bits."""
    whole, first, second = spoken()
    assert second.routed_experts is not None
    second.routed_experts = second.routed_experts.astype(np.uint16)
    second.routed_experts[0, 0] = [300, 301, 302]

    found = two_turns(first, second, whole).routed_experts

    assert found is not None
    assert found.dtype == np.uint16
    assert found[5, 0].tolist() == [300, 301, 302]
    assert np.array_equal(found[:5], first.routed_experts)  # type: ignore[arg-type]


def test_a_logprob_of_minus_infinity_is_legal() -> None:
    """Engines round a probability to 0 at times, and the wire carries -inf: no reason to lose a conversation."""
    whole, first, second = spoken()
    assert first.logprobs is not None
    first.logprobs[1] = -np.inf

    assert two_turns(first, second, whole).logprobs[4] == -np.inf


def test_next_start_is_what_to_ask_for() -> None:
    """`next_start` is the boundary: it moves with turns that sampled, and not with those that did not."""
    whole, first, second = spoken()
    stitcher = Stitcher()

    assert stitcher.next_start == 0
    stitcher.add(whole.token_ids[:3], first)
    assert stitcher.next_start == 5
    stitcher.add(whole.token_ids[:7], turn_of(whole, 7, 7))
    assert stitcher.next_start == 5
    stitcher.add(whole.token_ids[:8], second)
    assert stitcher.next_start == 10
    assert stitcher.num_tokens == 11


def test_a_first_turn_may_have_no_rows_at_all() -> None:
    """With start == Lp and one token sampled: no rows, and the next turn brings all that are missing."""
    whole, _, second = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], turn_of(whole, 3, 4, start=3))

    assert stitcher.sample().start == 3
    assert stitcher.sample().routed_experts is not None
    stitcher.add(whole.token_ids[:8], replace(second, routed_experts=whole.routed_experts[2:10], start=2))  # type: ignore[index]
    assert stitcher.sample().start == 2


def test_a_later_turn_can_make_routing_whole() -> None:
    """A turn without routing is no loss if a later one brings its rows; else it is an error that names it."""
    whole, first, second = spoken()
    first.routed_experts = None
    assert whole.routed_experts is not None

    found = two_turns(first, replace(second, routed_experts=whole.routed_experts[2:10], start=2), whole)

    assert (found.start, len(found)) == (2, 11)
    with pytest.raises(StitchError, match=r"turn 1: rows begin at position 5, and those of positions 2 to 4 are miss"):
        two_turns(first, second, whole)
    whole, first, second = spoken()
    second.routed_experts = None
    with pytest.raises(StitchError, match=r"turn 1: no routing for positions 5 to 9, which other turns have"):
        two_turns(first, second, whole)


def test_recomputed_rows_that_differ() -> None:
    """Rows that a later turn recomputed are refused, or the first or last count, as was chosen."""
    whole, first, second = spoken()
    assert first.routed_experts is not None
    assert whole.routed_experts is not None
    again = whole.routed_experts.copy()
    again[2] = rows_of(1, seed=99)[0]
    second = replace(second, routed_experts=again, start=0)

    with pytest.raises(StitchError, match="turn 1: its row for position 2, layer 0, disagrees"):
        two_turns(first, second, whole)
    for overlap, row in (("first", first.routed_experts[2]), ("last", again[2])):
        stitcher = Stitcher(overlap=overlap)  # type: ignore[arg-type]
        stitcher.add(whole.token_ids[:3], first)
        stitcher.add(whole.token_ids[:8], second)
        found = stitcher.sample().routed_experts
        assert found is not None
        assert np.array_equal(found[2], row)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({"routed_experts": rows_of(4), "start": 6}, "turn 1: rows begin at position 6, and those of positions 5"),
    "top_k": ({"routed_experts": rows_of(5, top_k=2)}, "turn 1, from position 5: 2 layers of top-2, after"),
    "layers": ({"routed_experts": rows_of(5, layers=1)}, "turn 1, from position 5: 1 layers of top-3, after"),
    "row too few": ({"routed_experts": rows_of(4)}, "turn 1: 4 rows for 8 prompt and 3 sampled tokens from start 5"),
    "late start": ({"start": 9, "routed_experts": rows_of(1)}, "turn 1: start is 9; allowed: 0 to 8"),
    "no logprobs": ({"logprobs": None}, "turn 1: no logprobs, from position 8 on"),
    "logprobs": ({"logprobs": np.zeros(2, np.float32)}, "turn 1: 2 logprobs for 3 tokens"),
    "nan": ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "turn 1: logprobs of sampled token 1 is nan"),
    "infinite": ({"logprobs": np.array([0, 0, np.inf], np.float32)}, "turn 1: logprobs of sampled token 2 is inf"),
    "versions": ({"weight_versions": np.zeros(4, np.int32)}, "turn 1: 4 weight_versions for 3 tokens"),
    "unversioned": ({"weight_versions": np.array([0, 0, -1], np.int32)}, "sampled token 2 is -1; allowed: 0 and above"),
    "floats": ({"token_ids": np.zeros(3)}, "turn 1: turn tokens are float64"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_turn_that_does_not_fit_is_named_and_leaves_no_trace(wrong: str) -> None:
    """The error says which turn and where; the right turn can still be added."""
    fields, message = WRONG[wrong]
    whole, first, second = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)

    with pytest.raises(StitchError) as caught:
        stitcher.add(whole.token_ids[:8], replace(second, **fields))

    assert message in str(caught.value)
    assert "allowed: " in str(caught.value)
    stitcher.add(whole.token_ids[:8], second)
    assert_same(stitcher.sample(), whole)


def test_a_prompt_that_does_not_follow_is_named() -> None:
    """Re-tokenized history, a shortened prompt, tokens out of range: an error with the turn and the position."""
    whole, first, second = spoken()
    changed = whole.token_ids[:8].copy()
    changed[4] = 9
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)

    def refused(prompt: Any) -> str:
        with pytest.raises(StitchError) as caught:
            stitcher.add(prompt, second)
        return str(caught.value)

    assert "turn 1: its prompt has token 9 at position 4, and the sequence so far 104" in refused(changed)
    assert "turn 1: its prompt ends at position 5; allowed: a prompt that begins with all 6" in refused(changed[:5] * 0
        + whole.token_ids[:5])  # fmt: skip
    assert "turn 1: prompt token 1 is 4294967396; allowed: 0 to" in refused([100, 100 + 2**32])
    assert "turn 1: prompt tokens are float64 of shape (2,); allowed: integers" in refused([0.5, 1.0])
    with pytest.raises(StitchError, match="turn 0: tokens were sampled after an empty prompt"):
        Stitcher().add([], replace(first, routed_experts=None))
    with pytest.raises(StitchError, match="there are no turns"):
        Stitcher().sample()


def test_many_turns_are_copied_once() -> None:
    """Over 200 turns nothing of the routing is copied until the end, and then once, whatever each turn brings."""
    whole = sample_of(2001, routed=None, loss_mask=np.arange(2001) % 10 > 4, advantage=0.0)
    rows = rows_of(2000, layers=8, top_k=4)
    bounds = [(at + 5, at + 10) for at in range(0, 2000, 10)]
    turns = []
    for prompt, end in bounds:
        turn = turn_of(whole, prompt, end, start=None)
        turn.start = max(prompt - 6, 0)
        turn.routed_experts = rows[turn.start : end - 1]
        turns.append((whole.token_ids[:prompt], turn))
    stitcher = Stitcher()
    tracemalloc.start()
    try:
        for prompt_ids, turn in turns:
            stitcher.add(prompt_ids, turn)
        added, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sample = stitcher.sample()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert sample.routed_experts is not None
    assert np.array_equal(sample.routed_experts, rows[:1999])
    assert added < 200 * 1500
    assert peak - added < 1.2 * sample.routed_experts.nbytes + 40 * len(sample)


def test_the_rows_of_a_single_turn_are_not_copied() -> None:
    """From a generation to a tensor is one copy, that of `pack`: what came in one piece is handed on as it is."""
    whole, first, _ = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)

    assert np.shares_memory(stitcher.sample().routed_experts, first.routed_experts)


def test_turns_that_bring_all_rows_again_are_not_kept() -> None:
    """What an earlier turn had brought is compared and let go: memory grows with the sequence, not with its square."""
    rows = rows_of(1000, layers=24, top_k=8)
    whole = sample_of(1001, routed=None, advantage=0.0)
    stitcher = Stitcher()
    tracemalloc.start()
    try:
        for end in range(25, 1001, 25):
            turn = turn_of(whole, end - 12, end, start=None)
            turn.routed_experts = rows[: end - 1].copy()
            stitcher.add(whole.token_ids[: end - 12], turn)
        del turn
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 2 * rows.nbytes


def test_a_generation_is_a_turn() -> None:
    """What the bus's client returns is added as it is."""
    whole, first, _ = spoken()
    stitcher = Stitcher()

    stitcher.add(
        whole.token_ids[:3],
        Generation(
            request_id="r", child=0, prompt_len=3, finish_reason=FinishReason.LENGTH, token_ids=first.token_ids,
            logprobs=first.logprobs, weight_versions=first.weight_versions, start=first.start,
            routed_experts=first.routed_experts,
        ),
    )  # fmt: skip

    assert len(stitcher.sample(advantage=2.0)) == 6
    assert stitcher.sample(advantage=2.0).advantage == 2.0
