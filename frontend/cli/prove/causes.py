"""Names the likely causes of what is off, by the pattern of the evidence. This module is pure."""

import functools
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from .evidence import Evidence
from .figures import (
    SHARPNESS,
    Figures,
    Pair,
    Suspect,
    answer_of,
    batch_pairs,
    choice_tests,
    cut_tests,
    expected_of,
    first_position,
    misses_of,
    noise_pairs,
    reference_pairs,
    rounding_gain,
    second_pairs,
    straightness_of,
    suspect_of,
)
from .verdicts import LARGEST, TABLE, Finding, Verdict

MANY: Final = 0.01
"""Share of faulty sets of a layer that is `wrong`: a single one may be a tie of two routers at once."""
SOME: Final = 0.002
"""Share that is `look`."""
UNLIKELY: Final = 5.5
"""Standard deviations that are `look`: one of ten tests has them in one of two million sound runs."""
STRAIGHT: Final = 0.5
"""R squared from which differences are a function of the log probability."""
FITS: Final = 4.0
"""Factor from which less precise routers explain a difference."""
ALONE: Final = 10.0
"""Ratio from which only the tokens of one expert are off."""
DECISIVE: Final = 10.0
"""Factor from which nothing else explains it."""
FEW: Final = 0.05
"""Share of the answers that are off which a tie of routers explains. A fault moves more of them."""
FAR: Final = 8
"""First position from which the context's length matters, and not only that there is one."""
MISFIT: Final = (
    "another number of experts for each token, or other layers, than in the configuration of --model; or rows that the "
    "engine mixed up"
)
PROCESSED: Final = "the fleet returns processed_logprobs; raw_logprobs do not depend on sampling parameters"
GREEDY: Final = ("alone", "batch", "again")


