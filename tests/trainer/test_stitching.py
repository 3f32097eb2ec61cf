"""How the turns of a conversation become one sample, and the checks of a sample."""

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollbus import GenerateRequest, Generation
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, request_error
from rollbus.trainer import PackError, Sample, Stitcher, StitchError, pack
from tests.trainer.models import FakeTurn, assert_same, rows_of, sample_of, spoken, turn_of


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Sample, list[tuple[int, FakeTurn]]]:
    """Draw a sample and its turns with prompt lengths; turns have any length, including 0, and any start."""
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
    """Return a sample up to its last sampled token; without sampled tokens, the whole sample without routed experts."""
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


@pytest.mark.proves("P23")
@given(conversations())
def test_a_sequence_cut_into_any_turns_is_restored(case: tuple[Sample, list[tuple[int, FakeTurn]]]) -> None:
    """A sequence cut into turns of any length, with any overlap of rows, is restored unchanged."""
    whole, turns = case
    stitcher = Stitcher()
    for prompt_len, turn in turns:
        stitcher.add(whole.token_ids[:prompt_len].tolist(), turn)

    assert_same(stitcher.sample(), sampled_part(whole))


def two_turns(first: FakeTurn, second: FakeTurn, whole: Sample) -> Sample:
    """Return the stitched sample of the two turns of `spoken`."""
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)
    stitcher.add(whole.token_ids[:8], second)
    return stitcher.sample()


@pytest.mark.proves("P23")
def test_id_300_survives_the_boundary() -> None:
    """If a u2 turn follows a u1 turn, all rows are u2, and no id is cut to eight bits."""
    whole, first, second = spoken()
    second.routed_experts = second.routed_experts.astype(np.uint16)
    second.routed_experts[0, 0] = [300, 301, 302]

    found = two_turns(first, second, whole).routed_experts

    assert found.dtype == np.uint16
    assert found[5, 0].tolist() == [300, 301, 302]
    assert np.array_equal(found[:5], first.routed_experts)


def test_a_logprob_of_minus_infinity_is_legal() -> None:
    """A logprob of -inf is accepted, because engines may round a probability to 0."""
    whole, first, second = spoken()
    first.logprobs[1] = -np.inf

    assert two_turns(first, second, whole).logprobs[4] == -np.inf


def test_next_start_is_the_position_of_the_first_missing_row() -> None:
    """`next_start` is the position of the first missing row; only turns with sampled tokens move it."""
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


@given(conversations(), st.integers(0, 4))
def test_rows_from_next_start_are_all_that_training_needs(
    case: tuple[Sample, list[tuple[int, FakeTurn]]], late: int
) -> None:
    """If each turn has its rows from `next_start` on, the sample can be packed, regardless of the first turn's start.

    The only exception is a first turn whose start equals its prompt length: the row before its start is missing, and
    `next_start` is the position of this row.
    """
    whole, turns = case
    stitcher, asked = Stitcher(), late
    for prompt_len, turn in turns:
        end = prompt_len + len(turn.token_ids)
        stitcher.add(whole.token_ids[:prompt_len], turn_of(whole, prompt_len, end, start=min(asked, prompt_len)))
        asked = stitcher.next_start if end > prompt_len else asked
    sample = stitcher.sample()
    if len(sample) < 2:
        return

    try:
        pack([sample], max_tokens=100)
    except PackError as error:
        assert f"no row for position {stitcher.next_start}, whose prediction is trained" in str(error)


def test_next_start_precedes_a_first_turn_that_starts_at_its_prompt_length() -> None:
    """If the first turn starts at its prompt length, `next_start` is the row before it.

    This row predicts the first sampled token. Rows from there on are compared.
    """
    whole, first, second = spoken()
    rows = whole.routed_experts
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], replace(first, routed_experts=rows[3:5], start=3))

    assert stitcher.next_start == 2
    with pytest.raises(StitchError, match="rows begin at position 5, and that of position 2 is missing; allowed: a st"):
        stitcher.add(whole.token_ids[:8], second)
    stitcher.add(whole.token_ids[:8], replace(second, routed_experts=rows[2:], start=2))
    assert stitcher.next_start == 10
    assert stitcher.sample().start == 2
    pack([stitcher.sample()], max_tokens=10)


