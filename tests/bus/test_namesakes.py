"""Two clients of one name: workers can serve only one of them, and the other hears of it."""

import asyncio

import pytest

import bus
from bus import GenerateRequest, SamplingParams
from schemas.errors import ErrorCode, RequestFailed
from tests.support.fleet import synthetic_worker, until_idle
from workers.engines.synthetic import SyntheticConfig


def greedy(max_tokens: int) -> GenerateRequest:
    """A greedy request of exactly `max_tokens`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling)


async def test_the_younger_client_keeps_the_name(nats_url: str, fleet: str) -> None:
    """What the older one has open, or opens later, fails with the reason; the younger one is served."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        bus.connect(nats_url, fleet=fleet, client="same") as older,
    ):
        await older.fleet.wait_for_workers()
        stream = older.generate(greedy(1_000_000))
        await anext(stream)
        async with bus.connect(nats_url, fleet=fleet, client="same") as younger, asyncio.timeout(30):
            await younger.fleet.wait_for_workers()
            with pytest.raises(RequestFailed, match="another client named same") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is ErrorCode.CLIENT_CLOSED
            with pytest.raises(RequestFailed, match="names must differ"):
                await older.complete(greedy(1))
            assert (await younger.complete(greedy(5))).finish_reason == "length"
            await until_idle(engine, younger)
