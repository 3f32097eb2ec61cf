"""The NATS server goes away for a while: what was open fails clearly, and the fleet is whole again afterwards."""

import asyncio

import pytest

import bus
from bus import GenerateRequest, SamplingParams
from bus.embedded import EmbeddedServer
from schemas.errors import ErrorCode, RequestFailed
from tests.support.fleet import check_generation, synthetic_worker
from workers.engines.synthetic import SyntheticConfig


async def test_open_requests_fail_and_the_fleet_comes_back(fleet: str) -> None:
    """A killed and restarted server: open requests fail as `frames_lost`, the engine is freed, new requests succeed."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    sampling = SamplingParams(max_tokens=1_000_000, temperature=0, ignore_eos=True)
    request = GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=sampling)
    async with (
        EmbeddedServer() as server,
        synthetic_worker(server.url, fleet, config=config) as (worker, engine),
        bus.connect(server.url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        first_life = worker.presence().incarnation
        stream = rb.generate(request)
        await anext(stream)
        await server.kill()
        await server.restart()
        async with asyncio.timeout(30):
            with pytest.raises(RequestFailed) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is ErrorCode.FRAMES_LOST
            assert caught.value.retryable
            await rb.fleet.wait_for_workers()
            short = GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=5, temperature=0))
            while "running=0 waiting=0" not in repr(engine):
                await anext(rb.complete_many([short]))
            check_generation(await rb.complete(short), short)

    assert worker.presence().incarnation != first_life
