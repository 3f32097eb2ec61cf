"""The NATS server goes away for a while: what was under way is asked for again, and nothing shows in the results."""

import asyncio

import numpy as np
import pytest

import bus
from bus import GenerateRequest, SamplingParams
from bus.embedded import EmbeddedServer
from tests.support.fleet import check_generation, is_idle, synthetic_worker
from workers.engines.synthetic import SyntheticConfig

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("away_s", [0, 3])
async def test_every_request_completes(fleet: str, away_s: float) -> None:
    """A server killed under load and restarted, at once or after a while: every request ends as if undisturbed."""
    # Of different lengths, so that most are under way when the first has ended.
    requests = [request(i, 1000 - 40 * i) for i in range(20)]
    async with (
        EmbeddedServer() as server,
        synthetic_worker(server.url, fleet, config=SyntheticConfig(step_s=0.001)) as (worker, engine),
        bus.connect(server.url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        first_life = worker.presence().incarnation
        expected = {generation.request_id: generation async for generation in rb.complete_many(requests)}
        stream = rb.generate(requests[0])
        chunks = [await anext(stream)]
        await server.kill()
        # The length of the outage is what this test is about.
        await asyncio.sleep(away_s)
        await server.restart()
        chunks += [chunk async for chunk in stream]
        tokens = np.concatenate([chunk.token_ids for chunk in chunks])
        np.testing.assert_array_equal(tokens, expected[requests[0].request_id].token_ids)
        assert chunks[-1].attempt > 0

        results = rb.complete_many(requests)
        first = await anext(results)
        await server.kill()
        await server.restart()
        generations = {generation.request_id: generation async for generation in results}
        assert len(generations) == 19
        # One more where the client is back before the worker is.
        assert {generation.attempts for generation in generations.values()} <= {2, 3}
        for original in requests:
            generation = generations.get(original.request_id, first)
            check_generation(generation, original)
            np.testing.assert_array_equal(generation.token_ids, expected[original.request_id].token_ids)

    assert worker.presence().incarnation != first_life
    assert is_idle(engine)


def request(prompt: int, max_tokens: int) -> GenerateRequest:
    """A greedy request of exactly `max_tokens`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[prompt, 2, 3], sampling=sampling)
