"""A client that is used from another event loop than the one that connected it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import rollbus
from rollbus import Chunk
from rollbus.schemas.errors import BusClosed
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S
from tests.support.requests import endless, greedy


@contextmanager
def worker(nats_url: str, fleet: str) -> Iterator[None]:
    """Run a worker in a thread, because the loops of these tests end."""
    serving, leaving = threading.Event(), threading.Event()

    async def serve() -> None:
        async with synthetic_worker(nats_url, fleet), rollbus.connect(nats_url, fleet=fleet) as rb:
            await rb.fleet.wait_for_workers()
            serving.set()
            await asyncio.to_thread(leaving.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert serving.wait(SOON_S)
        yield
    finally:
        leaving.set()
        thread.join()


async def connected(nats_url: str, fleet: str) -> tuple[rollbus.Client, rollbus.Fleet]:
    """Connect a client and use it once. The caller closes it."""
    rb = await rollbus.connect(nats_url, fleet=fleet).__aenter__()
    assert len((await rb.complete(greedy(1, 2))).token_ids) == 2
    return rb, rb.fleet


async def close(rb: rollbus.Client) -> None:
    """Close the client."""
    await rb.__aexit__(None, None, None)


def calls(rb: rollbus.Client, fleet: rollbus.Fleet) -> dict[str, Callable[[], Coroutine[Any, Any, object]]]:
    """Return the calls of a client that wait for its thread, by name."""
    return {
        "complete": lambda: rb.complete(greedy(1, 2)),
        "generate": lambda: anext(rb.generate(greedy(1, 2))),
        "complete_many": lambda: anext(rb.complete_many([greedy(1, 2)])),
        "abort": lambda: rb.abort(["x"]),
        "state": fleet.state,
        "pause": fleet.pause,
    }


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_client_of_an_ended_loop_is_closed_in_another(nats_url: str, fleet: str, is_closed: bool) -> None:
    """If the loop of a client has ended or stands still, each call in another loop raises `BusClosed` at once.

    The client can be closed in that loop.
    """
    with worker(nats_url, fleet):
        loop = asyncio.new_event_loop()
        rb, of_fleet = loop.run_until_complete(connected(nats_url, fleet))
        if is_closed:
            loop.close()

        async def use() -> None:
            async with asyncio.timeout(SOON_S):
                for call in calls(rb, of_fleet).values():
                    with pytest.raises(BusClosed, match="the event loop that connected this client does not run"):
                        await call()
                await rb.__aexit__(None, None, None)

        asyncio.run(use())
        if not is_closed:
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()
        assert [thread.name for thread in threading.enumerate() if thread.name == f"rollbus-{rb._config.client}"] == []


def test_a_client_whose_loop_continues_works_again(nats_url: str, fleet: str) -> None:
    """A client whose loop stood still works again in that loop."""
    with worker(nats_url, fleet):
        loop = asyncio.new_event_loop()
        rb, _ = loop.run_until_complete(connected(nats_url, fleet))
        with pytest.raises(BusClosed):
            asyncio.run(rb.complete(greedy(1, 2)))
        assert len(loop.run_until_complete(rb.complete(greedy(1, 2))).token_ids) == 2
        loop.run_until_complete(close(rb))
        loop.close()


async def test_a_client_works_from_the_live_loop_of_another_thread(nats_url: str, fleet: str) -> None:
    """While the loop of a client runs, another thread's loop may use the client."""
    with worker(nats_url, fleet):
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            await rb.complete(greedy(1, 2))

            async def use() -> int:
                async with asyncio.timeout(SOON_S):
                    assert len((await rb.fleet.state()).workers) == 1
                    streamed = [chunk async for chunk in rb.generate(greedy(1, 2))]
                    many = [one async for one in rb.complete_many([greedy(1, 2)] * 3, max_in_flight=1)]
                    assert sum(chunk.num_tokens for chunk in streamed) == 2
                    return len((await rb.complete(greedy(1, 2))).token_ids) + len(many)

            assert await asyncio.to_thread(asyncio.run, use()) == 5


async def test_a_stream_of_a_live_client_is_not_affected(nats_url: str, fleet: str) -> None:
    """A stream in the client's own loop ends as before when the client is closed."""
    with worker(nats_url, fleet):
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            chunks: AsyncGenerator[Chunk, None] = rb.generate(endless())
            assert (await anext(chunks)).token_ids_data
            await chunks.aclose()
