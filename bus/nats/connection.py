"""The connection to NATS: the patched nats-py client with rollbus's options and errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...schemas.errors import (
    BusBroken,
    BusClosed,
    LocalProtocolError,
    PermissionDenied,
    RollbusError,
    ServerUnreachable,
)
from ..auth.credentials import Signatures
from ..logs import warning_of
from ..subjects import PREFIX
from .client import Handler, PatchedNatsClient
from .failures import MAX_LOGGED, Denials, FailedServers
from .library import ERR_RE, PERMISSIONS_ERR, Client, Msg, Subscription
from .library import errors as nats_errors
from .server import Server, redact

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 3.0
"""Seconds for the first connection: enough for a server that is starting, and short for a mistyped address."""
ATTEMPT_TIMEOUT_S: Final = 2.0
"""Seconds for one server. A disconnected machine does not even reject the connection."""
CLOSE_TIMEOUT_S: Final = 2.0
"""Seconds for the server to receive unsent data."""
RECONNECT_WAIT_S: Final = 0.25
"""Seconds between attempts, which continue without limit. A restarted server is back within tenths of a second."""
ADVICE: Final = "start one (rollbus up, or nats-server -js), or correct the address (--nats, $ROLLBUS_NATS)"
"""Advice for programs that find no server."""
PING_INTERVAL_S: Final = 10.0
"""Seconds between pings. After two unanswered pings, the connection is lost, so a hanging server is detected within
half a minute."""
PENDING_BYTES: Final = 16 * 1024 * 1024
"""Bytes that may wait to be sent: two of the largest messages, or a second of routed experts and tokens. A short
reconnect then fails no request. Above it, `publish` waits while connected and fails while disconnected."""
FLUSH_TIMEOUT_S: Final = 10.0
"""Seconds that `publish` waits above `PENDING_BYTES` before it reports the problem and continues."""
MAX_PENDING_MSGS: Final = 65_536
"""Received messages that may wait for a handler. Handlers only forward messages, so this covers many reads."""
MAX_PENDING_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of these messages, equal to the server's limit for a slow client. A higher limit would gain little."""
ANSWER_S: Final = 3.0
"""Seconds for the server's answer. If the server does not answer, other calls report that."""
LIST_S: Final = 0.5
"""Seconds for the server to list the connections of its account, which takes milliseconds."""
MAX_CONNECTIONS: Final = 2048
"""Most connections that a server lists: up to a megabyte of JSON."""


class _Listed(msgspec.Struct):
    """A connection or an account in the server's answer."""

    name: str = ""
    leafnodes: int = 0


class _Lists(msgspec.Struct):
    connections: list[_Listed] = []
    account_statz: list[_Listed] = []


class _Answer(msgspec.Struct):
    data: _Lists


@dataclass(slots=True, kw_only=True)
class ConnectionStats:
    """Counters since the connection was opened."""

    disconnects: int = 0
    reconnects: int = 0
    dropped_msgs: int = 0
    """Received messages that were dropped because their handler was too slow."""
    handler_failures: int = 0
    """Messages whose handler raised an exception."""
    streamed_msgs: int = 0
    """Messages that a stream delivered on a subject of rollbus; they were dropped."""


