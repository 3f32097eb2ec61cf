"""The NATS connection when the server crashes, returns or does not read."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from nats import errors as nats_errors
from nats.aio.msg import Msg

from rollbus.bus.nats import connection as connection_module
from rollbus.bus.nats.connection import Connection, open_connection, publish, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import BusBroken
from tests.support.nats_server import count_tasks, event_callback, opened, require_binary, until_lost
from tests.support.tcp_proxy import tcp_proxy
from tests.support.waits import SOON_S, on_both_loops

MEGABYTE = bytes(1024 * 1024)


@contextlib.asynccontextmanager
async def stalled(
    *,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[EmbeddedServer, Connection, asyncio.Task[None]]]:
    """Provide a server that does not read, a connection, and a task that waits in `publish`."""

    async def flood() -> None:
        while True:
            await publish(connection, "flood", MEGABYTE)

    require_binary()
    async with (
        EmbeddedServer() as server,
        opened(server.url, on_reconnect=on_reconnect) as connection,
        asyncio.TaskGroup() as tasks,
    ):
        await subscribe(connection, "x", _ignore)
        os.kill(server.pid, signal.SIGSTOP)
        task = tasks.create_task(flood())
        while connection.pending_data_size <= connection_module.PENDING_BYTES:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        yield server, connection, task
        task.cancel()
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.slow
async def test_an_outage_is_survived_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """After an outage the callback has run, and subscriptions and buffered messages remain."""
    require_binary()
    back = asyncio.Event()
    received: asyncio.Queue[bytes] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        received.put_nowait(message.data)

    async with (
        EmbeddedServer() as server,
        opened(server.url, on_reconnect=event_callback(back)) as connection,
    ):
        await subscribe(connection, "x", receive)
        await connection.flush()
        await server.kill()
        await until_lost(connection)
        await publish(connection, "x", b"published meanwhile")
        await server.restart()
        await back.wait()
        counters = connection.counters()

        assert await received.get() == b"published meanwhile"

    assert (counters.disconnects, counters.reconnects) == (1, 1)
    assert caplog.text.count("nats.disconnected") == 1


@pytest.mark.slow
async def test_a_failing_reconnect_callback_does_not_end_the_connection() -> None:
    """A callback that raises a rollbus error is logged, and the connection also survives the next outage."""
    require_binary()
    calls: asyncio.Queue[None] = asyncio.Queue(10)

    async def fail() -> None:
        calls.put_nowait(None)
        raise BusBroken("on purpose")

    async with EmbeddedServer() as server, opened(server.url, on_reconnect=fail) as connection:
        for _ in range(2):
            await server.restart()
            await calls.get()
        await connection.flush()


async def test_a_full_buffer_is_an_error() -> None:
    """While the server is down, publishing works until the buffer is full and then raises an error."""
    require_binary()
    async with EmbeddedServer() as server, opened(server.url) as connection:
        await server.kill()
        await until_lost(connection)
        while connection.pending_data_size + len(MEGABYTE) <= connection_module.PENDING_BYTES:
            await publish(connection, "x", MEGABYTE)
        with pytest.raises(BusBroken, match="the buffer of unsent messages is full"):
            await publish(connection, "x", MEGABYTE)

        assert connection.pending_data_size <= connection_module.PENDING_BYTES


async def test_a_cancelled_flush_does_no_harm(nats_url: str, fleet: str) -> None:
    """Messages still arrive after a cancelled `flush`."""
    handled = asyncio.Event()

    async def receive(_message: Msg) -> None:
        handled.set()

    async with opened(nats_url) as connection:
        await subscribe(connection, f"{fleet}.x", receive)
        async with asyncio.TaskGroup() as tasks:
            flush = tasks.create_task(connection.flush())
            await asyncio.sleep(0)
            flush.cancel()
        await publish(connection, f"{fleet}.x", b"")
        await connection.flush()
        async with asyncio.timeout(SOON_S):
            await handled.wait()

    assert flush.cancelled()


async def test_confirm_covers_all_earlier_messages(nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`confirm` covers all earlier publications, including unsent ones."""
    received: list[bytes] = []

    async def receive(message: Msg) -> None:
        received.append(message.data)

    async def send_nothing(force_flush: bool = False) -> None:
        """Replace the function that wakes nats-py's sender."""

    async with opened(nats_url) as reader, opened(nats_url) as writer:
        await subscribe(reader, f"{fleet}.x", receive)
        assert await reader.confirm(timeout_s=SOON_S)
        monkeypatch.setattr(writer, "_flush_pending", send_nothing)
        await publish(writer, f"{fleet}.x", b"waits")

        assert await writer.confirm(timeout_s=SOON_S)
        await reader.flush()
        assert received == [b"waits"]


async def test_confirm_returns_false_if_the_server_hangs_or_is_disconnected() -> None:
    """`confirm` returns False while the server hangs and while there is no connection."""
    async with (
        EmbeddedServer() as server,
        tcp_proxy(server.url) as proxy,
        opened(proxy.url) as connection,
    ):
        proxy.freeze()
        hangs = await connection.confirm(timeout_s=0.05)
        proxy.thaw()
        await server.kill()
        await until_lost(connection)

        assert not hangs
        assert not await connection.confirm(timeout_s=SOON_S)


