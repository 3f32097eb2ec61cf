"""The thread that runs a client's connection."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import rollbus
from rollbus.bus.client.thread import LoopThread
from rollbus.schemas.errors import BusBroken, BusClosed
from tests.support.fleet import synthetic_worker
from tests.support.requests import greedy
from tests.support.waits import SOON_S


@contextlib.asynccontextmanager
async def resident(log: list[str]) -> AsyncIterator[list[str]]:
    """Record when this context manager is entered and left."""
    log.append("entered")
    try:
        yield log
    finally:
        await asyncio.sleep(0)
        log.append("left")


def threads() -> list[str]:
    """Return the names of this module's running threads."""
    return [thread.name for thread in threading.enumerate() if thread.name == "t"]


async def test_calls_and_coroutines_run_on_the_thread_in_order() -> None:
    """Posted calls and coroutines run on the thread in the order in which they were submitted."""
    log: list[str] = []

    async def ask() -> tuple[list[str], str]:
        return list(log), threading.current_thread().name

    thread = LoopThread("t", resident(log))
    await thread.start()
    expected = ["entered"]
    for i in range(100):
        thread.post(log.append, f"a{i}")
        thread.post(log.append, f"b{i}")
        expected += [f"a{i}", f"b{i}"]
        assert await thread.run(ask()) == (expected, "t")
    thread.post(log.append, "last")
    await thread.stop()

    assert log == [*expected, "last", "left"]
    assert threads() == []


async def test_a_call_after_the_resident_was_left_does_not_run() -> None:
    """A call that comes while the loop closes its generators gets `BusClosed`: a stream would end early."""
    closing, go = threading.Event(), threading.Event()
    kept: list[AsyncGenerator[int, None]] = []
    ran: list[str] = []

    async def stream() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            closing.set()
            await asyncio.to_thread(go.wait, SOON_S)

    async def use() -> None:
        kept.append(stream())
        await anext(kept[0])

    async def call() -> None:
        ran.append("call")

    thread = LoopThread("t", resident([]))
    await thread.start()
    await thread.run(use())
    thread.request_stop()
    await asyncio.to_thread(closing.wait, SOON_S)
    outcome = thread.submit(call())
    go.set()
    with pytest.raises(BusClosed):
        await asyncio.wrap_future(outcome)
    await thread.stop()

    assert ran == []


async def test_many_posts_wake_a_busy_thread_once() -> None:
    """Any number of posts to a busy thread wake it only once."""
    thread = LoopThread("t", resident([]))
    await thread.start()
    started, go = threading.Event(), threading.Event()
    wake_ups: list[object] = []

    def be_busy() -> None:
        started.set()
        go.wait(SOON_S)

    def wake(callback: Callable[..., object], *args: Any) -> bool:
        wake_ups.append(callback)
        return wake_for_real(callback, *args)

    thread.post(be_busy)
    await asyncio.to_thread(started.wait)
    wake_for_real, thread._wake_thread = thread._wake_thread, wake  # type: ignore[method-assign]
    count: list[int] = []
    for i in range(1000):
        thread.post(count.append, i)
    go.set()
    await thread.stop()

    assert len(count) == 1000
    assert len(wake_ups) == 1


async def test_the_thread_runs_its_timers_while_its_owner_is_blocked() -> None:
    """A timer on the thread fires while the owner's loop is blocked."""
    fired = threading.Event()

    async def later() -> None:
        asyncio.get_running_loop().call_later(0.01, fired.set)

    thread = LoopThread("t", resident([]))
    await thread.start()
    await thread.run(later())
    assert fired.wait(SOON_S)
    await thread.stop()


async def test_an_error_on_entry_of_the_resident_leaves_no_thread() -> None:
    """If the resident raises an error on entry, `start` raises it, and the thread ends."""

    @contextlib.asynccontextmanager
    async def broken(why: str) -> AsyncIterator[None]:
        if why:
            raise BusBroken(why)
        yield

    with pytest.raises(BusBroken, match="no server"):
        await LoopThread("t", broken("no server")).start()
    assert threads() == []


