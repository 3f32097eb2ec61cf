"""The synthetic engine computes its requests together, with the same results as alone."""

import numpy as np
import pytest

from rollbus.bus.protocol.stream.engine_step import RequestStep, split
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine

CONFIG = SyntheticConfig(vocab_size=24, max_model_len=48)
"""A vocabulary so small that requests meet the end of the sequence and their stop tokens."""
KINDS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "greedy": ({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}, {}),
    "to the end": ({"temperature": 0.0, "max_tokens": None}, {}),
    "not before": ({"temperature": 0.0, "max_tokens": 30, "min_tokens": 25}, {}),
    "unseeded": ({"max_tokens": 12}, {}),
    "seeded": ({"max_tokens": 15, "seed": 7, "ignore_eos": True}, {"return_routed_experts": False}),
    "penalties": ({"temperature": 0.0, "max_tokens": 15, "presence_penalty": 0.5}, {"routed_experts_prompt_start": 3}),
    "stop tokens": ({"temperature": 0.0, "max_tokens": 40, "stop_token_ids": [3, 5, 8, 13]}, {}),
    "allowed tokens": ({"max_tokens": 9, "allowed_token_ids": [2, 4, 6], "ignore_eos": True}, {}),
    "top logprobs": ({"temperature": 0.0, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 2}, {}),
    "no logprobs": ({"temperature": 0.0, "max_tokens": 5, "logprobs": None}, {}),
}
"""Sampling parameters, and fields of the request."""


def request(kind: str) -> GenerateRequest:
    """Return a request of this kind with a unique prompt."""
    sampling, fields = KINDS[kind]
    prompt = [(len(kind) * i) % 24 for i in range(1, 8)]
    return GenerateRequest(prompt_token_ids=prompt, sampling=SamplingParams(**sampling), **fields)  # type: ignore[arg-type]


def in_full(step: RequestStep) -> tuple[object, ...]:
    """Return all fields of a step in a form that can be compared."""
    arrays = step.token_ids, step.logprobs, step.routed_experts
    bytes_of = [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in arrays]
    rest = step.top_logprobs, step.prompt_logprobs, step.routed_experts_start, step.cached_tokens
    return (*bytes_of, *rest, step.finish_reason, step.stop_reason)


async def run(joining: list[list[str]], aborted: dict[int, str] | None = None) -> dict[str, list[RequestStep]]:
    """Return the engine's steps of requests with their kind as key, some of which join at each step."""
    engine = SyntheticEngine(CONFIG)
    await engine.start()
    made: dict[str, list[RequestStep]] = {}
    num_open = sum(map(len, joining))
    for kind in joining[0]:
        await engine.add(kind, request(kind))
    num_steps = 0
    async for steps in engine.steps():
        num_steps += 1
        for step in split(steps):
            made.setdefault(step.key, []).append(step)
            num_open -= step.finish_reason is not None
        if not num_open:
            break
        for kind in joining[num_steps] if num_steps < len(joining) else ():
            await engine.add(kind, request(kind))
        if aborted and num_steps in aborted:
            await engine.abort([aborted[num_steps]])
    return made


@pytest.mark.parametrize("per_step", [1, 3, len(KINDS)])
async def test_a_request_gets_the_same_bits_beside_other_requests_as_alone(per_step: int) -> None:
    """A request gets the same bits as alone, whatever requests join, end and are aborted beside it."""
    kinds = list(KINDS)
    joining = [kinds[i : i + per_step] for i in range(0, len(kinds), per_step)]
    together = await run(joining, {6: "greedy"})
    for kind in kinds:
        alone = (await run([[kind]]))[kind]
        shared = together[kind]
        if kind == "greedy":
            assert shared.pop().finish_reason is FinishReason.ABORT
            assert len(shared) < len(alone)
            alone = alone[: len(shared)]
        assert [in_full(step) for step in shared] == [in_full(step) for step in alone]


async def test_requests_end_where_the_sampling_parameters_require() -> None:
    """Requests end at the end of sequence, at stop tokens and at their lengths, and never earlier."""
    made = await run([list(KINDS)])
    ends = {kind: (len(steps), steps[-1].finish_reason, steps[-1].stop_reason) for kind, steps in made.items()}
    assert ends["greedy"] == (20, FinishReason.LENGTH, None)
    assert ends["allowed tokens"] == (9, FinishReason.LENGTH, None)
    num_tokens, reason, stop_token = ends["stop tokens"]
    assert reason is FinishReason.STOP
    assert stop_token == made["stop tokens"][-1].token_ids[0]
    assert all(step.token_ids[0] not in (2, 3, 5, 8, 13) for step in made["stop tokens"][: num_tokens - 1])
    for kind, least in (("to the end", 1), ("not before", 26)):
        num_tokens, reason, _ = ends[kind]
        sampled = [int(step.token_ids[0]) for step in made[kind]]
        assert num_tokens >= least
        assert (sampled[-1] == 2) == (reason is FinishReason.STOP)
        assert 2 not in sampled[:-1]


async def test_the_tokens_never_change_between_releases() -> None:
    """The tokens never change between releases, so that bench figures and fault reports stay comparable."""
    made = await run([["greedy", "seeded", "penalties"]])
    tokens = {kind: np.concatenate([step.token_ids for step in steps])[:6].tolist() for kind, steps in made.items()}
    assert tokens == {
        "greedy": [7, 8, 4, 19, 23, 15],
        "seeded": [3, 11, 21, 1, 22, 19],
        "penalties": [12, 16, 20, 1, 22, 16],
    }
