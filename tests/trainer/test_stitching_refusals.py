"""Turns that do not form one sequence raise an error with the position and leave the stitcher unchanged."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollbus import GenerateRequest, Generation
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, request_error
from rollbus.trainer import PackError, Stitcher, StitchError
from tests.trainer.builders import assert_same, rows_of, spoken

WRONG: dict[str, tuple[dict[str, Any], str]] = {
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


@pytest.mark.parametrize("wrong", WRONG)
def test_a_turn_that_does_not_fit_is_named_and_leaves_the_stitcher_unchanged(wrong: str) -> None:
    """The error names the turn and the position, and the correct turn can still be added."""
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
