"""Verdicts and causes, from evidence with the marks of a fault. Nothing runs here."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.cli.prove.agreement import judge_agreement
from rollbus.frontend.cli.prove.evidence import Evidence, Sampled
from rollbus.frontend.cli.prove.routing import judge_routing
from rollbus.frontend.cli.prove.stage import StageRefused
from rollbus.frontend.cli.prove.verdicts import Outcome, Verdict, judge, limit_of, limited, measured, worst
from tests.prove.made import PROMPT, made_evidence, move_engine, round_routers, scale_expert


def causes_of(*outcomes: Outcome) -> str:
    """Return all causes as one text."""
    return " | ".join(cause for outcome in outcomes for finding in outcome.findings for cause in finding.causes)


def judged(evidence: Evidence) -> tuple[Outcome, Outcome]:
    """Return the outcomes of both stages for an engine in float32."""
    return judge_agreement(evidence, "float32"), judge_routing(evidence, "float32")


@pytest.mark.parametrize("seed", range(20))
def test_a_sound_engine_is_ok(seed: int) -> None:
    """Rounding is `ok`, with and without experts, and no cause is named."""
    outcomes = *judged(made_evidence(seed)), judge_agreement(made_evidence(seed, dense=True), "float32")
    assert [outcome.verdict for outcome in outcomes] == [Verdict.OK] * 3
    assert causes_of(*outcomes) == ""


def of_head(evidence: Evidence) -> None:
    """Move all tokens, and no router."""
    rng = np.random.default_rng(1)
    move_engine(evidence, lambda one: rng.normal(0, 0.3, len(one.second)))


def of_layer(evidence: Evidence) -> None:
    """Move all tokens, and all routers from the second on."""
    of_head(evidence)
    for one in evidence.sampled:
        one.scores.others[::3, 1:] = 0.7


def of_cache(evidence: Evidence) -> None:
    """Move the answers with a cached prefix, and not the second pass."""
    rng = np.random.default_rng(1)
    for one in evidence.sampled:
        if one.cached:
            one.logprobs += rng.normal(0, 0.3, len(one.logprobs)).astype("f4")


def of_old_weights(evidence: Evidence) -> None:
    """Move the sampled tokens too: KV of other weights makes another distribution."""
    of_cache(evidence)
    for one in evidence.sampled:
        if one.arm == "sampled":
            one.cached = 32
            one.logprobs += np.float32(0.4)
            one.scores.above = np.minimum(one.scores.above + np.float32(0.3), 1)


def of_decode(evidence: Evidence) -> None:
    """Move all answers, and not the second pass."""
    rng = np.random.default_rng(1)
    for one in evidence.sampled:
        one.logprobs += rng.normal(0, 0.3, len(one.logprobs)).astype("f4")


def of_prefill(evidence: Evidence) -> None:
    """Move only the second pass."""
    rng = np.random.default_rng(1)
    for one in evidence.sampled:
        one.second += rng.normal(0, 0.3, len(one.second)).astype("f4")


def of_top_p(evidence: Evidence) -> None:
    """Leave the sampled tokens below a cut."""
    for one in evidence.sampled:
        if one.arm == "sampled":
            one.scores.above = np.minimum(one.scores.above, 0.85)


def of_processed(evidence: Evidence) -> None:
    """Leave out the tail in the log probabilities too, of sampled tokens only."""
    of_top_p(evidence)
    evidence.facts["logprobs_mode"] = "processed_logprobs"
    for one in evidence.sampled:
        if one.arm == "sampled":
            one.logprobs -= np.float32(np.log(0.9))


def of_processed_decode(evidence: Evidence) -> None:
    """Let decode be off where processed log probabilities may also hide a penalty."""
    of_decode(evidence)
    evidence.facts["logprobs_mode"] = "processed_logprobs"


def of_scale(evidence: Evidence) -> None:
    """Make all distributions sharper."""
    move_engine(evidence, lambda one: 0.1 * (one.second + 1.5))


FAULTS: dict[str, tuple[Callable[[Evidence], None], str]] = {
    "scaled expert": (lambda evidence: scale_expert(evidence, 0, 3), "expert 3 of layer 0"),
    "scaled expert of the last layer": (lambda evidence: scale_expert(evidence, 2, 5), "expert 5 of layer 2"),
    "routers in bfloat16": (round_routers, "dtype of the router"),
    "stale layer": (of_layer, "stale or wrong weights at layer 1"),
    "stale head": (of_head, "a tied head"),
    "stale KV": (of_cache, "stale KV: only answers with a cached prefix"),
    "stale KV of other weights": (of_old_weights, "stale KV: only answers with a cached prefix"),
    "decode": (of_decode, "the decode path"),
    "prefill": (of_prefill, "the prefill path"),
    "top-p": (of_top_p, "top-p is left on"),
    "top-p in processed log probabilities": (of_processed, "processed_logprobs"),
    "decode with processed log probabilities": (of_processed_decode, "the decode path"),
    "logit scale": (of_scale, "a scale of the logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_wrong_and_named(fault: str) -> None:
    """Each pattern of evidence is `wrong`, and the causes name it in the words of the field."""
    evidence = made_evidence()
    put_in, name = FAULTS[fault]
    put_in(evidence)
    outcomes = judged(evidence)
    assert worst(outcome.verdict for outcome in outcomes) is Verdict.WRONG
    assert name in causes_of(*outcomes)


def test_a_difference_without_a_number_is_wrong() -> None:
    """A log probability that is no number is `wrong` and never passes for small."""
    evidence = made_evidence()
    evidence.sampled[0].logprobs[3] = np.nan
    outcome = judge_agreement(evidence, "float32")
    assert outcome.verdict is Verdict.WRONG
    assert "NaN" in causes_of(outcome)
    assert judge(float("nan"), 1.0) is Verdict.WRONG


def test_a_tie_is_no_fault() -> None:
    """Sets that miss by less than the limit are ties, however many there are and however far the tokens behind move."""
    evidence = made_evidence()
    for one in evidence.sampled:
        one.scores.others[::2], one.scores.misses[50] = 1e-5, 0.3
        one.scores.logprobs[50:] += 0.2
    assert judge_agreement(evidence, "float32").verdict is Verdict.OK
    assert judge_routing(evidence, "float32").verdict is Verdict.OK


def move_second_pass(one: Sampled) -> None:
    """Move the second pass of an answer from its tenth token on."""
    assert one.second is not None
    one.second[PROMPT + 10 :] += np.float32(0.1)


@pytest.mark.parametrize(("share", "dense", "verdict"), [(12, False, "look"), (12, True, "wrong"), (3, False, "wrong")])
def test_a_tie_of_the_second_pass_is_no_fault(share: int, dense: bool, verdict: str) -> None:
    """The second pass replays no experts, so a tie moves an answer. More of them are wrong, and so is a dense model."""
    evidence = made_evidence(dense=dense)
    for one in [one for one in evidence.sampled if one.arm == "sampled"][::share]:
        move_second_pass(one)
    outcome = judge_agreement(evidence, "float32")
    assert outcome.verdict == verdict
    assert any("as after a tie" in finding.what for finding in outcome.findings) == (verdict == "look")


def test_one_answer_that_differs_from_a_replayed_reference_is_wrong() -> None:
    """The reference replays the engine's experts, so no tie explains an answer that differs from it."""
    evidence = made_evidence()
    one = next(one for one in evidence.sampled if one.arm == "sampled")
    one.logprobs[10:] += np.float32(0.1)
    assert judge_agreement(evidence, "float32").verdict is Verdict.WRONG


