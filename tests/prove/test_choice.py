"""Tokens drawn from random distributions, soundly or with a sampling parameter that is left on."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.cli.prove.agreement import judge_agreement
from rollbus.frontend.cli.prove.evidence import Evidence, Sampled
from rollbus.frontend.cli.prove.verdicts import Verdict
from tests.prove.test_judgement import causes_of

VOCAB, TOP, ANSWER, PROMPTS = 64, 20, 32, 24
TOKEN = 7
Change = Callable[[Any, Any], Any]
"""Returns other logits from logits f[VOCAB], and True for each token that was there before."""


def draw_answer(rng: Any, prompt: int, change: Change, *, greedy: bool) -> Sampled:
    """Return an answer to a prompt. All answers to it have the same logits at a position, whatever their text is."""
    weights = np.random.default_rng(prompt)
    ids = weights.integers(0, VOCAB, 12).tolist()
    logprobs = weights.normal(0, 2, (ANSWER, VOCAB))
    logprobs -= np.log(np.exp(logprobs).sum(1, keepdims=True))
    top_ids = np.argsort(-logprobs)[:, :TOP]
    for row in logprobs:
        seen = np.isin(np.arange(VOCAB), ids)
        ids.append(int((change(row + 5, seen) + (0 if greedy else rng.gumbel(size=VOCAB))).argmax()))
    return Sampled(
        arm="batch" if greedy else "sampled",
        prompt=prompt,
        prompt_len=12,
        token_ids=np.array(ids, "i4"),
        logprobs=logprobs[np.arange(ANSWER), ids[12:]].astype("f4"),
        top_ids=top_ids.astype("i4"),
        top_logprobs=np.take_along_axis(logprobs, top_ids, 1).astype("f4"),
        is_neutral=not greedy,
    )


def draw(seed: int, change: Change = lambda logits, _: logits, *, same: bool = False, greedy: bool = True) -> Evidence:
    """Return one greedy answer and four samples of each prompt.

    Args:
        same: True: all samples have the same random numbers.
        greedy: True: the change is also one of greedy answers.
    """
    rng = np.random.default_rng(seed)
    sampled = [
        draw_answer(np.random.default_rng(5) if same else rng, prompt, change if greedy or number else unchanged,
                    greedy=not number)
        for prompt in range(PROMPTS * seed, PROMPTS * (seed + 1))
        for number in range(5)
    ]  # fmt: skip
    return Evidence(sampled=sampled, reference_refusal="none")


def unchanged(logits: Any, _seen: Any) -> Any:
    """Leave the logits as they are."""
    return logits


def bias_by(value: float) -> Change:
    """Return the change of a logit bias."""
    return lambda logits, _: logits + value * (np.arange(VOCAB) == TOKEN)


def penalise(logits: Any, seen: Any) -> Any:
    """Apply a repetition penalty, as vLLM does."""
    return np.where(seen, np.where(logits > 0, logits / 2, logits * 2), logits)


@pytest.mark.parametrize("seed", range(20))
def test_sound_answers_raise_no_alarm(seed: int) -> None:
    """No test of the choice of tokens fails by chance."""
    outcome = judge_agreement(draw(seed), "float32")
    assert outcome.verdict in (Verdict.OK, Verdict.NOT_RUN), outcome


FAULTS: dict[str, tuple[Change, str]] = {
    "penalty": (penalise, "a repetition, presence or frequency penalty"),
    "bias": (bias_by(3), f"a logit bias on token {TOKEN}"),
    "ban": (bias_by(-100), f"a logit bias on token {TOKEN}"),
    "cold": (lambda logits, _: logits / 0.7, "a temperature below 1"),
    "hot": (lambda logits, _: logits / 1.4, "a temperature above 1"),
}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_parameter_that_is_left_on_is_named(fault: str, greedy: bool) -> None:
    """Raw log probabilities do not show it. It is found without a reference, for all requests or for sampled ones."""
    change, cause = FAULTS[fault]
    outcome = judge_agreement(draw(1, change, greedy=greedy), "float32")
    assert outcome.verdict is Verdict.WRONG
    assert cause in causes_of(outcome)


def test_one_seed_for_all_is_named() -> None:
    """Samples of one prompt begin alike. Nothing else is named, because no other count is right then."""
    outcome = judge_agreement(draw(1, same=True), "float32")
    assert outcome.verdict is Verdict.WRONG
    assert causes_of(outcome).startswith("sampling parameters: samples of one prompt begin with the same 32 tokens")
    assert " | " not in causes_of(outcome)


def test_a_bias_that_leaves_one_token_is_no_seed() -> None:
    """All samples are alike then, but greedy answers name the token."""
    outcome = judge_agreement(draw(1, bias_by(100)), "float32")
    assert f"a logit bias on token {TOKEN}" in causes_of(outcome)
    assert "seed" not in causes_of(outcome)