def test_a_custom_turn_needs_neither_error_nor_prompt_len() -> None:
    """Custom turn objects need neither `error` nor `prompt_len`."""
    whole, first, _ = spoken()
    fields = {name: value for name, value in vars(first).items() if name not in ("error", "prompt_len")}
    stitcher = Stitcher()

    stitcher.add(whole.token_ids[:3], SimpleNamespace(**fields))

    assert len(stitcher.sample()) == 6


def test_a_first_turn_may_have_no_rows_at_all() -> None:
    """A first turn with start == Lp and one sampled token has no rows; the next turn can supply all missing rows."""
    whole, _, second = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], turn_of(whole, 3, 4, start=3))

    assert stitcher.sample().start == 3
    assert stitcher.sample().routed_experts is not None
    stitcher.add(whole.token_ids[:8], replace(second, routed_experts=whole.routed_experts[2:10], start=2))
    assert stitcher.sample().start == 2


def test_a_later_turn_can_supply_the_rows_of_an_earlier_turn() -> None:
    """A later turn can supply the rows of a turn without routed experts; otherwise the turn is named in an error."""
    whole, first, second = spoken()
    first.routed_experts = None

    found = two_turns(first, replace(second, routed_experts=whole.routed_experts[2:10], start=2), whole)

    assert (found.start, len(found)) == (2, 11)
    with pytest.raises(StitchError, match=r"turn 1: rows begin at position 5, and that of position 2 is missing"):
        two_turns(first, second, whole)
    whole, first, second = spoken()
    second.routed_experts = None
    with pytest.raises(StitchError, match=r"turn 1: no routed experts from position 5 on, which other turns have"):
        two_turns(first, second, whole)


def test_recomputed_rows_that_differ_are_rejected_ignored_or_preferred() -> None:
    """Different rows of a later turn for the same positions are rejected, ignored or preferred, as chosen."""
    whole, first, second = spoken()
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
        assert np.array_equal(found[2], row)


def test_many_turns_are_copied_once() -> None:
    """200 turns copy no routed experts before the end, and then copy them once, also with overlapping rows."""
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

    assert np.array_equal(sample.routed_experts, rows[:1999])
    assert added < 200 * 1500
    assert peak - added < 1.2 * sample.routed_experts.nbytes + 40 * len(sample)


def test_the_rows_of_a_single_turn_are_not_copied() -> None:
    """The rows of a single turn are not copied before `pack`."""
    whole, first, _ = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)

    assert np.shares_memory(stitcher.sample().routed_experts, first.routed_experts)


