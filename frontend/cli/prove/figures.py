"""The figures of `agreement` and `routing`, as pure functions over what was collected.

r is the log probability of a token by the trainer (the second pass, or the reference) minus the sampler's. k1 = -r
and k3 = exp(r) - 1 - r estimate KL(sampler || trainer) for sampled tokens (J. Schulman, "Approximating KL Divergence",
2020). k3 is never negative and varies less.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....schemas.reference import ABOVE, RANKS, Floats, Ints, TokenScores
from .evidence import Evidence, Sampled
from .verdicts import LARGEST, Finding, Number, Verdict, limit_of, limited, measured

Pair = tuple[Floats, Floats]
"""Log probabilities of the same tokens, of the sampler and of another pass."""


MOST: Final = 50.0
"""Bound of r in k3, which is then 1e21."""


class Figures(NamedTuple):
    """The differences of two passes over the same tokens."""

    tokens: int
    k1: float
    k3: float
    p99: float
    largest: float

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "Figures":
        """Return the figures of all pairs together. Without tokens all are 0."""
        r = differences(pairs)
        if not len(r):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        size = np.abs(r)
        bounded = np.clip(r, -MOST, MOST)
        k3 = float(np.mean(np.expm1(bounded) - bounded))
        return cls(len(r), float(-r.mean()), k3, float(np.percentile(size, 99)), float(size.max()))

    def judge(self, what: str, dtype: str, *floors: "Figures") -> Finding:
        """Return the finding for the differences. The largest alone is at most `look`: it may lie behind a tie."""
        return measured(what, *self._numbers(dtype, floors), Number(name="k1", value=self.k1), mild="largest")

    def is_off(self, dtype: str, *floors: "Figures") -> bool:
        """Return True if k3 or the 99th percentile is above its limit."""
        return measured("", *self._numbers(dtype, floors)[:2]).verdict is not Verdict.OK

    def _numbers(self, dtype: str, floors: Sequence["Figures"]) -> list[Number]:
        return [
            limited(name, getattr(self, name), dtype, max(getattr(floor, name) for floor in floors))
            for name in ("k3", "p99", "largest")
        ]


def differences(pairs: Iterable[Pair]) -> npt.NDArray[np.float64]:
    """Return r of all pairs, one after the other. A difference that is no number is the largest one."""
    parts = [np.asarray(other, float) - np.asarray(first, float) for first, other in pairs]
    r = np.concatenate(parts) if parts else np.empty(0)
    return np.nan_to_num(r, nan=LARGEST, posinf=LARGEST, neginf=-LARGEST)


def answer_of(one: Sampled, values: Floats) -> Floats:
    """Return the part of [n - 1, ...] values that belongs to the tokens of the answer."""
    return values[one.prompt_len - 1 :]


def second_pairs(sampled: Iterable[Sampled]) -> list[Pair]:
    """Return the answers beside the engine's second pass."""
    return [(one.logprobs, answer_of(one, one.second)) for one in sampled if one.second is not None]


def expected_of(scores: TokenScores, tie: float) -> Floats:
    """Return the reference's log probabilities. From the first tie of routers on, the engine's experts are replayed.

    A token behind a tie moves by tenths, because each of both sets is right. A sequence with a larger miss keeps the
    reference's own experts.

    Args:
        tie: largest miss that is a tie, in the router's logits.
    """
    if scores.misses is None or scores.others is None or scores.replayed is None:
        return scores.logprobs
    first = int(np.argmax(np.append((scores.misses > 0).any(1), True)))
    if (scores.others[first:] > tie).any():
        return scores.logprobs
    return np.concatenate([scores.logprobs[:first], scores.replayed[first:]])


def reference_pairs(sampled: Iterable[Sampled], values: Callable[[TokenScores], Floats | None]) -> list[Pair]:
    """Return the answers beside the values of the reference."""
    found = [(one, values(one.scores)) for one in sampled if one.scores is not None]
    return [(one.logprobs, answer_of(one, each)) for one, each in found if each is not None]


def noise_pairs(sampled: Iterable[Sampled]) -> list[Pair]:
    """Return the reference beside itself in another dtype, with the engine's experts in both: rounding without ties."""

    def values(one: Sampled, scores: TokenScores) -> Floats:
        return answer_of(one, scores.logprobs if scores.replayed is None else scores.replayed)

    chosen = [(one, one.scores, one.noise) for one in sampled]
    return [(values(one, scores), values(one, noise)) for one, scores, noise in chosen if scores and noise]