class Signs:
    """What is off, and how. `None` stands for what was not measured."""

    def __init__(self, evidence: Evidence, dtype: str) -> None:
        sampled = evidence.sampled
        self.dtype, self.facts, self.misfit, self.routers = dtype, evidence.facts, evidence.misfit, evidence.layers
        self.is_processed = evidence.facts.get("logprobs_mode", "").startswith("processed")
        self.has_experts = evidence.num_experts > 0 or evidence.routing_refusal is not None
        self.floor = floor = Figures.of(batch_pairs(sampled))
        """The engine against itself in another batch."""
        self.noise = noise = Figures.of(noise_pairs(sampled))
        """The reference against itself in another dtype."""
        self.second = Figures.of(second_pairs(sampled))
        """The answers against the engine's second pass."""
        self.misses = misses_of(evidence, dtype)
        tie = 0.0 if self.misses is None else self.misses.limit
        self.expected = functools.partial(expected_of, tie=tie)
        """What the reference expects, with the engine's experts from the first tie on."""
        free = Figures.of(reference_pairs(sampled, lambda scores: scores.logprobs))
        again = Figures.of(reference_pairs(sampled, lambda scores: scores.replayed))
        pairs = reference_pairs(sampled, self.expected)
        compared = Figures.of(pairs)
        self.reference = compared if compared.tokens else None
        self.free = free if free.tokens else None
        self.replayed = again if again.tokens else None
        self.has_nan = max(floor.largest, self.second.largest, compared.largest) >= LARGEST
        """True if a log probability is no number."""
        fresh, greedy = [one for one in sampled if not one.cached], [one for one in sampled if one.arm in GREEDY]
        self.drifts = self.is_off(second_pairs(sampled), floor)
        """True if the answers differ from the second pass."""
        self.drift_cached = self.drifts and not self.is_off(second_pairs(fresh), floor)
        """True if only answers with a cached prefix differ from it."""
        self.drift_sampled = self.drifts and bool(greedy) and not self.is_off(second_pairs(greedy), floor)
        """True if only sampled answers differ from it."""
        both = [
            (one, one.second, self.expected(one.scores))
            for one in sampled
            if one.second is not None and one.scores is not None
        ]
        seconds = [(second, expected) for _, second, expected in both]
        answers = [(answer_of(one, second), answer_of(one, expected)) for one, second, expected in both]
        replays = bool(again.tokens)
        self.differs = self.is_off(pairs, floor, noise, is_replayed=replays)
        """True if the answers differ from the reference."""
        self.second_differs = self.is_off(answers, floor, noise)
        """True if the second pass differs from it."""
        still = again.is_off(dtype, floor, noise)
        self.heals = replays and self.differs and again.k3 < free.k3 / 10
        """True if replay removes nine tenths of the difference."""
        faulty = [] if self.misses is None else [i for i, share in enumerate(self.misses.faults) if share > SOME]
        self.first_layer = evidence.layers[faulty[0]] if faulty else None
        """First layer whose router sees something else than the reference's."""
        place = faulty[0] if faulty else len(evidence.layers)
        self.suspect: Suspect | None = None
        """The experts whose tokens are off most, in the last layer before the difference."""
        if self.misses is not None and (self.differs or faulty) and place:
            found = suspect_of(evidence, evidence.layers[place - 1])
            # After the last router, nothing of an expert reaches other tokens than its own.
            self.suspect = found if found is not None and (faulty or found.ratio > ALONE) else None
        self.is_straight = straightness_of(pairs) > STRAIGHT
        """True if r is a linear function of the log probability."""
        # The tokens of an expert may begin anywhere.
        self.position = first_position(seconds) if self.second_differs and self.suspect is None else 0
        """First position where the engine and the reference do not agree."""
        self.breaks = not self.differs and still
        """True if only replay makes a difference."""
        self.rounding = rounding_gain(sampled)
        """How many times less precise routers fit better."""
        others = self.second_differs
        if not seconds:
            others = self.is_off(reference_pairs(greedy, self.expected), floor, noise, is_replayed=replays)
        drawn = [one for one in sampled if one.is_neutral]
        tests = choice_tests(greedy, drawn)
        # If greedy answers differ too, the reference has another distribution.
        if not others and (self.drift_sampled or not self.drifts) and not any(test.name == "seed" for test in tests):
            tests += cut_tests(drawn)
        tests.sort(key=lambda test: -abs(test.z))
        # What is left on moves other tests too, but less.
        off = [test for test in tests if abs(test.z) > max(UNLIKELY, abs(tests[0].z) / 2)]
        self.sampling = [test for test in off if test.name != SHARPNESS] or off[:1]
        """Tests of the choice of tokens that fail, the clearest first, without what another one explains."""

    def judge(self, what: str, pairs: Sequence[Pair], *floors: Figures, is_replayed: bool = False) -> Finding:
        """Return the finding for pairs. What few answers show, as after a tie of routers, is at most `look`.

        Args:
            is_replayed: True if one side has the experts of the other, so that no tie explains anything.
        """
        found = Figures.of(pairs).judge(what, self.dtype, *floors)
        if is_replayed or found.verdict is not Verdict.WRONG:
            return found
        num_off = len(pairs) - len(self._without_ties(pairs, floors))
        if not num_off:
            return found
        text = f"{found.what}; {num_off} of {len(pairs)} answers are off, as after a tie of routers"
        return replace(found, verdict=Verdict.LOOK, what=text)

    def is_off(self, pairs: Sequence[Pair], *floors: Figures, is_replayed: bool = False) -> bool:
        """Return True if more pairs are off than those that a tie of routers explains; see `judge`."""
        if not Figures.of(pairs).is_off(self.dtype, *floors):
            return False
        return is_replayed or Figures.of(self._without_ties(pairs, floors)).is_off(self.dtype, *floors)

    def _without_ties(self, pairs: Sequence[Pair], floors: Sequence[Figures]) -> Sequence[Pair]:
        """Leave out answers that are off if they are few: a tie that nothing replays moves a whole answer."""
        kept = [pair for pair in pairs if not Figures.of([pair]).is_off(self.dtype, *floors)]
        is_few = len(pairs) - len(kept) <= max(FEW * len(pairs), 1) < len(kept)
        return kept if self.has_experts and is_few and not self.has_nan else pairs


def name_causes(signs: Signs) -> tuple[str, ...]:
    """Return the likely causes, the most likely first. Empty if nothing is off."""
    for rows in (_of_sampling(signs), _of_drift(signs), _of_model(signs), _of_routing(signs)):
        causes = tuple(row for row in rows if isinstance(row, str))
        if causes:
            return causes
    return ()


Rows = Sequence[str | bool]
"""Causes. One that is not likely is False."""


def _of_sampling(signs: Signs) -> Rows:
    """Return causes where only sampled tokens are off."""
    found = signs.sampling
    return [
        *(f"sampling parameters: {test.text}: {test.cause}" for test in found),
        signs.drift_sampled
        and not found
        and "sampling parameters (temperature, top-p, top-k, penalties) that change the log probabilities",
        (bool(found) or signs.drift_sampled) and signs.is_processed and PROCESSED,
    ]


