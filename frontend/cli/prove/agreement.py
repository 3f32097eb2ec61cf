"""The stage `agreement`: are the log probabilities of sampled tokens those of a trainer?"""

from typing import Any, ClassVar

from msgspec.structs import replace

from .causes import Signs, name_causes
from .evidence import Evidence, add_reference, collect
from .figures import CERTAIN, Figures, batch_pairs, by_position, by_rank, reference_pairs, second_pairs
from .stage import Proof, Stage
from .verdicts import FLOOR_MOST, Finding, Number, Outcome, Verdict

WAYS = {
    "alone": "decode against prefill, one request at a time",
    "batch": "decode against prefill, in a batch",
    "again": "prefix hits against prefill",
    "sampled": "sampled tokens against prefill",
    "yours": "your prompts with your sampling against prefill",
}


class Agreement(Stage):
    """Compares the answers with the engine's second pass and with the reference."""

    name: ClassVar[str] = "agreement"
    bar: ClassVar[str] = "log probabilities of sampled tokens equal those of a forward pass, within rounding"
    measure_share: ClassVar[float] = 2.0
    conclude_share: ClassVar[float] = 3.0

    async def measure(self, proof: Proof) -> Outcome | None:
        """Collect the answers."""
        await collect(proof)
        return None

    async def conclude(self, proof: Proof) -> Outcome | None:
        """Run the reference and judge."""
        return judge_agreement(await add_reference(proof), proof.dtype)


def judge_agreement(evidence: Evidence, dtype: str) -> Outcome:
    """Return the verdict on the answers. This function is pure."""
    signs = Signs(evidence, dtype)
    causes = name_causes(signs)
    findings = [_batch_finding(evidence, signs)]
    for arm, way in WAYS.items():
        pairs = second_pairs(one for one in evidence.sampled if one.arm == arm and (one.cached or arm != "again"))
        if pairs:
            findings.append(signs.judge(f"engine against itself: {way}", pairs, signs.floor))
    if not any(one.cached for one in evidence.sampled):
        findings.append(Finding(verdict=Verdict.NOT_RUN, what="prefix hits: no answer had a cached prefix"))
    findings += _reference_findings(evidence, signs)
    for test in signs.sampling:
        verdict = Verdict.WRONG if abs(test.z) > CERTAIN else Verdict.LOOK
        number = Number(name=f"{test.name}: deviation", value=abs(test.z), unit="standard deviations", limit=CERTAIN)
        findings.append(Finding(verdict=verdict, what=f"the tokens are not sampled so: {test.text}", numbers=(number,)))
    findings += _facts(evidence)
    findings += [Finding(verdict=Verdict.NOT_RUN, what=note) for note in evidence.notes]
    worst = next(
        (i for word in (Verdict.WRONG, Verdict.LOOK) for i, f in enumerate(findings) if f.verdict is word), None
    )
    if worst is not None and causes:
        findings[worst] = replace(findings[worst], causes=causes)
    main = signs.second if signs.reference is None else signs.reference
    return Outcome(
        findings=tuple(findings),
        headline=f"k3 {main.k3:.1e}, p99 {main.p99:.1e}",
        details=_details(evidence, signs),
    )


def _batch_finding(evidence: Evidence, signs: Signs) -> Finding:
    """Return the finding for alone against batch. It is the floor of the others, so it is `wrong` only far above."""
    found = signs.judge("engine against itself: other batch", batch_pairs(evidence.sampled), Figures.of(()))
    is_noise = all(number.value <= FLOOR_MOST * number.limit for number in found.numbers if number.limit is not None)
    return replace(found, verdict=Verdict.LOOK) if found.verdict is Verdict.WRONG and is_noise else found


def _reference_findings(evidence: Evidence, signs: Signs) -> list[Finding]:
    if signs.reference is None:
        reason = evidence.reference_refusal or "the reference computed nothing"
        return [Finding(verdict=Verdict.NOT_RUN, what=f"no reference: {reason}")]
    chosen = [one for one in evidence.sampled if one.is_neutral] or evidence.sampled
    groups = (
        ("sampled", [one for one in chosen if one.arm in ("sampled", "yours")]),
        ("greedy", [one for one in evidence.sampled if one.arm not in ("sampled", "yours")]),
        ("your sampling", [one for one in evidence.sampled if not one.is_neutral and one.arm == "yours"]),
    )
    return [
        signs.judge(
            f"reference, {name} tokens", pairs, signs.floor, signs.noise, is_replayed=signs.replayed is not None
        )
        for name, group in groups
        if (pairs := reference_pairs(group, signs.expected))
    ]


def _facts(evidence: Evidence) -> list[Finding]:
    found = []
    if evidence.changes:
        found.append(
            f"your prompts set {', '.join(evidence.changes)}: the tokens do not come from the distribution that a "
            "trainer computes without these sampling parameters"
        )
    if len({version for one in evidence.sampled for version in one.versions}) > 1:
        found.append("the weights changed while the tokens were sampled")
    if evidence.facts.get("double_bos"):
        found.append("prompts begin with two BOS tokens: the chat template and the tokenizer both add one")
    return [Finding(verdict=Verdict.LOOK, what=text) for text in found]


def _details(evidence: Evidence, signs: Signs) -> dict[str, Any]:
    pairs = reference_pairs(evidence.sampled, signs.expected) or second_pairs(evidence.sampled)
    details: dict[str, Any] = {
        "answers": len(evidence.sampled),
        "tokens": sum(len(one.logprobs) for one in evidence.sampled),
        "prompt_lengths": sorted({one.prompt_len for one in evidence.sampled}),
        "cached_answers": sum(one.cached > 0 for one in evidence.sampled),
        "by_position": by_position(pairs),
        "by_rank": by_rank(evidence.sampled),
        "facts": evidence.facts,
        "floor": signs.floor._asdict(),
        "noise": signs.noise._asdict(),
        "second_pass": signs.second._asdict(),
    }
    for name, figures in (("reference", signs.reference), ("replayed", signs.replayed)):
        if figures is not None:
            details[name] = figures._asdict()
    return details