def batch_pairs(sampled: Sequence[Sampled]) -> list[Pair]:
    """Return greedy answers that ran alone beside those of a batch, up to the first token that differs.

    There, both tokens are the most likely one, so their log probabilities are equal if it is a tie.
    """
    batch = {one.prompt: one for one in sampled if one.arm == "batch"}
    pairs = []
    for one in sampled:
        other = batch.get(one.prompt)
        if one.arm == "alone" and other is not None:
            length = min(len(one.logprobs), len(other.logprobs))
            end = int(np.argmin([*(one.token_ids[-length:] == other.token_ids[-length:]), False])) + 1
            pairs.append((one.logprobs[:end], other.logprobs[:end]))
    return pairs


TINY: Final = 1e-12
"""Smallest probability that counts."""
NUM_TOKENS: Final = 1e7
"""Tokens of a large vocabulary, each with some powers of 2 as bounds of its probability."""
NOT_BEST: Final = 0.001
"""Share of the greedy tokens that need not be the most likely ones: a sampler may round before it compares."""
SHARPNESS: Final = "temperature"
"""Name of the test that fails with any change of the distribution."""
CERTAIN: Final = 6.0
"""Standard deviations of a test that are `wrong`."""


class Sampling(NamedTuple):
    """A test of the sampled tokens: a count of some of them against what is expected."""

    name: str
    z: float
    """Standard deviations from what is expected, above 0 if there are more."""
    text: str
    cause: str

    @classmethod
    def of(cls, name: str, what: str, cause: str, seen: int, expected: float, trials: float = 1.0) -> "Sampling":
        """Return the test of a count.

        The chance of z is at most exp(-z * z / 2), however the probability of each token depends on those before it
        (H. Chernoff, "A Measure of Asymptotic Efficiency", 1952).

        Args:
            trials: number of tests of which the one that deviates most is taken.
        """
        nats = expected - seen + seen * math.log(max(seen, TINY) / max(expected, TINY)) - math.log(trials)
        z = math.copysign(math.sqrt(2 * max(nats, 0.0)), seen - expected)
        return cls(name, z, f"{what}: {seen:,}, and {expected:,.0f} are expected", cause)


def cut_tests(sampled: Iterable[Sampled]) -> list[Sampling]:
    """Return tests of top-p and top-k over answers that were sampled from the reference's whole distribution."""
    chosen = [(one, one.scores) for one in sampled if one.scores is not None]
    if not chosen:
        return []

    def of(name: str) -> npt.NDArray[np.float64]:
        return np.concatenate([np.asarray(answer_of(one, getattr(scores, name)), float) for one, scores in chosen])

    tests = []
    for name, values, cuts, tails in (
        ("top-p", of("above"), ABOVE, of("above_tail")),
        ("top-k", of("ranks"), RANKS, of("rank_tail")),
    ):
        cause = f"{name} is left on, or min-p"
        found = (
            Sampling.of(name, f"tokens beyond {name} {cut:g}", cause, 0, float(tail.sum()))
            for cut, tail in zip(cuts, tails.T, strict=True)
            if not (values >= cut).any()
        )
        tests += list(itertools.islice(found, 1))
    return tests


class _Tops(NamedTuple):
    """The tokens of some answers, and the engine's most likely tokens at their positions as [positions, K]."""

    tokens: Ints
    ids: Ints
    probabilities: Floats
    is_chosen: npt.NDArray[np.bool_]
    is_best: npt.NDArray[np.bool_]
    is_seen: npt.NDArray[np.bool_]
    """True for a token that the prompt or the answer had before."""

    @classmethod
    def of(cls, chosen: Sequence[Sampled]) -> "_Tops":
        """Return those of one or more answers."""
        seen = []
        for one in chosen:
            prompt, answer = np.split(one.token_ids, [one.prompt_len])
            before = np.tri(len(answer), k=-1, dtype=bool)[:, None]
            seen.append(np.isin(one.top_ids, prompt) | ((one.top_ids[..., None] == answer) & before).any(-1))
        ids, values = (np.concatenate([getattr(one, name) for one in chosen]) for name in ("top_ids", "top_logprobs"))
        tokens = np.concatenate([one.token_ids[one.prompt_len :] for one in chosen])
        is_chosen, is_best = ids == tokens[:, None], values == values.max(1, keepdims=True, initial=-np.inf)
        return cls(tokens, ids, np.exp(values), is_chosen, is_best, np.concatenate(seen))


