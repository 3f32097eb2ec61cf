"""How requests end early: abandoned, past their deadline, with a closed client, or sent again under the same id."""

import asyncio
import contextlib
import threading

import numpy as np
import pytest

import rollbus
from rollbus import BusBroken, ErrorCode, RequestFailed, RequestRejected, RequestTimeout
from rollbus.bus.client.links import ClientLinks
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.fleet import StartServed, synthetic_worker, until_idle
from tests.support.requests import all_of, error_of, sized
from tests.support.waits import SOON_S, until_true


@pytest.mark.proves("P37")
async def test_a_caller_that_leaves_a_stream_aborts_the_request_in_the_engine(one_worker: StartServed) -> None:
    """If a caller stops reading a stream, the engine aborts the request, and the worker serves the next one."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with one_worker(config=config) as (rb, _, engine):
        async with contextlib.aclosing(rb.generate(sized(max_tokens=1_000_000))) as stream:
            async for chunk in stream:
                if chunk.chunk_index == 3:
                    break
        async with asyncio.timeout(SOON_S):
            await until_idle(engine, rb)
        assert "calls=0" in repr(rb)


@pytest.mark.proves("P37")
async def test_a_deadline_ends_the_request(one_worker: StartServed) -> None:
    """A request that exceeds its `timeout_s` fails with `timeout` and is aborted in the engine."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with one_worker(config=config) as (rb, _, engine):
        with pytest.raises(RequestTimeout, match=r"not finished within 0.5 s") as caught:
            await rb.complete(sized(max_tokens=1_000_000, timeout_s=0.5, model="synthetic"))
        assert caught.value.stage == "generation"
        async with asyncio.timeout(SOON_S):
            await until_idle(engine, rb)


@pytest.mark.proves("P34")
async def test_a_second_request_with_the_id_of_an_open_request_fails(one_worker: StartServed) -> None:
    """A second request with the id of an open request fails, and the first continues.

    Afterwards the id can be used again.
    """
    async with one_worker(config=SyntheticConfig(step_s=0.001)) as (rb, *_):
        async with contextlib.aclosing(rb.generate(sized(max_tokens=50, request_id="same"))) as stream:
            first = await anext(stream)
            with pytest.raises(RequestRejected, match="already in use by an open request"):
                await rb.complete(sized(request_id="same"))
            rest = [chunk async for chunk in stream]
        assert first.num_tokens + sum(chunk.num_tokens for chunk in rest) == 50
        assert (await rb.complete(sized(request_id="same"))).finish_reason == "length"


@pytest.mark.proves("P35")
async def test_the_id_of_an_abandoned_request_can_be_used_again_immediately(one_worker: StartServed) -> None:
    """A request that is abandoned and sent again under its id gets its own chunks, never those of the first request."""
    config = SyntheticConfig(step_s=0.001, max_model_len=10_000_000)
    async with one_worker(config=config) as (rb, *_):
        expected = await rb.complete(sized(max_tokens=20))
        for _ in range(20):
            async with contextlib.aclosing(rb.generate(sized(max_tokens=1_000_000, request_id="same"))) as stream:
                await anext(stream)
            again = await rb.complete(sized(max_tokens=20, request_id="same"))
            np.testing.assert_array_equal(again.token_ids, expected.token_ids)


def client_threads() -> list[str]:
    """Return the names of the client threads in this process. Threads of workers have other names."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rollbus-")]


@pytest.mark.proves("P37", "P38")
async def test_closing_the_client_ends_its_threads_and_aborts_its_requests(nats_url: str, fleet: str) -> None:
    """After a client has closed, none of its threads runs, and its open requests are aborted in the engine."""
    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with synthetic_worker(nats_url, fleet, config=config) as (_, engine):
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers()
            await rb.complete(sized())
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            stream = rb.generate(sized(max_tokens=1_000_000))
            await anext(stream)
            assert len(client_threads()) == 1
        assert client_threads() == []
        async with rollbus.connect(nats_url, fleet=fleet) as rb, asyncio.timeout(SOON_S):
            await until_idle(engine, rb)
        with pytest.raises(RequestFailed, match="client was closed"):
            await all_of(stream)


async def test_an_error_in_the_thread_of_the_client_reaches_every_caller(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error in the client's thread fails open and later calls, and closing the client raises it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("oops")

    config = SyntheticConfig(step_s=0.01, max_model_len=10_000_000)
    async with synthetic_worker(nats_url, fleet, config=config), asyncio.TaskGroup() as tasks:
        rb = await rollbus.connect(nats_url, fleet=fleet).__aenter__()
        await rb.fleet.wait_for_workers()
        streamed, whole = (sized(max_tokens=1_000_000, model="synthetic") for _ in range(2))
        stream = rb.generate(streamed)
        await anext(stream)
        completing = tasks.create_task(error_of(rb.complete(whole), RequestFailed))
        await asyncio.sleep(0)
        monkeypatch.setattr(ClientLinks, "_messages", fail)
        with pytest.raises(RequestFailed, match=r"the client has failed: .*oops"):
            await all_of(stream)
        assert (await completing).code is ErrorCode.CLIENT_CLOSED
        with pytest.raises(BusBroken, match="oops"):
            await rb.fleet.state()
        with pytest.raises(BusBroken, match="oops"):
            await rb.complete(sized())
        await until_true(lambda: not client_threads())  # it reports the error as one of its last acts
        with pytest.raises(ExceptionGroup) as caught:
            await rb.__aexit__(None, None, None)

    assert caught.group_contains(ZeroDivisionError)


async def test_a_client_can_be_entered_again(nats_url: str, fleet: str) -> None:
    """A client that is entered again is a new incarnation with the same name."""
    rb = rollbus.connect(nats_url, fleet=fleet, client="me")
    async with synthetic_worker(nats_url, fleet):
        for _ in range(3):
            async with rb:
                await rb.fleet.wait_for_workers()
                assert (await rb.complete(sized(request_id="same"))).attempts == 1
