"""A cancellation at any await of a client leaves nothing behind, and the next client works."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any

import pytest

import rollbus
from rollbus import GenerateRequest
from tests.support.invariants import observing
from tests.support.processes import worker_process
from tests.support.requests import sized

ENGINE_ARGS = {"step_s": 0.01, "max_model_len": 10_000_000}


async def scenario(nats_url: str, fleet: str) -> None:
    """Use most features of a client, and leave most requests before they end."""
    endless = {"max_tokens": 1_000_000}
    async with rollbus.connect(nats_url, fleet=fleet) as rb:
        await rb.fleet.wait_for_workers()
        await rb.complete(sized(max_tokens=3))
        async with contextlib.aclosing(rb.generate(sized(**endless, request_id="left"))) as stream:
            for _ in range(3):
                await anext(stream)
        async with contextlib.aclosing(rb.generate(sized(**endless, request_id="aborted"))) as stream:
            await anext(stream)
            await rb.abort(["aborted"])
            async for _ in stream:
                pass
        requests: list[GenerateRequest] = [sized(max_tokens=2 + i) for i in range(6)] + [sized(**endless)]
        async with contextlib.aclosing(rb.complete_many(requests, max_in_flight=3)) as results:
            for _ in range(6):
                await anext(results)
        async with contextlib.aclosing(rb.stream_many(requests, max_in_flight=3)) as lists:
            await anext(lists)
        open_at_the_end = rb.generate(sized(**endless))
        await anext(open_at_the_end)
        await rb.fleet.state()


@coroutine
def watched(steps: Any, on_suspend: Callable[[], None]) -> Generator[Any, Any, None]:
    """Run a coroutine, and call `on_suspend` each time it is about to wait."""
    resume: Callable[[Any], Any] = steps.send
    value: Any = None
    while True:
        try:
            waits_for = resume(value)
        except StopIteration:
            return
        on_suspend()
        try:
            resume, value = steps.send, (yield waits_for)
        except BaseException as exc:  # noqa: BLE001 - passed on, as the event loop would
            resume, value = steps.throw, exc


async def run_once(nats_url: str, fleet: str, cancel_at: int | None) -> int:
    """Run the scenario, cancel it at the await with this number, and return the number of awaits."""
    count = 0
    async with asyncio.TaskGroup() as tasks:

        def on_suspend() -> None:
            nonlocal count
            if count == cancel_at:
                task.cancel()
            count += 1

        task = tasks.create_task(watched(scenario(nats_url, fleet), on_suspend))
    # The cancellation must reach the task, and the scenario must not replace it with another error.
    assert task.cancelled() == (cancel_at is not None and cancel_at < count)
    return count


@pytest.mark.proves("P38")
async def test_a_cancelled_client_leaves_no_task_thread_connection_or_request(nats_url: str, fleet: str) -> None:
    """A client that is cancelled at any of its awaits leaves no task, thread, connection or engine request."""
    async with observing(nats_url, fleet) as observer, worker_process(nats_url, fleet, engine_args=ENGINE_ARGS):
        total = await run_once(nats_url, fleet, None)
        await observer.check_at_rest()
        tasks, threads = asyncio.all_tasks(), threading.enumerate()
        for point in range(total):
            await run_once(nats_url, fleet, point)
            assert asyncio.all_tasks() <= tasks, point
            assert threading.enumerate() == threads, point
        await observer.check_at_rest()
        async with rollbus.connect(nats_url, fleet=fleet) as rb:
            assert (await rb.complete(sized())).attempts == 1
    # Connecting, each request method, aborting and closing wait at least once each.
    assert 12 <= total <= 100