def choice_tests(greedy: Sequence[Sampled], drawn: Sequence[Sampled]) -> list[Sampling]:
    """Return tests of the choice of tokens against the log probabilities that the engine itself reports.

    Raw log probabilities do not depend on sampling parameters, so the choice shows what is left on.

    Args:
        greedy: greedy answers.
        drawn: answers that were sampled from the whole distribution.
    """
    tests = _greedy_tests(_Tops.of(greedy)) if greedy else []
    if not drawn:
        return tests
    tops, seed = _Tops.of(drawn), _seed_test(drawn)
    # The other tests count the tokens of different answers as independent.
    return [*tests, seed] if seed.z > CERTAIN else [*tests, *_top_tests(tops), *_token_tests(tops, drawn)]


def _seed_test(drawn: Sequence[Sampled]) -> Sampling:
    """Return the test of samples of one prompt that begin alike.

    A sample begins with the tokens of another one with their probability. The most likely tokens do not count: a
    temperature near 0 repeats them without a seed.
    """
    most, length = 0.0, 0
    # Sequences that begin alike are neighbours.
    for one, other in itertools.pairwise(sorted(drawn, key=lambda one: one.token_ids.tolist())):
        size = min(len(one.token_ids), len(other.token_ids))
        end = int(np.argmin([*(one.token_ids[:size] == other.token_ids[:size]), False])) - one.prompt_len
        nats = np.where(one.logprobs < one.top_logprobs.max(1, initial=-np.inf), -one.logprobs, 0.0)
        most, length = max((most, length), (float(nats[: max(end, 0)].sum()), end))
    text = f"samples of one prompt begin with the same {length} tokens"
    z = math.sqrt(2 * max(most - 2 * math.log(len(drawn)), 0.0))
    return Sampling("seed", z, text, "one seed for all requests, or workers whose random states are equal")


def _greedy_tests(tops: _Tops) -> list[Sampling]:
    """Return the test of greedy tokens, which must be the most likely ones. Empty if nearly all are."""
    off = ~(tops.is_chosen & tops.is_best).any(1) & tops.is_best.any(1)
    if off.sum() <= NOT_BEST * len(tops.tokens):
        return []
    [(token, times)] = Counter(tops.tokens[off].tolist()).most_common(1)
    cause = "a logit bias, bad words or allowed tokens are left on"
    if times > off.sum() / 2:
        cause = _bias_on(token)
    elif tops.is_seen[off][tops.is_best[off]].mean() > MOSTLY:
        cause = PENALTY
    what = f"of {len(tops.tokens)} greedy tokens, those that are not the most likely ones of the engine"
    return [Sampling.of("greedy", what, cause, int(off.sum()), NOT_BEST * len(tops.tokens))]


PENALTY: Final = "a repetition, presence or frequency penalty is left on"
MOSTLY: Final = 0.9
"""Share of the tokens that are passed over, and were there before, from which a penalty is the cause."""


def _top_tests(tops: _Tops) -> list[Sampling]:
    """Return tests of how often the most likely token, and tokens that were there before, are sampled."""
    seen, expected = int((tops.is_chosen & tops.is_best).sum()), float(tops.probabilities[tops.is_best].sum())
    cause = f"a temperature {'below' if seen > expected else 'above'} 1, top-p, or penalties"
    tests = [Sampling.of(SHARPNESS, f"of {len(tops.ids)} tokens, the most likely ones", cause, seen, expected)]
    # Only tokens of about the same probability are compared, so that a temperature changes nothing.
    level, rows = np.floor(np.log2(np.maximum(tops.probabilities, TINY))), tops.is_chosen.any(1)
    like = np.where(level[rows] == level[tops.is_chosen][:, None], tops.probabilities[rows], 0.0)
    like /= np.maximum(like.sum(1, keepdims=True), TINY)
    seen, expected = int((tops.is_chosen & tops.is_seen).sum()), float(like[tops.is_seen[rows]].sum())
    what = f"of {len(like)} likely tokens, those that were there before"
    return [*tests, Sampling.of("repeated", what, PENALTY, seen, expected)]