class Connection(PatchedNatsClient):
    """A nats-py client. Made by `open_connection`, closed by `shut`.

    Use it from the event loop that opened it.
    """

    def __init__(
        self,
        server: Server,
        *,
        name: str,
        on_reconnect: Callable[[], Awaitable[None]] | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        super().__init__(requires_tls=server.requires_tls, replicas=server.replicas)
        self._server = server
        self.user = None if server.credentials is None else server.credentials.user
        self.signatures = Signatures(server.credentials)
        """Signing key of this user, and the root keys that it trusts."""
        self.denials = Denials(self.user)
        self._urls = server.urls
        self._shown_urls = ",".join(map(redact, self._urls))
        self._name = name
        self._on_reconnect = on_reconnect
        self._on_error = on_error
        self._is_open = self._is_opening = False
        self._failed = FailedServers(server, name)
        self.lost: BusBroken | None = None
        """Reason why the connection ended permanently without a local close; None: it has not."""
        # Errors that were logged since the last connect.
        self._logged: set[str] = set()
        self.counted = ConnectionStats()

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "closed" if self.is_closed else "disconnected"
        return f"<Connection {self._name} {state} url={self._shown_urls} {self.counters()}>"

    def counters(self) -> ConnectionStats:
        """Return the counters, which change later. nats-py's own counters of messages and bytes are in `stats`."""
        self.counted.reconnects = self.stats["reconnects"]
        return self.counted

    async def open(self, timeout_s: float) -> None:
        """Connect as `open_connection` does."""
        options: dict[str, Any] = {
            "name": self._name,
            "error_cb": self._on_nats_error,
            "disconnected_cb": self._on_nats_disconnect,
            "reconnected_cb": self._on_nats_reconnect,
            "closed_cb": self._on_nats_close,
            "reconnect_time_wait": RECONNECT_WAIT_S,
            "max_reconnect_attempts": -1,
            "connect_timeout": ATTEMPT_TIMEOUT_S,
            "ping_interval": PING_INTERVAL_S,
            "pending_size": PENDING_BYTES,
            "flush_timeout": FLUSH_TIMEOUT_S,
            "tls": self._server.tls.context(),
        }
        if self._server.credentials is not None and self.user is not None:
            self._public_nkey = self.user.public_key
            options["signature_cb"] = self._server.credentials.sign
            options["inbox_prefix"] = self.user.inbox_prefix
        self._is_opening = True
        timeout_s += ATTEMPT_TIMEOUT_S * (len(self._urls) - 1)
        try:
            async with asyncio.timeout(timeout_s):
                await self.connect(list(self._urls), **options)
            self._is_open = True
        except TimeoutError:
            if self._failed.first is not None:
                raise self._failed.first from None
            reason = str(self.last_error or "") or "it does not answer"
            raise ServerUnreachable(
                f"no NATS server at {self._shown_urls} within {timeout_s:g} s: {reason}; {ADVICE}"
            ) from None
        finally:
            self._is_opening = False
            if not self._is_open:
                await self.shut(0.0)
        logger.info("nats.connected name=%s url=%s", self._name, self._display_url())

    async def shut(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send published messages and close. Received messages that no handler has read are dropped. Safe to repeat.

        Args:
            timeout_s: seconds for the server to receive unsent messages; after that, they are dropped.

        Cancellation: closes immediately.
        """
        self._is_open = False
        drop = asyncio.get_running_loop().call_later(timeout_s, self._wire.abort)
        try:
            await self.close()
        finally:
            drop.cancel()
            for subscription in self._subs.values():  # some are left when `close` was cancelled
                subscription._stop_processing()
            self._wire.abort()

    async def request(self, subject: str, *args: Any, **kwargs: Any) -> Msg:
        """Send a request as nats-py does.

        Raise `PermissionDenied` immediately if the server rejects it for this user.
        """
        async with self.denials.expected(subject):
            return await super().request(subject, *args, **kwargs)

    async def _process_err(self, err_msg: str) -> None:
        if PERMISSIONS_ERR not in err_msg:
            await super()._process_err(err_msg)
            return
        # nats-py passes the server's error on in lower case, but subjects are case-sensitive.
        words = ERR_RE.match(self._ps.buf)
        denial = self.denials.add(words[1].decode(errors="replace") if words and words[1] else err_msg)
        if denial is not None:
            self._on_error(denial)

    async def _on_nats_error(self, error: Exception) -> None:
        """Count and log an error that nats-py reports. Pass it to `on_error` if the owner must know it."""
        if isinstance(error, nats_errors.SlowConsumerError):
            self.counted.dropped_msgs = so_far = self.counted.dropped_msgs + 1
            if so_far.bit_count() == 1:  # at 1, 2, 4, 8 ...: one event per message would flood the log
                logger.warning("nats.messages_dropped name=%s subject=%s so_far=%s", self._name, error.subject, so_far)
            self._on_error(error)
        elif not isinstance(error, (nats_errors.Error, OSError)):
            self.on_handler_error(error)
        else:
            self._on_connection_error(error)

    def on_handler_error(self, error: Exception) -> None:
        """Count, log and report an exception of a handler."""
        self.counted.handler_failures += 1
        logger.error("nats.handler_failed name=%s", self._name, exc_info=error)
        self._on_error(error)

    def on_streamed(self, subject: bytes) -> None:
        """Count a message that was dropped because a stream delivered it."""
        self.counted.streamed_msgs = so_far = self.counted.streamed_msgs + 1
        if so_far.bit_count() == 1:
            logger.warning(
                "nats.stream_delivery_dropped subject=%s so_far=%s", subject.decode(errors="replace"), so_far
            )

    def _on_connection_error(self, error: Exception) -> None:
        if not self.is_connected:
            self._wire.abort()  # nats-py drops its reference at the next attempt
        if self._is_open:
            # Attempts to reconnect repeat the errors of each server.
            if str(error) not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(str(error))
                logger.warning("nats.error_received name=%s error=%s", self._name, error)
        elif self._is_opening and (failure := self._failed.add(self._address_now(), error)) is not None:
            raise failure from None  # nats-py propagates it, which ends `connect`

    def _display_url(self) -> str:
        """Return the URL of the current server, without user and password."""
        return f"{self._urls[0].partition(':')[0]}://{self._address_now()}"

    async def _on_nats_disconnect(self) -> None:
        if self._is_open:
            self.counted.disconnects += 1
            logger.warning("nats.disconnected name=%s url=%s", self._name, self._display_url())

    async def _on_nats_reconnect(self) -> None:
        if not self._is_open:
            return
        self._logged.clear()
        logger.info("nats.reconnected name=%s url=%s", self._name, self._display_url())
        # If the connection was lost again, the next reconnect calls this callback again.
        with warning_of(RollbusError, logger, "nats.callback_failed name=%s error=%s", self._name):
            if self._on_reconnect is not None:
                await self._on_reconnect()

    async def _on_nats_close(self) -> None:
        if self._is_open:
            self.lost = BusBroken(f"the NATS server at {self._display_url()} closed {self._name}: {self.last_error}")
            logger.error("nats.connection_lost name=%s error=%s", self._name, self.lost)
            self._on_error(self.lost)


async def open_connection(
    server: str | Server,
    *,
    name: str,
    on_reconnect: Callable[[], Awaitable[None]] | None = None,
    on_error: Callable[[Exception], None] = lambda _: None,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Connection:
    """Connect to a NATS server, and reconnect without limit whenever the connection is lost.

    Args:
        server: `nats://host:port` or `tls://host:port`, with user and password if needed; they are never logged. A
            `Server` also has credentials and TLS. Several URLs with commas are servers of one cluster: the client
            connects to any of them, or to another server of the cluster.
        name: name of the connection in the server's monitoring.
        on_reconnect: called after a reconnect, when all subscriptions are restored. It may publish. Of its exceptions,
            only `RollbusError` is caught.
        on_error: called with `nats.errors.SlowConsumerError` for each dropped message, with each exception of a
            handler, with each `PermissionDenied` that no call waits for, and with the `BusBroken` that ends the
            connection permanently. It must not raise.
        timeout_s: seconds for the first connection, with attempts every quarter of a second. Each further URL adds
            `ATTEMPT_TIMEOUT_S`.

    Cancellation: leaves nothing behind.

    Raises:
        TlsFailed: TLS is required, and the server offers none, or a certificate is rejected.
        ServerUnreachable: no server answered in time.
        BusBroken: a URL is malformed, or all servers rejected this user.
    """
    if isinstance(server, str):
        server = Server(server)
    connection = Connection(server, name=name, on_reconnect=on_reconnect, on_error=on_error)
    await connection.open(timeout_s)
    return connection


async def publish(
    nats: PatchedNatsClient,
    subject: str,
    data: bytes,
    *,
    reply: str = "",
    headers: dict[str, str] | bytes | None = None,
) -> None:
    """Publish a message, and wait while more than `PENDING_BYTES` are unsent. A return does not confirm the arrival.

    Raises:
        LocalProtocolError: `data` and its headers together exceed the server's `max_payload`.
        BusBroken: the connection is down and its buffer is full, or the connection was lost permanently.
        BusClosed: the connection was closed locally.
    """
    try:
        await nats.publish(subject, data, reply, headers)
    except nats_errors.MaxPayloadError as error:
        raise LocalProtocolError(
            f"{len(data)} bytes for {subject} are over the server's max_payload of {nats.max_payload}"
        ) from error
    except nats_errors.OutboundBufferLimitError as error:
        raise BusBroken("the connection to NATS is down, and the buffer of unsent messages is full") from error
    except nats_errors.ConnectionClosedError as error:
        if isinstance(nats, Connection) and nats.lost is not None:
            raise nats.lost from error
        raise BusClosed("the connection to NATS is closed") from error


async def subscribe(
    nats: PatchedNatsClient,
    subject: str,
    handler: Handler,
    *,
    queue: str = "",
    max_pending_msgs: int = MAX_PENDING_MSGS,
    max_pending_bytes: int = MAX_PENDING_BYTES,
) -> Subscription:
    """Call `handler` for each message on `subject`, one after another. It must forward the message and return.

    On subjects of rollbus, messages from a stream are dropped. A program that pulls from a stream chooses the subject
    of the delivery, and no permission limits that subject.

    Args:
        queue: queue group that shares the messages of the subject; empty: receive all.
        max_pending_msgs: messages that may wait for `handler`; further messages are dropped and counted.
        max_pending_bytes: bytes of messages that may wait, with the same effect; must exceed the largest message.

    Raises:
        BusClosed: the connection is closed.
    """
    try:
        return await nats.handle(
            subject,
            handler,
            queue=queue,
            skips_streamed=subject.startswith(f"{PREFIX}."),
            max_msgs=max_pending_msgs,
            max_bytes=max_pending_bytes,
        )
    except nats_errors.ConnectionClosedError as error:
        raise BusClosed("the connection to NATS is closed") from error


async def names_of_subscribers(nats: Connection, *subjects: str) -> frozenset[str] | None:
    """Return the names of all connections that receive one of these subjects.

    None: the server does not tell, or other servers may have more of them: a cluster, or leaf nodes. Users of rollbus
    may not ask, because the answer has the addresses of all connections.
    """
    if nats.user is not None or nats.is_in_cluster:
        return None
    try:
        accounts = (await _list_own(nats, "STATZ", {})).account_statz
        asked = [{"filter_subject": subject, "limit": MAX_CONNECTIONS} for subject in subjects]
        lists = [(await _list_own(nats, "CONNZ", query)).connections for query in asked]
    except (PermissionDenied, nats_errors.Error, OSError, msgspec.MsgspecError):
        return None
    if not accounts or accounts[0].leafnodes or max(map(len, lists)) == MAX_CONNECTIONS:
        return None
    return frozenset(connection.name for listed in lists for connection in listed)


async def _list_own(nats: Connection, what: str, query: dict[str, Any]) -> _Lists:
    answer = await nats.request(f"$SYS.REQ.ACCOUNT.PING.{what}", msgspec.json.encode(query), timeout=LIST_S)
    return msgspec.json.decode(answer.data, type=_Answer).data


@asynccontextmanager
async def connected(server: str | Server, *, name: str) -> AsyncIterator[Connection]:
    """Open a connection for a block, as `open_connection` does."""
    nats = await open_connection(server, name=name)
    try:
        yield nats
    finally:
        await nats.shut()


async def drain(nats: Client, subscription: Subscription, *, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """End `subscription` after its handler has processed every message that the server had sent for it.

    Args:
        timeout_s: seconds for the server to answer. After that, or while disconnected, messages may remain unprocessed.
    """
    if not nats.is_connected:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await subscription.drain()  # type: ignore[no-untyped-call]
    except (nats_errors.Error, OSError) as error:  # a TimeoutError is an OSError
        logger.warning("nats.drain_failed subject=%s error=%s", subscription.subject, error)


async def publish_permitted(nats: Connection, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
    """Publish, and wait until the server has checked the user's permission, if the server answers.

    Raises:
        PermissionDenied: the user may not publish.
        Exception: the errors of `publish`.
    """
    async with nats.denials.expected(subject):
        await publish(nats, subject, data, headers=headers)
        await nats.confirm(timeout_s=ANSWER_S)


async def subscribe_permitted(nats: Connection, subject: str, handler: Handler) -> Subscription:
    """Subscribe, and wait until the server has checked the user's permission, if the server answers.

    Raises:
        PermissionDenied: the user may not subscribe; the subscription is removed.
        Exception: the errors of `subscribe`.
    """
    async with AsyncExitStack() as undo:
        async with nats.denials.expected(subject, "subscribe"):
            subscription = await subscribe(nats, subject, handler)
            # Otherwise each reconnect would subscribe again, and after a cancellation no caller owns the subscription.
            undo.push_async_callback(_end, nats, subscription)
            await nats.confirm(timeout_s=ANSWER_S)
        undo.pop_all()
    return subscription


async def _end(nats: Connection, subscription: Subscription) -> None:
    if not nats.is_closed:
        await subscription.unsubscribe()


async def check_permitted(nats: Connection) -> None:
    """Wait until the server has processed all earlier publications and subscriptions.

    Raises:
        PermissionDenied: the user lacks the permission for one of them.
    """
    await nats.confirm(timeout_s=ANSWER_S)
    if nats.denials.first is not None:
        raise nats.denials.first