def test_repeated_rows_of_earlier_turns_are_freed() -> None:
    """Repeated rows of earlier turns are compared and freed, so memory grows with the sequence, not with its square."""
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
    """A `Generation` of the client can be added directly."""
    whole, first, _ = spoken()
    stitcher = Stitcher()

    stitcher.add(
        whole.token_ids[:3],
        Generation(
            request=GenerateRequest(prompt_token_ids=whole.token_ids[:3]), request_id="r", child=0, prompt_len=3,
            finish_reason=FinishReason.LENGTH, token_ids=first.token_ids,
            logprobs=first.logprobs, weight_versions=first.weight_versions, start=first.start,
            routed_experts=first.routed_experts,
        ),
    )  # fmt: skip

    assert len(stitcher.sample(advantage=2.0)) == 6
    assert stitcher.sample(advantage=2.0).advantage == 2.0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"token_ids": [1, 2, 3]}, "token_ids is list; allowed: a numpy array of int32"),
    "int64": ({"token_ids": np.arange(6)}, "token_ids is int64 of shape (6,)"),
    "negative": ({"token_ids": np.array([0, 1, -1, 3, 4, 5], np.int32)}, "token_ids[2] is -1"),
    "mask length": ({"loss_mask": np.zeros(5, np.bool_)}, "loss_mask has 5 entries for 6 tokens"),
    "float64": ({"logprobs": np.zeros(6)}, "logprobs is float64"),
    "nan": ({"logprobs": np.array([0, 0, np.nan, 0, 0, 0], np.float32)}, "logprobs[2] is nan"),
    "unversioned": ({"weight_versions": np.full(6, -1, np.int32)}, "weight_versions[1] is -1"),
    "first token": ({"loss_mask": np.ones(6, np.bool_)}, "loss_mask is on at position 0"),
    "signed rows": (
        {"routed_experts": rows_of(5).astype(np.int16)},
        "routed_experts is int16 of shape (5, 2, 3)",
    ),
    "flat rows": ({"routed_experts": rows_of(5)[:, 0]}, "routed_experts is uint8 of shape (5, 3)"),
    "row too many": ({"routed_experts": rows_of(6)}, "6 rows for 6 tokens from start 0; allowed: S - 1 - start = 5"),
    "row too few": ({"routed_experts": rows_of(4)}, "has 4 rows for 6 tokens"),
    "late start": ({"routed_experts": rows_of(0), "start": 6}, "start is 6 of 6 tokens"),
    "advantages": ({"advantage": np.zeros(5, np.float32)}, "advantage has 5 entries for 6 tokens"),
    "a list of advantages": ({"advantage": [0.5] * 6}, "advantage is list; allowed: a number, or a numpy array of"),
    "no advantage": ({"advantage": None}, "advantage is NoneType"),
    "a tensor": ({"advantage": torch.tensor(0.5)}, "advantage is Tensor of torch.float32 of shape ()"),
    "beyond float32": ({"advantage": 1e39}, "advantage is 1e+39; allowed: finite numbers that float32 has"),
    "listed rows": ({"routed_experts": [[[1]]] * 5}, "routed_experts is list; allowed: a numpy array of uint8 or"),
    "torch rows": (
        {"routed_experts": torch.zeros(5, 2, 3, dtype=torch.uint16)},
        "routed_experts is Tensor of torch.uint16 of shape (5, 2, 3); allowed: a numpy array of uint8 or uint16",
    ),
    "infinite": ({"advantage": float("inf")}, "advantage is inf"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_fields_are_named(wrong: str) -> None:
    """Each contradiction is an error that names the field, the position or size, and the allowed values."""
    fields, message = WRONG[wrong]

    with pytest.raises(PackError) as caught:
        sample_of(6, **fields)

    assert message in str(caught.value)
    assert "allowed: " in str(caught.value)


def test_a_start_is_an_integer() -> None:
    """A `start` of type float is rejected, not rounded."""
    with pytest.raises(PackError, match="start is of type float; allowed: an integer, 0 and above"):
        replace(sample_of(6), start=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("advantage", [1, True, np.float32(0.5), np.int64(-1)])
def test_an_advantage_is_any_number(advantage: Any) -> None:
    """An advantage may be a Python or numpy number."""
    assert sample_of(6, advantage=advantage).advantage == advantage


def test_logprobs_may_be_nan_where_the_loss_mask_is_off() -> None:
    """Logprobs may be NaN where the loss mask is off."""
    logprobs = np.array([np.nan, np.nan, -1, -1, -1, -1], np.float32)

    assert len(sample_of(6, first=2, logprobs=logprobs)) == 6


def test_repr_has_sizes_only() -> None:
    """The repr of a sample shows its sizes, never its contents."""
    assert repr(sample_of(6, start=2, first=3)) == "<Sample tokens=6 trained=3 rows=3x2x3 start=2>"
    assert repr(sample_of(2, routed=None)) == "<Sample tokens=2 trained=1 rows=none start=0>"


# Turns that do not form one sequence raise an error with the position and leave the stitcher unchanged.


STITCHING_REFUSALS_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "gap": (
        {"routed_experts": rows_of(4), "start": 6},
        "turn 1: rows begin at position 6, and that of position 5 is miss",
    ),
    "top_k": ({"routed_experts": rows_of(5, top_k=2)}, "turn 1, from position 5: 2 layers of top-2, after"),
    "layers": ({"routed_experts": rows_of(5, layers=1)}, "turn 1, from position 5: 1 layers of top-3, after"),
    "row too few": ({"routed_experts": rows_of(4)}, "turn 1: 4 rows for 8 prompt and 3 sampled tokens from start 5"),
    "late start": ({"start": 9, "routed_experts": rows_of(1)}, "turn 1: start is 9; allowed: 0 to 8"),
    "no logprobs": ({"logprobs": None}, "turn 1: no logprobs, from position 8 on"),
    "logprobs": ({"logprobs": np.zeros(2, np.float32)}, "turn 1: logprobs has 2 entries for 3 tokens"),
    "nan": ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "turn 1: logprobs[1] is nan"),
    "infinite": ({"logprobs": np.array([0, 0, np.inf], np.float32)}, "turn 1: logprobs[2] is inf"),
    "versions": ({"weight_versions": np.zeros(4, np.int32)}, "turn 1: weight_versions has 4 entries for 3 tokens"),
    "unversioned": (
        {"weight_versions": np.array([0, 0, -1], np.int32)},
        "weight_versions[2] is -1; allowed: 0 and above",
    ),
    "another prompt": ({"prompt_len": 7}, "turn 1: sampled after 7 prompt tokens; allowed: the prompt given, of 8"),
    "listed logprobs": ({"logprobs": [0.0] * 3}, "turn 1: logprobs is list; allowed: a numpy array of float32"),
    "logprobs in columns": ({"logprobs": np.zeros((3, 1), np.float32)}, "turn 1: logprobs is float32 of shape (3, 1)"),
    "listed versions": ({"weight_versions": [7] * 3}, "turn 1: weight_versions is list"),
    "float versions": ({"weight_versions": np.full(3, 7.5)}, "turn 1: weight_versions is float64 of shape (3,)"),
    "wide versions": ({"weight_versions": np.full(3, 2**40)}, "turn 1: weight_versions is int64 of shape (3,)"),
    "float start": ({"start": 5.0}, "turn 1: start is of type float; allowed: an integer, 0 and above"),
    "torch rows": (
        {"routed_experts": torch.zeros(5, 2, 3, dtype=torch.uint16)},
        "turn 1: routed_experts is Tensor of torch.uint16 of shape (5, 2, 3); allowed: a numpy array of uint8 or",
    ),
    "no tokens at all": ({"token_ids": None}, "turn 1: token_ids is NoneType; allowed: integers in one dimension"),
    "floats": ({"token_ids": np.zeros(3)}, "turn 1: token_ids is float64"),
}