def _token_tests(tops: _Tops, drawn: Sequence[Sampled]) -> list[Sampling]:
    """Return the test of the token whose number differs most from what is expected."""
    ids, index = np.unique(tops.ids, return_inverse=True)
    seen = Counter(tops.ids[tops.is_chosen].tolist())
    means = np.bincount(index.ravel(), tops.probabilities.ravel())
    counts = [(token, seen[token], mean) for token, mean in zip(ids.tolist(), means.tolist(), strict=True)]
    # The probability of a token that is not among the most likely ones is known only where it is sampled. Where it is
    # at most m, the token is sampled at most as often as if it were m everywhere.
    probabilities = np.maximum(np.exp(np.concatenate([one.logprobs for one in drawn])), TINY)
    bounds = (len(tops.tokens) * np.exp2(np.ceil(np.log2(probabilities)))).tolist()
    known = Counter(zip(tops.tokens.tolist(), bounds, strict=True))
    counts += [(token, times, bound) for (token, bound), times in known.items() if times > bound]
    tests = [
        Sampling.of("token", f"tokens {token}", _bias_on(token), times, mean, NUM_TOKENS)
        for token, times, mean in counts
    ]
    return [max(tests, key=lambda test: abs(test.z))] if tests else []


def _bias_on(token: int) -> str:
    return f"a logit bias on token {token}, or bad or allowed tokens, is left on"


class Misses(NamedTuple):
    """How the engine's sets of experts fit the reference's routers, by layer."""

    equal: list[float]
    """Share of equal sets without replay, as a trainer without replay would choose."""
    ties: list[float]
    """Share of sets that differ by a tie, when each router sees what the engine's experts computed."""
    faults: list[float]
    """Share of sets that differ by more than a tie."""
    limit: float
    why: str
    typical: float
    """Median miss of the faults, in the router's logits. 0 without faults."""
    rows: int


def misses_of(evidence: Evidence, dtype: str) -> Misses | None:
    """Return the comparison of the rows with the reference's routers. None: there is none."""
    chosen = [one for one in evidence.sampled if one.scores is not None and one.scores.others is not None]
    if not chosen:
        return None
    free, others = (np.concatenate([getattr(one.scores, name) for one in chosen]) for name in ("misses", "others"))
    moved = [
        np.abs(one.scores.others - one.noise.others)
        for one in chosen
        if one.scores and one.noise and one.scores.others is not None and one.noise.others is not None
    ]
    moves = np.concatenate(moved).ravel() if moved else np.empty(0)
    floor = float(np.percentile(moves[moves > 0], 99)) if moves.any() else None
    limit = limit_of("gap", dtype, floor)
    faults = others > limit.value
    return Misses(
        equal=(free == 0).mean(0).tolist(),
        ties=((others > 0) & ~faults).mean(0).tolist(),
        faults=faults.mean(0).tolist(),
        limit=limit.value,
        why=limit.why,
        typical=float(np.median(others[faults])) if faults.any() else 0.0,
        rows=len(others),
    )


def unreached(evidence: Evidence) -> dict[int, list[int]]:
    """Return for each layer with experts those that no row has."""
    rows = [one.rows.reshape(-1, *one.rows.shape[1:]) for one in evidence.sampled if one.rows is not None]
    if not rows:
        return {}
    joined = np.concatenate(rows)
    # Without the reference, layers of which all rows are expert 0 have no experts.
    layers = evidence.layers or [i for i in range(joined.shape[1]) if joined[:, i].any()]
    counts = {i: np.bincount(joined[:, i].ravel(), minlength=evidence.num_experts) for i in layers}
    return {i: np.flatnonzero(count == 0).tolist() for i, count in counts.items()}


class Suspect(NamedTuple):
    """The expert whose tokens are off most, or two that are off equally."""

    layer: int
    experts: list[int]
    ratio: float
    """How many times their tokens differ more than those of other experts."""


MIN_MEMBERS: Final = 10
STANDS_OUT: Final = 6.0
"""Standard deviations from which an expert is named."""


