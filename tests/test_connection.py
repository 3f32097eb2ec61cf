"""The NATS connection: opening, closing, clear errors, and a count of each dropped message."""

import asyncio
import logging
from pathlib import Path

import pytest
from nats import errors as nats_errors
from nats.aio.msg import Msg

from rollbus.bus.nats.connection import drain, open_connection, publish, subscribe
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.errors import BusBroken, BusClosed, LocalProtocolError
from tests.support.nats_server import count_tasks, opened, require_binary
from tests.support.waits import on_both_loops

NOBODY = "nats://127.0.0.1:1"
MEGABYTE = bytes(1024 * 1024)


@on_both_loops
async def test_messages_arrive_in_order_and_no_task_remains(nats_url: str, fleet: str, loop: str) -> None:
    """Messages arrive at the handler in order. After closing, no task remains, and a second close does nothing."""
    received: asyncio.Queue[bytes] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        received.put_nowait(message.data)

    async with opened(nats_url) as connection:
        await subscribe(connection, f"{fleet}.x", receive)
        for data in (b"a", b"b"):
            await publish(connection, f"{fleet}.x", data)

        assert [await received.get(), await received.get()] == [b"a", b"b"]

    await connection.shut()

    assert await count_tasks() == 0


async def test_closing_sends_all_published_messages(nats_url: str, fleet: str) -> None:
    """Closing immediately after publishing loses no message."""
    received: asyncio.Queue[int] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        received.put_nowait(len(message.data))

    async with opened(nats_url) as reader:
        await subscribe(reader, f"{fleet}.x", receive)
        await reader.flush()
        async with opened(nats_url) as writer:
            for _ in range(5):
                await publish(writer, f"{fleet}.x", MEGABYTE)

        assert [await received.get() for _ in range(5)] == [len(MEGABYTE)] * 5


async def test_a_queue_group_shares_messages(nats_url: str, fleet: str) -> None:
    """Exactly one of two subscriptions in a queue group receives each message."""
    received: asyncio.Queue[bytes] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        received.put_nowait(message.data)

    async with opened(nats_url) as connection:
        for _ in range(2):
            await subscribe(connection, f"{fleet}.x", receive, queue="workers")
        await publish(connection, f"{fleet}.x", b"once")
        await connection.flush()
        await received.get()
        await connection.flush()

        assert received.empty()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "names no host"),
        ("nats://", "names no host"),
        ("nats://two words:4222", "names no host"),
        ("http://127.0.0.1:4222", "scheme is 'http'"),
        ("nats://127.0.0.1:99999", "Port out of range"),
        ("127.0.0.1:port", "Port could not be cast"),
        ("nats://127.0.0.1:4222/path", "something follows the port"),
    ],
)
async def test_a_malformed_url_is_refused(url: str, problem: str) -> None:
    """A malformed NATS URL raises an error that names the URL and the problem."""
    with pytest.raises(BusBroken, match=problem) as caught:
        await open_connection(url, name="test")

    assert repr(url) in str(caught.value)


async def test_scheme_and_trailing_slash_of_a_url_are_optional(nats_url: str) -> None:
    """The scheme and a trailing slash of a URL are optional."""
    async with opened(nats_url.removeprefix("nats://") + "/") as connection:
        assert connection.is_connected


async def test_a_missing_server_is_an_error_with_address_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    """If no server answers, the error names the address and the reason but no password; no log line or task remains."""
    with pytest.raises(BusBroken, match=r"no NATS server at nats://\*\*\*@127\.0\.0\.1:1 within 0\.1 s: .*Errno"):
        await open_connection("nats://user:secret@127.0.0.1:1", name="test", timeout_s=0.1)

    assert await count_tasks() == 0
    assert caplog.text == ""


async def test_connecting_to_a_silent_server_fails_at_the_timeout() -> None:
    """Connecting to a server that accepts connections but sends nothing fails after `timeout_s`."""
    accepted: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener:
        with pytest.raises(BusBroken, match=r"within 0\.1 s: it does not answer"):
            await open_connection(f"nats://127.0.0.1:{port}", name="test", timeout_s=0.1)
        for writer in accepted:
            writer.close()
            await writer.wait_closed()

    assert await count_tasks() == 0


