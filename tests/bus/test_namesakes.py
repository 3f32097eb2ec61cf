"""Two clients with one name: workers serve only the newer client, and the older client fails with the reason."""

import asyncio

import pytest

import rollbus
from rollbus.schemas.errors import ErrorCode, RequestFailed
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import synthetic_worker, until_idle
from tests.support.patience import SOON_S
from tests.support.requests import greedy


@pytest.mark.proves("P68")
async def test_the_newer_client_keeps_the_name(nats_url: str, fleet: str) -> None:
    """Open and later requests of the older client fail with the reason, and the newer client is served."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        rollbus.connect(nats_url, fleet=fleet, client="same") as older,
    ):
        await older.fleet.wait_for_workers()
        stream = older.generate(greedy(1, 1_000_000))
        await anext(stream)
        async with rollbus.connect(nats_url, fleet=fleet, client="same") as younger, asyncio.timeout(SOON_S):
            await younger.fleet.wait_for_workers()
            with pytest.raises(RequestFailed, match="another client with the name same") as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is ErrorCode.CLIENT_CLOSED
            with pytest.raises(RequestFailed, match="client names must be unique"):
                await older.complete(greedy(1, 1))
            assert (await younger.complete(greedy(1, 5))).finish_reason == "length"
            await until_idle(engine, younger)