def _of_drift(signs: Signs) -> Rows:
    """Return the cause where the engine does not agree with itself."""
    if not signs.drifts:
        return ()
    if signs.has_nan:
        text = "log probabilities that are NaN or infinite: weights that were not loaded, or an overflow (float16)"
    elif signs.drift_cached:
        text = (
            "stale KV: only answers with a cached prefix differ from a pass that computes it again: the prefix cache "
            "has KV of other weights, or was not flushed after an update"
        )
    elif signs.differs and not signs.second_differs:
        text = (
            "stale KV, or the decode path: a pass over the whole sequence agrees with the reference, the answers do "
            "not: KV of other weights, CUDA graphs (compare with enforce_eager), the kernel of decode attention, or "
            "log probabilities of the token before or after"
        )
        if signs.is_processed:
            return (f"sampling parameters (penalties, a logit bias) left on for all requests: {PROCESSED}", text)
    elif signs.second_differs and not signs.differs:
        text = "the prefill path: chunked prefill, or a fused kernel for prompts, computes something else than decode"
    else:
        text = "decode and prefill use kernels that round differently: fused kernels, split KV, the KV cache's dtype"
    return (text,)


def _of_model(signs: Signs) -> Rows:
    """Return causes where the engine agrees with itself, but not with the reference."""
    if not signs.differs:
        return ()
    if signs.rounding > FITS:
        return (precision_cause(signs),)
    is_dense, is_tied = signs.misses is None, signs.facts.get("tie_word_embeddings") == "True"
    is_after = not is_dense and signs.first_layer is None and signs.suspect is None
    return [
        signs.misfit is not None and MISFIT,
        signs.suspect is not None and _of_experts(signs.suspect),
        signs.position >= FAR
        and f"attention from position {signs.position} on, before which all tokens agree: a sliding window that is "
        "ignored or has another length, chunked attention, or the scaling of the rotary embedding",
        0 < signs.position < FAR
        and "attention scores, because first tokens, which see only themselves, agree: queries or keys (stale, swapped "
        "or not normalized), rotary embedding (theta, scaling), their scale, soft cap or mask",
        *_of_routing(signs),
        is_after and is_tied and "a tied head that was not updated with the embedding, or the final norm",
        is_after and not is_tied and "the head or the final norm: stale weights",
        is_after
        and f"the experts of layer {max(signs.routers)} (weights, norm_topk_prob, scaling, a shared expert): all "
        "routers see the right inputs up to there",
        signs.is_straight
        and signs.first_layer is None
        and "a scale of the logits: temperature, soft cap, logit scale, or the final norm",
        is_dense
        and signs.has_experts
        and "experts or routers (weights, scales, swapped experts, norm_topk_prob), whose choice could not be replayed",
        is_dense
        and "stale weights, weights that did not load (rows of the embedding too), an adapter that stayed merged, or "
        "another configuration (epsilon of a norm, activation): the engine agrees with itself and not with the model",
        is_dense and is_tied and "a tied head that was not updated with the embedding",
        is_dense
        and "a fused kernel (compare with enforce_eager), or another checkpoint in --model than the fleet serves",
    ]


def _of_experts(suspect: Suspect) -> str:
    first, *second = suspect.experts
    which = f"s {first} and {second[0]}" if second else f" {first}"
    why = "swapped, or both have wrong weights" if second else "its weights, or the scale of its kernel, are wrong"
    return f"expert{which} of layer {suspect.layer}: {why}"


def precision_cause(signs: Signs) -> str:
    """Return the cause of routers that round."""
    return f"the dtype of the router: one that rounds to bfloat16 fits {min(signs.rounding, 1e4):.0f} times better"


def _of_routing(signs: Signs) -> Rows:
    """Return the cause where routers see something else, or choose otherwise."""
    misses, layer = signs.misses, signs.first_layer
    if misses is None or layer is None:
        return ()
    if signs.breaks and max(misses.faults) > MANY:
        text = (
            "rows that do not belong to these experts or tokens, because only replay makes a difference: experts in "
            f"another order at layer {layer} (expert parallelism, load balancing), rows shifted by a position or a "
            "layer, or rows of another request"
        )
        return (text,)
    heals = signs.heals or not signs.differs
    is_small = misses.typical < TABLE["bfloat16"]["gap"] and misses.faults[0] > SOME and signs.dtype != "bfloat16"
    before = "the experts of the layer before (weights, norm_topk_prob, scaling, a shared expert)"
    if layer == min(signs.routers):
        before = "what comes before it, such as the embedding"
    return (
        not heals
        and f"stale or wrong weights at layer {layer}: its router is the first that sees other inputs or has other "
        f"weights: the attention, the norms and the router of layer {layer}, or {before}",
        is_small
        and f"the dtype of the router: up to {max(misses.faults):.1%} of the sets differ, from the first layer on, by "
        f"small steps ({misses.typical:.2g} in its logits): routers in bfloat16, or a fused top-k kernel",
        heals
        and not is_small
        and f"the router of layer {layer}, from which on sets differ, while the experts agree (replay heals it): stale "
        "weights of the router, its dtype, its bias, or a fused top-k kernel",
    )