@pytest.mark.slow
async def test_the_first_connection_is_retried_until_the_server_runs() -> None:
    """The first connection is retried until the server runs."""
    require_binary()
    async with EmbeddedServer() as server:
        await server.stop()
        async with asyncio.TaskGroup() as tasks:
            opening = tasks.create_task(open_connection(server.url, name="test", timeout_s=30.0))
            await asyncio.sleep(0)
            await server.restart()
        connection = opening.result()

        assert connection.is_connected

        await connection.shut()


async def test_a_wrong_password_is_refused_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the server rejects the user, connecting fails immediately with the server's message, without the password."""
    caplog.set_level(logging.DEBUG)
    guarded = tmp_path / "guarded"
    guarded.write_text(f'#!/bin/sh\nexec {require_binary()} --user rollbus --pass correct "$@"\n')
    guarded.chmod(0o755)
    async with EmbeddedServer(binary=guarded) as server:
        address = server.url.removeprefix("nats://")
        with pytest.raises(BusBroken, match=r"refused 'test': nats: 'Authorization Violation'") as caught:
            await open_connection(f"nats://rollbus:wrong@{address}", name="test", timeout_s=60.0)
        async with opened(f"nats://rollbus:correct@{address}") as connection:
            shown = f"{caught.value} {connection!r} {caplog.text}"

    assert "wrong" not in shown
    assert "correct" not in shown


