"""Names the likely causes of what is off, by the pattern of the evidence. This module is pure."""

from dataclasses import dataclass
from typing import Final

from .evidence import Evidence, Sampled
from .figures import (
    Figures,
    Misses,
    Sampling,
    Suspect,
    answer_of,
    batch_pairs,
    by_position,
    misses_of,
    noise_pairs,
    reference_pairs,
    rounding_gain,
    sampling_tests,
    second_pairs,
    slope_of,
    suspect_of,
)
from .verdicts import TABLE, Verdict, judge, limit_of, worst

MANY: Final = 0.01
"""Share of faulty sets of a layer that is `wrong`: a single one may be a tie of two routers at once."""
SOME: Final = 0.002
"""Share that is `look`."""
CERTAIN: Final = 6.0
"""Standard deviations of a test that are `wrong`."""
UNLIKELY: Final = 4.5
"""Standard deviations that are `look`: once in a hundred thousand sound runs."""
STRAIGHT: Final = 0.5
"""R squared from which differences are a function of the log probability."""
FITS: Final = 4.0
"""Factor from which less precise routers explain a difference."""
ALONE: Final = 10.0
"""Ratio from which only the tokens of one expert are off."""
DECISIVE: Final = 10.0
"""Factor from which nothing else explains it."""
GROWTH: Final = 3.0
"""Ratio of the last quarter of the answers to the first from which differences grow with the position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What is off, and how. `None` stands for what was not measured."""

    floor: Figures
    """The engine against itself in another batch."""
    second: Figures
    """The answers against the engine's second pass."""
    reference: Figures | None
    replayed: Figures | None
    noise: Figures
    """The reference against itself in another dtype."""
    misses: Misses | None
    suspect: tuple[int, Suspect] | None
    """Layer and expert whose tokens are off most."""
    drifts: bool
    """True if the answers differ from the second pass."""
    drift_cached: bool
    """True if only answers with a cached prefix differ from the second pass."""
    drift_sampled: bool
    """True if only sampled answers differ from it, and greedy ones do not."""
    differs: bool
    """True if the answers differ from the reference."""
    second_differs: bool
    """True if the second pass differs from the reference."""
    heals: bool
    """True if replay removes the difference, or nine tenths of it."""
    first_layer: int | None
    """First layer whose router sees something else than the reference's."""
    slope: float
    """By how much r changes with the log probability. 0: not at all, or not in a straight line."""
    grows: bool
    """True if differences grow with the position."""
    rounding: float
    """How many times less precise routers fit better."""
    sampling: tuple[Sampling, ...]
    """Tests of the sampled tokens that fail. Empty if greedy answers differ too: their distribution is another one."""


def is_off(figures: Figures, dtype: str, *floors: Figures) -> Verdict:
    """Return the verdict on the differences of two passes."""
    k3 = judge(figures.k3, limit_of("k3", dtype, max(floor.k3 for floor in floors)).value)
    p99 = judge(figures.p99, limit_of("p99", dtype, max(floor.p99 for floor in floors)).value)
    return worst((k3, p99))


def read_signs(evidence: Evidence, dtype: str) -> Signs:
    """Return the signs of the evidence."""
    sampled = evidence.sampled
    floor, noise = Figures.of(batch_pairs(sampled)), Figures.of(noise_pairs(sampled))

    def drift(chosen: list[Sampled]) -> bool:
        return is_off(Figures.of(second_pairs(chosen)), dtype, floor) is not Verdict.OK

    cached = [one for one in sampled if one.cached]
    greedy = [one for one in sampled if one.arm in GREEDY]
    second_reference = [
        (answer_of(one, one.second), answer_of(one, one.scores.logprobs))
        for one in sampled
        if one.second is not None and one.scores is not None
    ]
    free, again = Figures.of(reference_pairs(sampled)), Figures.of(reference_pairs(sampled, "replayed"))
    misses = misses_of(evidence, dtype)
    first = None
    if misses is not None:
        first = next((evidence.layers[i] for i, share in enumerate(misses.faults) if share > SOME), None)
    differs = is_off(free, dtype, floor, noise) is not Verdict.OK
    still = is_off(again, dtype, floor, noise) is not Verdict.OK
    drifts = drift(sampled)
    suspect = None
    if misses is not None and (differs or first is not None):
        place = len(evidence.layers) if first is None else list(evidence.layers).index(first)
        if place:
            layer = evidence.layers[place - 1]
            found = suspect_of(evidence, layer)
            # After the last router, nothing of an expert reaches other tokens than its own.
            is_alone = found is not None and (first is not None or found.ratio > ALONE)
            suspect = (layer, found) if found is not None and is_alone else None
    slope, straight = slope_of(reference_pairs(sampled))
    quarters = by_position(reference_pairs(sampled) if free.tokens else second_pairs(sampled))
    second_differs = is_off(Figures.of(second_reference), dtype, floor, noise) is not Verdict.OK
    greedy_differs = is_off(Figures.of(reference_pairs(greedy)), dtype, floor, noise) is not Verdict.OK
    tests: list[Sampling] = []
    drift_sampled = drifts and bool(greedy) and not drift(greedy)
    if not (second_differs if second_reference else greedy_differs) and (drift_sampled or not drifts):
        tests = sampling_tests(one for one in sampled if one.is_neutral)
    return Signs(
        floor=floor,
        second=Figures.of(second_pairs(sampled)),
        reference=free if free.tokens else None,
        replayed=again if again.tokens else None,
        noise=noise,
        misses=misses,
        suspect=suspect,
        drifts=drifts,
        drift_cached=drifts and bool(cached) and not drift([one for one in sampled if not one.cached]),
        drift_sampled=drift_sampled,
        differs=differs,
        second_differs=second_differs,
        heals=bool(again.tokens) and differs and (not still or again.k3 < free.k3 / 10),
        first_layer=first,
        slope=slope if straight > STRAIGHT else 0.0,
        grows=quarters[-1] > GROWTH * quarters[0] > 0,
        rounding=rounding_gain(sampled),
        sampling=tuple(test for test in tests if abs(test.z) > UNLIKELY),
    )


