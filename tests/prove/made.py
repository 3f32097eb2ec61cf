"""Evidence of an engine that never ran, sound or with the marks of one fault."""

from typing import Any

import numpy as np

from rollbus.frontend.cli.prove.evidence import Evidence, Sampled
from rollbus.schemas.reference import ABOVE, RANKS, TokenScores

LAYERS, TOP_K, EXPERTS = 3, 2, 8
PROMPT, ANSWER = 40, 32
ARMS = ("alone", "batch", "again", "sampled")


def made_evidence(seed: int = 0, *, prompts: int = 12, dense: bool = False) -> Evidence:
    """Return the evidence of a sound engine in float32."""
    rng = np.random.default_rng(seed)
    sampled = []
    for prompt in range(prompts):
        ids = rng.integers(3, 500, PROMPT + ANSWER).astype("i4")
        truth = np.log(rng.uniform(0.001, 0.1, len(ids) - 1))
        rows = np.stack(
            [[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(len(ids) - 1)]
        ).astype("i4")
        for arm in ARMS:
            if arm == "sampled":
                truth = np.log(rng.uniform(0.001, 0.1, len(ids) - 1))
            sampled.append(_answer(rng, arm, prompt, ids, truth, None if dense else rows))
    facts = {"logprobs_mode": "raw_logprobs", "dtype": "float32", "tie_word_embeddings": "True"}
    layers = () if dense else tuple(range(LAYERS))
    return Evidence(sampled=sampled, num_experts=0 if dense else EXPERTS, layers=layers, facts=facts)


def _answer(rng: Any, arm: str, prompt: int, ids: Any, truth: Any, rows: Any) -> Sampled:
    def near() -> Any:
        return (truth + rng.normal(0, 1e-6, len(truth))).astype("f4")

    above = (rng.uniform(0, 1, len(truth)) * (1 - np.exp(truth))).astype("f4")
    none = None if rows is None else np.zeros((len(truth), LAYERS), "f4")
    scores = TokenScores(
        logprobs=near(),
        ranks=rng.integers(0, 30, len(truth)).astype("i4"),
        above=above,
        above_tail=np.maximum(1 - np.array(ABOVE) / (1 - np.exp(truth))[:, None], 0),
        rank_tail=np.zeros((len(truth), len(RANKS)), "f4"),
        replayed=None if rows is None else near(),
        misses=none,
        others=None if none is None else none.copy(),
    )
    return Sampled(
        arm=arm,
        prompt=prompt,
        prompt_len=PROMPT,
        token_ids=ids,
        logprobs=near()[PROMPT - 1 :],
        top_ids=np.empty((ANSWER, 0), "i4"),
        top_logprobs=np.empty((ANSWER, 0), "f4"),
        is_neutral=arm == "sampled",
        cached=32 if arm == "again" else 0,
        rows=rows,
        second=near(),
        scores=scores,
    )


def move_engine(evidence: Evidence, change: Any) -> None:
    """Change what the engine computes, in both of its passes: `change` returns the difference for each token."""
    for one in evidence.sampled:
        moved = change(one).astype("f4")
        one.second += moved
        one.logprobs += moved[PROMPT - 1 :]


def scale_expert(evidence: Evidence, layer: int, expert: int) -> None:
    """Put in an expert of a wrong scale: its tokens move, and later routers see other inputs."""
    rng = np.random.default_rng(1)

    def change(one: Sampled) -> Any:
        hit = (one.rows[:, layer] == expert).any(-1)
        size = np.where(hit, rng.normal(0, 0.3, len(hit)), rng.normal(0, 0.003, len(hit)))
        one.scores.others[:, layer + 1 :][hit & (rng.uniform(size=len(hit)) < 0.2)] = 0.5
        return size

    move_engine(evidence, change)


def round_routers(evidence: Evidence) -> None:
    """Put in routers that round to bfloat16: some sets of each layer miss by little, and replay heals it."""
    rng = np.random.default_rng(1)
    for one in evidence.sampled:
        hit = rng.uniform(size=one.scores.others.shape) < 0.05
        one.scores.others[hit], one.scores.misses[hit] = 0.01, 0.01
        one.scores.logprobs += np.where(hit.any(-1), rng.normal(0, 0.2, len(hit)), 0).astype("f4")
