"""A pause is exact: sampled tokens are delivered, no token arrives until the resume, and no token is lost."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from tests.engine.support import prompt, rows_here
from tests.support.requests import TOLERANCE, expert_sets
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm


NUM_STREAMS = 8
MAX_TOKENS = 200
"""The tokens of each stream: more than the engine generates before the pause, and few enough to fit all at once."""
STREAMS = [
    GenerateRequest(
        prompt_token_ids=prompt(20, seed=500 + number),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0, ignore_eos=True),
    )
    for number in range(NUM_STREAMS)
]
CALLS = 20
"""The number of consecutive calls to the engine core, each of which returns after all earlier outputs."""


class Reading:
    """Reads steps one by one while `may_read` is set."""

    def __init__(self, engine: RunningEngine, keys: list[str]) -> None:
        self.results = {key: Result() for key in keys}
        self.num_tokens = 0
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.has_begun = asyncio.Event()
        self._moved = asyncio.Event()
        self._engine = engine

    async def add(self, request: GenerateRequest) -> str:
        """Submit `request`, and read its steps too."""
        key = await self._engine.add(request)
        self.results[key] = Result()
        return key

    def has_ended(self, *keys: str) -> bool:
        """Return True if all of `keys` have ended."""
        results = [self.results[key] for key in keys]
        return all(result.steps and result.last.finish_reason for result in results)

    async def until_ended(self, *keys: str) -> None:
        """Wait until all of `keys` have ended."""
        while not self.has_ended(*keys):
            self._moved.clear()
            await self._moved.wait()

    async def read(self) -> None:
        """Read until every request has ended."""
        while not self.has_ended(*self.results):
            await self.may_read.wait()
            for step in await self._engine.next():
                self.results[step.key].steps.append(step)
                self.num_tokens += len(step.token_ids)
            self._moved.set()
            if all(len(result.steps) > 2 for result in self.results.values()):
                self.has_begun.set()

    async def see_rest(self) -> int:
        """Wait until all outputs on the way have arrived, and return the number of tokens received in total."""
        llm = self._engine.engine._launch.llm
        for _ in range(CALLS):
            await llm.is_paused()
        return self.num_tokens


@pytest.mark.proves("P21")
def test_paused_streams_equal_undisturbed_streams(moe: RunningEngine) -> None:
    """No token arrives between pause and resume, and the streams equal undisturbed ones.

    The pause itself delivers tokens that were sampled before it.
    """
    engine = moe
    undisturbed = engine.generate(*(replace(stream, cache_salt="undisturbed") for stream in STREAMS))

    async def scenario() -> tuple[list[Result], list[int]]:
        keys = [await engine.add(replace(stream, cache_salt="disturbed")) for stream in STREAMS]
        reading = Reading(engine, keys)
        counts = []
        async with asyncio.TaskGroup() as group:
            group.create_task(reading.read())
            await reading.has_begun.wait()
            reading.may_read.clear()
            await reading.see_rest()
            pause = group.create_task(engine.engine.pause())
            # The engine is paused, and its sampled tokens wait for a reader that is busy.
            await reading.see_rest()
            assert await engine.engine._launch.llm.is_paused()
            reading.may_read.set()
            await pause
            counts.append(reading.num_tokens)
            counts.append(await reading.see_rest())
            await engine.engine.pause()
            assert not await engine.engine.reset_cache(preempt=False)
            assert await engine.engine.reset_cache(preempt=True)
            counts.append(await reading.see_rest())
            await engine.engine.resume()
            await engine.engine.resume()
        return [reading.results[key] for key in keys], counts

    results, counts = engine.call(scenario())

    assert len(set(counts)) == 1
    assert counts[0] < NUM_STREAMS * MAX_TOKENS
    for result, expected in zip(results, undisturbed, strict=True):
        assert result.token_ids == expected.token_ids
        assert np.abs(result.logprobs - expected.logprobs).max() < TOLERANCE
        assert np.array_equal(expert_sets(result.rows), expert_sets(expected.rows))


def test_an_abort_during_a_pause_ends_requests_immediately(moe: RunningEngine) -> None:
    """Requests that are aborted during a pause end immediately, begun or not.

    A request that was added during the pause runs after the resume.
    """
    engine = moe

    async def scenario() -> list[Result]:
        begun = await engine.add(STREAMS[0])
        reading = Reading(engine, [begun])
        async with asyncio.TaskGroup() as group:
            group.create_task(reading.read())
            await reading.has_begun.wait()
            await engine.engine.pause()
            added, stays = await reading.add(STREAMS[1]), await reading.add(STREAMS[2])
            await engine.engine.abort([begun, added])
            await reading.until_ended(begun, added)
            assert reading.results[stays].steps == []
            await engine.engine.resume()
        return [reading.results[key] for key in (begun, added, stays)]

    begun, added, stayed = engine.call(scenario())

    assert begun.last.finish_reason is added.last.finish_reason is FinishReason.ABORT
    assert len(begun.token_ids) > 0
    assert len(begun.rows) == rows_here(20 + len(begun.token_ids) - 1)
    assert added.token_ids == []
    assert len(stayed.token_ids) == MAX_TOKENS


# Requests without a token restart after new weights, so all their results come from the new weights.


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
