"""Requests without a token restart after new weights, so all their results come from the new weights."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt
from tests.support.results import TOLERANCE, expert_sets
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm

BEGUN = GenerateRequest(
    prompt_token_ids=prompt(20, seed=1200),
    sampling=SamplingParams(max_tokens=40, temperature=0.0, logprobs=0, ignore_eos=True),
)
LONG = [
    GenerateRequest(
        prompt_token_ids=prompt(1200, seed=1201 + number),
        sampling=SamplingParams(
            max_tokens=8, temperature=0.0, logprobs=0, prompt_logprobs=0 if number == 1 else None, ignore_eos=True
        ),
    )
    for number in range(3)
]
"""Requests whose prompts each take five steps to prefill."""


async def swap(running: RunningEngine, model: Path) -> tuple[list[Result], int]:
    """Replace the weights while prompts are partly computed.

    Returns:
        The results of `LONG`, and how many of them had no token when the weights were replaced.
    """
    begun = await running.add(replace(BEGUN, cache_salt="swap"))
    keys = [await running.add(request) for request in LONG]
    results = {key: Result() for key in (begun, *keys)}
    waiting: list[str] = []

    async def change() -> None:
        await running.engine.pause()
        waiting.extend(key for key in keys if not results[key].steps)
        await running.engine.load_weights(model)
        for key in keys:
            await running.engine.restart(key)
        await running.engine.resume()

    changing: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as group:
        while not all(result.steps and result.last.finish_reason for result in results.values()):
            for step in await running.next():
                results[step.key].steps.append(step)
            if changing is None and len(results[begun].token_ids) > 1:
                changing = group.create_task(change())
    return [results[key] for key in keys], len(waiting)


@pytest.mark.proves("P17")
def test_partly_computed_prompts_are_recomputed_with_new_weights(
    reloaded: RunningEngine, models: dict[str, Path]
) -> None:
    """Log probabilities, also of the prompt, and all rows equal those of requests that start after the load."""
    results, num_waiting = reloaded.call(swap(reloaded, models["moe"]))
    afterwards = reloaded.generate(*(replace(long, cache_salt="afterwards") for long in LONG))
    reloaded.call(reloaded.engine.load_weights(models["moe2"]))

    assert num_waiting == len(LONG)
    for result, expected in zip(results, afterwards, strict=True):
        assert result.token_ids == expected.token_ids
        assert np.abs(result.logprobs - expected.logprobs).max() < TOLERANCE
        np.testing.assert_array_equal(expert_sets(result.rows), expert_sets(expected.rows))
        given, wanted = result.steps[0].prompt_logprobs, expected.steps[0].prompt_logprobs
        assert (given is None) == (wanted is None)
        if given is not None and wanted is not None:
            np.testing.assert_allclose(given.logprobs, wanted.logprobs, atol=TOLERANCE)
