"""How requests end before they are done: left, out of time, closed, or sent again under the same id."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

import bus
from bus import RequestFailed, RequestRejected, RequestTimeout
from tests.bus.test_client import exhaust, greedy
from tests.support.fleet import synthetic_worker, until_idle
from workers.engines.synthetic import SyntheticConfig


async def test_leaving_the_stream_aborts_in_the_engine(nats_url: str, fleet: str) -> None:
    """A caller that stops reading has its request stopped where it runs, and the next request is served."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        async with contextlib.aclosing(rb.generate(greedy(max_tokens=1_000_000))) as stream:
            async for chunk in stream:
                if chunk.chunk_index == 3:
                    break
        async with asyncio.timeout(10):
            await until_idle(engine, rb)
        assert "calls=0" in repr(rb)


async def test_a_deadline_ends_the_request(nats_url: str, fleet: str) -> None:
    """A request that outlasts its `timeout_s` fails with `timeout` and is aborted in the engine."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        with pytest.raises(RequestTimeout, match=r"not finished within 0.5 s") as caught:
            await rb.complete(greedy(max_tokens=1_000_000, timeout_s=0.5))
        assert caught.value.stage == "generation"
        async with asyncio.timeout(10):
            await until_idle(engine, rb)


async def test_a_live_id_is_not_taken_twice(nats_url: str, fleet: str) -> None:
    """A second request of a live id is refused, the first goes on, and later the id is free again."""
    async with (
        synthetic_worker(nats_url, fleet, config=SyntheticConfig(step_s=0.001)),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        async with contextlib.aclosing(rb.generate(greedy(max_tokens=50, request_id="same"))) as stream:
            first = await anext(stream)
            with pytest.raises(RequestRejected, match="live request of this id"):
                await rb.complete(greedy(request_id="same"))
            rest = [chunk async for chunk in stream]
        assert first.num_tokens + sum(chunk.num_tokens for chunk in rest) == 50
        assert (await rb.complete(greedy(request_id="same"))).finish_reason == "length"


async def test_an_id_that_was_given_up_can_be_used_again_at_once(nats_url: str, fleet: str) -> None:
    """A request abandoned midway and sent again under its id gets its own chunks, never those of the first."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with synthetic_worker(nats_url, fleet, config=config), bus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        expected = await rb.complete(greedy(max_tokens=20))
        for _ in range(20):
            async with contextlib.aclosing(rb.generate(greedy(max_tokens=1_000_000, request_id="same"))) as stream:
                await anext(stream)
            again = await rb.complete(greedy(max_tokens=20, request_id="same"))
            np.testing.assert_array_equal(again.token_ids, expected.token_ids)


async def test_closing_the_client_leaves_nothing_behind(nats_url: str, fleet: str) -> None:
    """After close no thread of the client runs, and what it had open is aborted in the engine."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with synthetic_worker(nats_url, fleet, config=config) as (_, engine):
        async with bus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers()
            await rb.complete(greedy())
        threads = threading.enumerate()
        async with bus.connect(nats_url, fleet=fleet) as rb:
            stream = rb.generate(greedy(max_tokens=1_000_000))
            await anext(stream)
            assert threading.enumerate() != threads
        assert threading.enumerate() == threads
        async with bus.connect(nats_url, fleet=fleet) as rb, asyncio.timeout(10):
            await until_idle(engine, rb)
        with pytest.raises(RequestFailed, match="client was closed"):
            await anext(stream)


async def test_a_deadline_frees_the_engine_while_nobody_reads(nats_url: str, fleet: str) -> None:
    """A stream that is not read is aborted at its deadline all the same."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config) as (_, engine),
        bus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers()
        stream = rb.generate(greedy(max_tokens=1_000_000, timeout_s=0.5))
        await anext(stream)
        async with asyncio.timeout(10):
            await until_idle(engine, rb)
        with pytest.raises(RequestTimeout):
            await exhaust(stream)