GREEDY: Final = ("alone", "batch", "again")


def name_causes(signs: Signs, evidence: Evidence, dtype: str) -> tuple[str, ...]:
    """Return the likely causes, the most likely first. Empty if nothing is off."""
    causes: list[str] = []
    if signs.sampling or signs.drift_sampled:
        causes += _of_sampling(signs, evidence)
    if signs.drifts and not signs.drift_sampled and not causes:
        causes.append(_of_drift(signs))
    if signs.differs and (signs.second_differs or not signs.drifts) and not causes:
        causes += _of_model(signs, evidence, dtype)
    elif signs.first_layer is not None and not causes:
        causes += _of_routing(signs, dtype)
    return tuple(dict.fromkeys(causes))


def _of_sampling(signs: Signs, evidence: Evidence) -> list[str]:
    names = {test.name for test in signs.sampling}
    cuts = [f"sampling parameters: {test.text}: {test.name} is left on" for test in signs.sampling if test.z < 0]
    causes = [cut for cut in cuts if "temperature" not in cut]
    if names == {"temperature"}:
        sharper = "below" if signs.sampling[0].z < 0 else "above"
        causes.append(f"sampling parameters: a temperature {sharper} 1 ({signs.sampling[0].text}), top-p, or penalties")
    if signs.drift_sampled and not causes:
        causes.append("sampling parameters (temperature, top-p, top-k, penalties) that change the log probabilities")
    if evidence.facts.get("logprobs_mode", "").startswith("processed"):
        causes.append("the fleet returns processed_logprobs; raw_logprobs do not depend on sampling parameters")
    return causes


def _of_drift(signs: Signs) -> str:
    if signs.drift_cached:
        return (
            "stale KV: only answers with a cached prefix differ from a pass that computes it again: the prefix cache "
            "has KV of other weights, or was not flushed after an update"
        )
    if signs.differs and not signs.second_differs:
        return (
            "stale KV, or the decode path: a pass over the whole sequence agrees with the reference, the answers do "
            "not: KV of other weights, CUDA graphs (compare with enforce_eager), or the kernel of decode attention"
        )
    if signs.second_differs and not signs.differs:
        return "the prefill path: chunked prefill, or a fused kernel for prompts, computes something else than decode"
    return "decode and prefill use kernels that round differently: fused kernels, split KV, the dtype of the KV cache"


def _of_model(signs: Signs, evidence: Evidence, dtype: str) -> list[str]:
    """Return causes where the engine agrees with itself, but not with the reference."""
    causes = []
    if signs.rounding > FITS:
        return [precision_cause(signs)]
    if signs.suspect is not None:
        layer, suspect = signs.suspect
        causes.append(f"expert {suspect.expert} of layer {layer}: its weights, or the scale of its kernel, are wrong")
    if signs.first_layer is not None:
        causes += _of_routing(signs, dtype)
    elif signs.misses is not None and signs.suspect is None:
        causes += _of_head(evidence)
        causes.append(f"the experts of layer {evidence.layers[-1]}: all routers see the right inputs up to there")
    if signs.slope and signs.first_layer is None:
        causes.append("a scale of the logits: temperature, soft cap, logit scale, or the final norm")
    if signs.misses is None:
        causes += _of_dense(signs, evidence)
    return causes


def precision_cause(signs: Signs) -> str:
    """Return the cause of routers that round."""
    times = min(signs.rounding, 1e4)
    return f"the dtype of the router: a reference whose routers round to bfloat16 fits {times:.0f} times better"


def _of_routing(signs: Signs, dtype: str) -> list[str]:
    misses, layer = signs.misses, signs.first_layer
    if misses is None or layer is None:
        return []
    if misses.typical < TABLE["bfloat16"]["gap"] and misses.faults[0] > SOME and dtype != "bfloat16":
        text = (
            f"the dtype of the router: up to {max(misses.faults):.1%} of the sets differ, from the first layer on, by "
            f"small steps ({misses.typical:.2g} in its logits): routers in bfloat16, or a fused top-k kernel"
        )
    elif signs.heals:
        text = (
            f"the router of layer {layer}, from which on sets differ, while the experts agree (replay heals it): stale "
            "weights of the router, its dtype, its bias, or a fused top-k kernel"
        )
    else:
        text = (
            f"stale or wrong weights at layer {layer}: its router is the first that sees other inputs or has other "
            f"weights: the attention and the router of layer {layer}, or the experts of the layer before"
        )
    return [text]


def _of_head(evidence: Evidence) -> list[str]:
    if evidence.facts.get("tie_word_embeddings") == "True":
        return ["a tied head that was not updated with the embedding, or the final norm"]
    return ["the head or the final norm: stale weights"]


def _of_dense(signs: Signs, evidence: Evidence) -> list[str]:
    causes = []
    if signs.grows:
        causes.append("rotary embedding (scaling, theta) or a sliding window: differences grow with the position")
    causes.append("stale weights, or weights that did not load: the engine agrees with itself and not with the model")
    if evidence.facts.get("tie_word_embeddings") == "True":
        causes.append("a tied head that was not updated with the embedding")
    causes.append("a fused kernel (compare with enforce_eager), or another checkpoint in --model than the fleet serves")
    return causes