def test_an_unreached_expert_is_not_ok() -> None:
    """An expert that no prompt reached is shown with its layer, as `look`."""
    evidence = made_evidence()
    for one in evidence.sampled:
        one.rows[:, 1][one.rows[:, 1] == 6] = 7
    outcome = judge_routing(evidence, "float32")
    assert outcome.verdict is Verdict.LOOK
    assert any("layer 1: 6" in finding.what for finding in outcome.findings)
    assert outcome.details["unreached"] == {"1": [6]}


def test_without_a_reference_only_the_second_pass_counts() -> None:
    """Without a reference the agreement rests on the second pass, says so, and routing does not run."""
    evidence = made_evidence()
    evidence.reference_refusal = "the checkpoint is quantized (fp8)"
    for one in evidence.sampled:
        one.scores, one.cached = None, 0
    outcome = judge_agreement(evidence, "float32")
    assert outcome.verdict is Verdict.OK
    assert any(f.verdict is Verdict.NOT_RUN and "prefix hits" in f.what for f in outcome.findings)
    assert any(f.verdict is Verdict.NOT_RUN and "fp8" in f.what for f in outcome.findings)
    with pytest.raises(StageRefused, match="fp8"):
        judge_routing(evidence, "float32")


def test_sampling_of_the_users_prompts_is_named() -> None:
    """Parameters of the user's prompts that change the distribution are `look`, with their values."""
    evidence = made_evidence()
    evidence.changes = ["temperature=0.7", "top_p=0.9"]
    outcome = judge_agreement(evidence, "float32")
    assert outcome.verdict is Verdict.LOOK
    assert any("temperature=0.7, top_p=0.9" in finding.what for finding in outcome.findings)


@pytest.mark.parametrize(
    ("floor", "value", "verdict"),
    [
        (None, 1e-4, Verdict.OK),
        (None, 4e-4, Verdict.LOOK),
        (None, 1e-3, Verdict.WRONG),
        (1e-3, 2e-3, Verdict.OK),
        (1e-3, 5e-3, Verdict.LOOK),
        (1e-3, 1e-1, Verdict.WRONG),
        # A floor counts up to ten times the table.
        (1e9, 1e-1, Verdict.WRONG),
    ],
)
def test_the_limit_is_the_larger_of_table_and_three_floors(floor: float | None, value: float, verdict: Verdict) -> None:
    """The limit is the table's or three times the floor, with its reason. Above three times the limit is `wrong`."""
    limit = limit_of("p99", "float32", floor)
    assert ("engine" in limit.why) == (floor is not None)
    assert measured("x", limited("p99", value, "float32", floor)).verdict is verdict


def test_the_worst_word_counts() -> None:
    """`not run` counts only if nothing ran."""
    words: list[Any] = [Verdict.NOT_RUN, Verdict.OK]
    assert worst(words) is Verdict.OK
    assert worst([*words, Verdict.LOOK, Verdict.WRONG]) is Verdict.WRONG
    assert worst([Verdict.NOT_RUN]) is worst([]) is Verdict.NOT_RUN