@pytest.mark.parametrize("wrong", STITCHING_REFUSALS_WRONG)
def test_a_turn_that_does_not_fit_is_named_and_leaves_the_stitcher_unchanged(wrong: str) -> None:
    """The error names the turn and the position, and the correct turn can still be added."""
    fields, message = STITCHING_REFUSALS_WRONG[wrong]
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
    """A prompt that does not continue the sequence, or has invalid tokens, is an error with turn and position."""
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
    assert "turn 1: prompt_token_ids[1] is 4294967396; allowed: 0 to" in refused([100, 100 + 2**32])
    assert "turn 1: prompt_token_ids is float64 of shape (2,); allowed: integers" in refused([0.5, 1.0])
    assert "turn 1: prompt_token_ids is generator; allowed: integers" in refused(token for token in (100, 101))
    assert "turn 1: prompt_token_ids is list; allowed: integers" in refused([[100], [101, 102]])
    with pytest.raises(StitchError, match="turn 0: tokens were sampled after an empty prompt"):
        Stitcher().add([], replace(first, routed_experts=None, prompt_len=0))
    with pytest.raises(StitchError, match="there are no turns"):
        Stitcher().sample()


def test_a_failed_generation_is_refused() -> None:
    """A failed generation is rejected with the reason of its failure, because its tokens are not a complete answer."""
    whole, first, _ = spoken()
    failed = Generation(
        request=GenerateRequest(prompt_token_ids=whole.token_ids[:3]), request_id="r", child=0, prompt_len=3,
        finish_reason=FinishReason.ERROR, token_ids=first.token_ids,
        logprobs=first.logprobs, weight_versions=first.weight_versions, start=first.start,
        routed_experts=first.routed_experts, error=request_error(ErrorCode.WORKER_LOST, "its lease expired"),
    )  # fmt: skip
    stitcher = Stitcher()

    with pytest.raises(StitchError, match="turn 0: its request failed: worker_lost: its lease expired; allowed: turns"):
        stitcher.add(whole.token_ids[:3], failed)
    stitcher.add(whole.token_ids[:3], first)


def test_an_invalid_advantage_is_a_pack_error() -> None:
    """An invalid advantage raises the error of the sample."""
    whole, first, _ = spoken()
    stitcher = Stitcher()
    stitcher.add(whole.token_ids[:3], first)

    with pytest.raises(PackError, match="advantage is nan"):
        stitcher.sample(advantage=float("nan"))