async def test_a_cancelled_start_leaves_no_thread() -> None:
    """Cancelling `start` cancels the entry of the resident, and the thread ends."""
    entering, cancelled = threading.Event(), threading.Event()

    @contextlib.asynccontextmanager
    async def slow() -> AsyncIterator[None]:
        entering.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        yield

    async def start_and_be_cancelled() -> None:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(LoopThread("t", slow()).start())
            await asyncio.to_thread(entering.wait)
            task.cancel()

    await start_and_be_cancelled()
    assert cancelled.is_set()
    assert threads() == []


async def test_a_start_cancelled_before_the_thread_runs_leaves_no_thread() -> None:
    """If `start` is cancelled before the thread runs, the thread ends and leaves the resident if it entered it."""
    log: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(LoopThread("t", resident(log)).start())
        await asyncio.sleep(0)
        task.cancel()
    assert log.count("entered") == log.count("left")
    assert threads() == []


async def test_cancelling_a_call_cancels_its_coroutine_on_the_thread() -> None:
    """Cancelling the caller of `run` cancels its coroutine on the thread, and the thread continues."""
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def one() -> int:
        return 1

    thread = LoopThread("t", resident([]))
    await thread.start()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(thread.run(wait()))
        await asyncio.to_thread(begun.wait)
        task.cancel()
    assert await asyncio.to_thread(cancelled.wait, 10)
    assert await thread.run(one()) == 1
    await thread.stop()


async def test_an_error_of_a_coroutine_reaches_only_its_caller() -> None:
    """The error of a coroutine is raised by `run`, and the thread continues."""

    async def fail() -> None:
        raise ValueError("no")

    thread = LoopThread("t", resident([]))
    await thread.start()
    with pytest.raises(ValueError, match="no"):
        await thread.run(fail())
    await thread.stop()


async def test_an_error_of_a_post_ends_the_thread_and_is_raised_by_stop() -> None:
    """The error of a post ends the thread. Later calls name the error, and `stop` raises it."""
    log: list[str] = []

    def fail() -> None:
        raise ValueError("no")

    async def wait() -> None:
        await asyncio.Event().wait()

    thread = LoopThread("t", resident(log))
    await thread.start()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(expect_broken(thread.run(wait())))
        await asyncio.sleep(0)
        thread.post(fail)
    assert "ValueError('no')" in waiting.result()
    assert "ValueError('no')" in await expect_broken(thread.run(wait()))
    thread.post(log.append, "never")
    with pytest.raises(ValueError, match="no"):
        await thread.stop()
    await thread.stop()
    assert log == ["entered", "left"]
    assert threads() == []


async def test_an_error_of_a_timer_ends_the_thread_and_is_raised_by_stop() -> None:
    """The error of a timer on the thread's loop ends the thread.

    The owner is notified first, and `stop` raises the error.
    """

    async def fail_later() -> None:
        asyncio.get_running_loop().call_later(0.001, [].pop)

    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    thread = LoopThread("t", resident([]), ended.set_result)
    await thread.start()
    await thread.run(fail_later())
    assert isinstance(await ended, IndexError)
    with pytest.raises(IndexError):
        await thread.stop()


async def expect_broken(awaitable: Awaitable[object]) -> str:
    """Return the message of the `BusBroken` that this awaitable must raise."""
    with pytest.raises(BusBroken) as caught:
        await awaitable
    return str(caught.value)


async def test_stopping_fails_running_calls_with_bus_closed() -> None:
    """When the thread stops, a running coroutine fails with `BusClosed`, and its caller is not cancelled."""

    async def wait() -> None:
        await asyncio.Event().wait()

    async def expect_closed(thread: LoopThread[list[str]]) -> bool:
        with pytest.raises(BusClosed):
            await thread.run(wait())
        return True

    thread = LoopThread("t", resident([]))
    await thread.start()
    async with asyncio.TaskGroup() as tasks:
        closed = tasks.create_task(expect_closed(thread))
        await asyncio.sleep(0)
        await thread.stop()
    assert closed.result()
    assert await expect_closed(thread)