def suspect_of(evidence: Evidence, layer: int) -> Suspect | None:
    """Return the experts of a layer whose tokens differ most from the reference with replay. None: none stand out."""
    sizes, members = [], []
    for one in evidence.sampled:
        if one.second is None or one.rows is None or one.scores is None or one.scores.replayed is None:
            continue
        sizes.append(np.abs(one.second - one.scores.replayed))
        members.append((one.rows[:, layer, :, None] == np.arange(evidence.num_experts)).any(1))
    if not sizes:
        return None
    size, is_member = np.log(np.concatenate(sizes) + 1e-7), np.concatenate(members)
    found: list[tuple[float, float, int]] = []
    for expert in range(evidence.num_experts):
        inside, outside = size[is_member[:, expert]], size[~is_member[:, expert]]
        if min(len(inside), len(outside)) >= MIN_MEMBERS:
            error = np.sqrt(inside.var() / len(inside) + outside.var() / len(outside))
            more = float(inside.mean() - outside.mean())
            found.append((more / max(float(error), 1e-9), more, expert))
    found.sort(reverse=True)
    chosen = [each for each in found if each[0] >= STANDS_OUT and each[0] > found[0][0] / 2]
    if not 1 <= len(chosen) <= 2:
        return None
    return Suspect(layer, sorted(expert for _, _, expert in chosen), float(np.exp(chosen[0][1])))


FAINT: Final = 0.01
"""Part of the mean square difference below which a position agrees."""


NEAR: Final = 8
"""Positions in which most sequences must differ if the position is the cause."""


def first_position(pairs: Sequence[Pair]) -> int:
    """Return the first position from which on the passes of whole sequences do not agree. 0 without pairs.

    0 also if most sequences still agree there: then certain tokens are off, and not positions.
    """
    if not pairs:
        return 0
    table = np.full((len(pairs), max(len(pair[0]) for pair in pairs)), np.nan)
    for line, pair in zip(table, pairs, strict=True):
        line[: len(pair[0])] = np.square(differences([pair]))
    faint = FAINT * np.nanmean(table)
    first = int(np.argmax(np.nanmean(table, 0) > faint))
    near = table[~np.isnan(table[:, first]), first : first + NEAR]
    return first if np.mean(np.nan_to_num(near).max(1) > faint) > 0.5 else 0


def rounding_gain(sampled: Iterable[Sampled]) -> float:
    """Return how many times smaller the mean square difference is if the reference's routers are less precise.

    The better of the two ways of rounding counts. 1: no smaller, or nothing was computed so.
    """
    squares: list[list[float]] = [[], [], []]
    for one in sampled:
        if one.second is not None and one.scores is not None and one.scores.rounded:
            for column, values in zip(squares, (one.scores.replayed, *one.scores.rounded), strict=True):
                column.extend(np.square(np.asarray(values, float) - one.second))
    means = [float(np.mean(column)) for column in squares if column]
    return max(means[0] / max(min(means[1:]), 1e-30), 1.0) if means else 1.0


def straightness_of(pairs: Sequence[Pair]) -> float:
    """Return R squared of r as a linear function of the log probability of the second pass."""
    r = differences(pairs)
    x = np.concatenate([other for _, other in pairs]).astype(float) if pairs else np.empty(0)
    if len(r) < MIN_MEMBERS or not np.isfinite(x).all() or x.std() < 1e-6 or r.std() < 1e-12:
        return 0.0
    slope, offset = np.polyfit(x, r, 1)
    return float(1 - (r - slope * x - offset).var() / r.var())


def by_position(pairs: Sequence[Pair], parts: int = 4) -> list[float]:
    """Return the mean difference in each quarter of the answers."""
    split = [np.array_split(np.abs(differences([pair])), parts) for pair in pairs]
    columns = [np.concatenate(column) for column in zip(*split, strict=True)] or [np.empty(0)] * parts
    return [float(column.mean()) if len(column) else 0.0 for column in columns]


def by_rank(sampled: Iterable[Sampled]) -> dict[str, float]:
    """Return the mean difference from the reference of the most likely tokens, of the next nine and of all others."""
    chosen = [(one, one.scores) for one in sampled if one.scores is not None]
    if not chosen:
        return {}
    size = np.concatenate([np.abs(answer_of(one, scores.logprobs) - one.logprobs) for one, scores in chosen])
    ranks = np.concatenate([scores.ranks[one.prompt_len - 1 :] for one, scores in chosen])
    parts = {"0": ranks == 0, "1-9": (ranks > 0) & (ranks < 10), "10 and more": ranks >= 10}
    return {name: float(size[is_in].mean()) for name, is_in in parts.items() if is_in.any()}