async def test_a_confirm_or_request_ends_when_the_connection_is_lost() -> None:
    """A `confirm` or request that waits for an answer ends when the connection is lost, not at its timeout.

    A request sent during the outage is answered after the reconnect.
    """

    async def answer(message: Msg) -> None:
        await message.respond(b"heard")

    async with (
        EmbeddedServer() as server,
        tcp_proxy(server.url) as proxy,
        opened(proxy.url) as connection,
    ):
        await subscribe(connection, "x", answer)
        proxy.freeze()
        async with asyncio.TaskGroup() as tasks:
            confirm = tasks.create_task(connection.confirm(timeout_s=600))
            request = tasks.create_task(_fails(connection.request("x", timeout=600)))
            await asyncio.sleep(0)
            async with asyncio.timeout(SOON_S):
                proxy.cut()
                await asyncio.wait([confirm, request])
                await until_lost(connection)
                later = tasks.create_task(connection.request("x", timeout=SOON_S))
                proxy.thaw()
                await proxy.restore()
                assert (await later).data == b"heard"

        assert not confirm.result()
        assert request.result()


async def test_a_waiting_publish_can_be_cancelled() -> None:
    """A task that waits in `publish` for a server that does not read can be cancelled."""
    async with stalled() as (_, _, task):
        task.cancel()
        await asyncio.wait([task], timeout=SOON_S)

        assert task.cancelled()


@pytest.mark.parametrize("what", ["request", "flush"])
async def test_a_cancel_at_the_moment_of_the_answer_is_not_lost(nats_url: str, fleet: str, what: str) -> None:
    """A request or flush that is cancelled at the moment of its answer ends as cancelled."""
    waits: list[asyncio.Future[object]] = []

    async def ask(connection: Connection) -> None:
        await (connection.flush() if what == "flush" else connection.request(f"{fleet}.x", timeout=SOON_S))

    async def answer(message: Msg) -> None:
        waits.extend(connection._resp_map.values())
        waits[0].add_done_callback(lambda _: asking.cancel())
        await message.respond(b"x")

    async with opened(nats_url) as connection, asyncio.TaskGroup() as tasks:
        await subscribe(connection, f"{fleet}.x", answer)
        asking = tasks.create_task(ask(connection))
        if what == "flush":
            await asyncio.sleep(0)
            connection._pongs[-1].add_done_callback(lambda _: asking.cancel())
    assert asking.cancelled()


async def test_closing_does_not_wait_for_a_server_that_does_not_read() -> None:
    """With unsent bytes and a server that does not read, closing ends after `timeout_s` and leaves no task."""
    async with stalled() as (_, connection, task):
        task.cancel()
        async with asyncio.timeout(SOON_S):
            await connection.shut(timeout_s=0.01)

        assert connection.is_closed

    assert await count_tasks() == 0


async def test_a_cancelled_close_leaves_no_task() -> None:
    """A close that is cancelled while it waits for the server leaves no task."""
    async with stalled() as (_, connection, task):
        task.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await connection.shut(timeout_s=60.0)

    assert await count_tasks() == 0


@pytest.mark.parametrize("loop", ["uvloop"])
async def test_closing_a_connection_that_was_just_lost_is_no_error(
    nats_url: str, caplog: pytest.LogCaptureFixture, loop: str
) -> None:
    """If the connection is lost during the last write, a close still runs its callback and leaves no task."""
    told = asyncio.Event()
    connection = await open_connection(nats_url, name="test")
    connection._closed_cb = event_callback(told)
    await publish(connection, "x", b"unsent")
    connection._wire.abort()
    await connection.shut()

    assert connection.is_closed
    assert await count_tasks() == 0
    assert told.is_set()
    assert "nats.final_flush_failed" in caplog.text


@pytest.mark.parametrize("loop", ["uvloop"])
@pytest.mark.parametrize("what", ["publish", "subscribe", "ping"])
async def test_a_write_to_a_lost_connection_starts_the_reconnect(
    nats_url: str, fleet: str, what: str, loop: str
) -> None:
    """The first write after an unnoticed loss raises no error, and published messages arrive after the reconnect."""
    received: asyncio.Queue[bytes] = asyncio.Queue(10)
    back = asyncio.Event()

    async def receive(message: Msg) -> None:
        received.put_nowait(message.data)

    async with opened(nats_url, on_reconnect=event_callback(back)) as connection, asyncio.timeout(SOON_S):
        await subscribe(connection, f"{fleet}.x", receive)
        await connection.flush()
        for task in (connection._flusher_task, connection._reading_task):  # these tasks would detect the loss
            task.cancel()
        connection._wire.abort()
        await asyncio.sleep(0)
        match what:
            case "publish":
                await publish(connection, f"{fleet}.x", b"in between")
            case "subscribe":
                await subscribe(connection, f"{fleet}.y", receive)
            case _:
                await connection._send_ping()
        await back.wait()
        await publish(connection, f"{fleet}.{'y' if what == 'subscribe' else 'x'}", b"afterwards")

        if what == "publish":
            assert await received.get() == b"in between"
        assert await received.get() == b"afterwards"


@on_both_loops
async def test_a_lost_transport_rejects_writes(nats_url: str, loop: str) -> None:
    """On each event loop, a lost transport rejects writes, so that no caller assumes that the bytes were sent."""
    async with opened(nats_url) as connection:
        connection._wire.abort()
        with pytest.raises(ConnectionResetError):
            connection._wire.write(b"x")


@pytest.mark.slow
async def test_a_dead_server_is_noticed_with_bytes_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stops reading and answering counts as disconnected despite unsent bytes; its return is detected."""
    monkeypatch.setattr(connection_module, "PING_INTERVAL_S", 0.02)
    back = asyncio.Event()
    async with (
        stalled(on_reconnect=event_callback(back)) as (server, connection, task),
        asyncio.timeout(SOON_S),
    ):
        await until_lost(connection)
        task.cancel()
        os.kill(server.pid, signal.SIGCONT)
        await back.wait()

        assert connection.is_connected


async def _fails(request: Awaitable[object]) -> bool:
    """Return True if NATS raises an error for the request."""
    try:
        await request
    except nats_errors.Error:
        return True
    return False


async def _ignore(_message: Msg) -> None:
    """Ignore the message."""