async def expect_closed(awaitable: Awaitable[object]) -> None:
    """Check that the stop of the thread ends this awaitable."""
    with pytest.raises(BusClosed):
        await awaitable


@pytest.mark.parametrize("is_cancelled_before", [True, False])
async def test_a_cancelled_coroutine_cleans_up_before_the_resident_is_left(is_cancelled_before: bool) -> None:
    """A cancelled coroutine finishes its cleanup before the resident is left, because the cleanup needs the resident.

    The stop that follows on Ctrl-C does not interrupt the cleanup.
    """
    log: list[str] = []
    waiting = threading.Event()

    async def work() -> None:
        try:
            waiting.set()
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            log.append("clean")

    thread = LoopThread("t", resident(log))
    await thread.start()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(expect_closed(thread.run(work())))
        await asyncio.to_thread(waiting.wait)
        if is_cancelled_before:
            running.cancel()
            await asyncio.wait({running})
        await thread.stop()

    assert running.cancelled() == is_cancelled_before
    assert log == ["entered", "clean", "left"]


async def test_a_cancelled_stop_still_ends_the_thread() -> None:
    """A cancelled `stop` raises the cancellation after the resident was left and the thread has ended."""
    log: list[str] = []
    thread = LoopThread("t", resident(log))
    await thread.start()

    async def stop() -> None:
        with pytest.raises(asyncio.CancelledError):
            await thread.stop()
        assert log == ["entered", "left"]
        assert threads() == []
        raise asyncio.CancelledError

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(stop())
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()


def test_a_thread_ends_after_the_loop_of_its_owner_was_closed() -> None:
    """If the owner's loop was closed without `stop`, the thread ends at its next call into that loop."""
    log: list[str] = []
    thread = LoopThread("t", resident(log))
    asyncio.run(thread.start())
    thread.post(thread.call_in_owner_loop, lambda: None)
    deadline = time.monotonic() + SOON_S
    while threads() and time.monotonic() < deadline:
        threading.Event().wait(0.001)
    assert log == ["entered", "left"]
    assert threads() == []


async def test_a_call_that_finds_the_resident_of_a_failed_thread_closed_raises_the_error_of_the_thread() -> None:
    """A coroutine that starts while a failed thread leaves its resident raises `BusBroken`, not `BusClosed`."""
    is_leaving, go = threading.Event(), threading.Event()

    @contextlib.asynccontextmanager
    async def slow_to_leave() -> AsyncIterator[None]:
        try:
            yield
        finally:
            is_leaving.set()
            await asyncio.to_thread(go.wait, SOON_S)

    async def use() -> None:
        go.set()
        raise BusClosed("the connection to NATS is closed")

    thread = LoopThread("t", slow_to_leave())
    await thread.start()
    thread.post(lambda: 1 // 0)
    await asyncio.to_thread(is_leaving.wait, SOON_S)
    with pytest.raises(BusBroken, match="ZeroDivisionError"):
        await thread.run(use())
    with pytest.raises(ZeroDivisionError):
        await thread.stop()


async def test_calls_from_the_loop_of_another_thread_end_with_the_thread() -> None:
    """A coroutine that another loop waits for ends when the owner stops the thread, and a later one fails."""
    begun = threading.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def use() -> None:
        for _ in range(2):
            with pytest.raises(BusClosed, match="this client was closed"):
                async with asyncio.timeout(SOON_S):
                    await thread.run(wait())

    thread = LoopThread("t", resident([]))
    await thread.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(asyncio.run, use()))
        await asyncio.to_thread(begun.wait, SOON_S)
        await thread.stop()


# A client that is used from another event loop than the one that connected it.


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
        "stream_many": lambda: anext(rb.stream_many([greedy(1, 2)])),
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
                    async for chunks in rb.stream_many([greedy(1, 2)] * 3, max_in_flight=1):
                        streamed += chunks
                    assert sum(chunk.num_tokens for chunk in streamed) == 8
                    return len((await rb.complete(greedy(1, 2))).token_ids) + len(many)

            assert await asyncio.to_thread(asyncio.run, use()) == 5