async def test_a_cancelled_attempt_to_connect_leaves_no_task() -> None:
    """A cancelled attempt to connect leaves no task."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await open_connection(NOBODY, name="test")

    assert await count_tasks() == 0


async def test_errors_of_publishing_are_rollbus_errors(nats_url: str, fleet: str) -> None:
    """Publishing a message that is too large is a local error. A closed connection raises `BusClosed`."""
    async with opened(nats_url) as connection:
        with pytest.raises(LocalProtocolError, match=f"over the server's max_payload of {connection.max_payload}"):
            await publish(connection, f"{fleet}.x", bytes(connection.max_payload + 1))
    with pytest.raises(BusClosed):
        await publish(connection, f"{fleet}.x", b"")
    with pytest.raises(BusClosed):
        await subscribe(connection, f"{fleet}.x", _ignore)


async def test_headers_count_towards_the_largest_message(nats_url: str, fleet: str) -> None:
    """Data that exceeds the limit with its headers is rejected locally: the server would close the connection."""
    received: asyncio.Queue[Msg] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        received.put_nowait(message)

    headers = {"Nats-TTL": "1", "X": "é" * 100}
    num_bytes = len("NATS/1.0\r\nNats-TTL: 1\r\nX: \r\n\r\n") + 200
    async with opened(nats_url) as connection:
        await subscribe(connection, f"{fleet}.x", receive)
        with pytest.raises(LocalProtocolError, match="max_payload"):
            await publish(connection, f"{fleet}.x", bytes(connection.max_payload - num_bytes + 1), headers=headers)
        await publish(connection, f"{fleet}.x", bytes(connection.max_payload - num_bytes), headers=headers)
        message = await received.get()

        assert message.headers == headers
        assert len(message.data) == connection.max_payload - num_bytes
        assert connection.counters().disconnects == 0


async def test_the_owner_receives_the_error_if_the_server_closes_the_connection(nats_url: str, fleet: str) -> None:
    """If the server closes a connection for good, its owner receives the error, and publishing raises it again."""
    heard: asyncio.Queue[Exception] = asyncio.Queue(10)
    async with opened(nats_url, on_error=heard.put_nowait) as connection:
        limit = connection.max_payload
        connection._max_payload = 2 * limit
        await publish(connection, f"{fleet}.x", bytes(limit + 1))
        error = await heard.get()
        with pytest.raises(BusBroken, match="maximum payload violation"):
            await publish(connection, f"{fleet}.x", b"")

    assert isinstance(error, BusBroken)


@pytest.mark.proves("P39")
@pytest.mark.parametrize(("limits", "kept"), [((3, 1000), 3), ((1000, 35), 3)])
async def test_dropped_messages_are_counted_and_reported(
    nats_url: str, fleet: str, limits: tuple[int, int], kept: int
) -> None:
    """Messages beyond a limit of a subscription are dropped, and each of them is counted and reported."""
    taken, release, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    handled: list[bytes] = []
    heard: list[Exception] = []

    async def block(message: Msg) -> None:
        taken.set()
        await release.wait()
        handled.append(message.data)
        if len(handled) == 1 + kept:
            done.set()

    async with opened(nats_url, on_error=heard.append) as connection:
        await subscribe(connection, f"{fleet}.x", block, max_pending_msgs=limits[0], max_pending_bytes=limits[1])
        await publish(connection, f"{fleet}.x", b"0" * 10)
        await taken.wait()
        for _ in range(10):
            await publish(connection, f"{fleet}.x", b"0" * 10)
        await connection.flush()
        release.set()
        await done.wait()

    assert connection.counters().dropped_msgs == len(heard) == 10 - kept
    assert all(isinstance(error, nats_errors.SlowConsumerError) for error in heard)


@pytest.mark.parametrize("is_coroutine", [True, False])
async def test_a_failing_handler_is_counted_and_reported(
    nats_url: str, fleet: str, caplog: pytest.LogCaptureFixture, is_coroutine: bool
) -> None:
    """An exception in a handler is counted, logged with its traceback and reported, and the next message is handled."""
    heard: list[Exception] = []
    handled = asyncio.Event()

    def fail_once(message: Msg) -> None:
        if message.data == b"bad":
            raise ValueError("on purpose")
        handled.set()

    async def fail_later(message: Msg) -> None:
        await asyncio.sleep(0)
        fail_once(message)

    async with opened(nats_url, on_error=heard.append) as connection:
        await subscribe(connection, f"{fleet}.x", fail_later if is_coroutine else fail_once)
        await publish(connection, f"{fleet}.x", b"bad")
        await publish(connection, f"{fleet}.x", b"good")
        await handled.wait()

    assert connection.counters().handler_failures == len(heard) == 1
    assert "ValueError: on purpose" in caplog.text


async def test_a_function_handles_all_messages_before_a_flush_or_the_end_and_none_after_it(
    nats_url: str, fleet: str
) -> None:
    """A handler that is a function has handled all earlier messages when a flush or a drain returns, and no later ones.

    It receives reply subject, headers and the server's status as a coroutine function does.
    """
    handled: list[Msg] = []
    awaited: asyncio.Queue[Msg] = asyncio.Queue(10)

    async def receive(message: Msg) -> None:
        awaited.put_nowait(message)

    async with opened(nats_url) as connection:
        subscription = await subscribe(connection, f"{fleet}.x", handled.append)
        await subscribe(connection, f"{fleet}.x", receive)
        headers = {"Name": "value", "Other": " \u00e4: b\r\nc "}
        await publish(connection, f"{fleet}.x", b"1", reply="answer.here", headers=headers)
        await connection.flush()
        seen = [(m.subject, m.reply, m.headers, m.data, m.sid) for m in (handled[0], await awaited.get())]
        await publish(connection, f"{fleet}.x", b"2")
        await drain(connection, subscription)
        await publish(connection, f"{fleet}.x", b"3")
        await connection.flush()

    assert [one[:4] for one in seen] == [
        (f"{fleet}.x", "answer.here", {"Name": "value", "Other": "\u00e4: b  c"}, b"1")
    ] * 2
    assert [message.data for message in handled] == [b"1", b"2"]


@pytest.mark.parametrize("subject", ["", "a b", "a\tb", "a\r\nb", " a", "a "])
async def test_a_malformed_subject_is_not_sent(nats_url: str, subject: str) -> None:
    """A subject or a reply with a space or a line break is an error, because it would end the command."""
    async with opened(nats_url) as connection:
        with pytest.raises(nats_errors.BadSubjectError):
            await publish(connection, subject, b"")
        if subject:
            with pytest.raises(nats_errors.BadSubjectError):
                await publish(connection, "a", b"", reply=subject)
        with pytest.raises(nats_errors.BadHeaderError):
            await publish(connection, "a", b"", headers={f"n{subject}:": "v"})


async def _ignore(_message: Msg) -> None:
    """Ignore the message."""
