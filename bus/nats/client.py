"""nats-py's client with its faults corrected. `rollbus.bus.nats.connection` adds rollbus's options and errors.

`PatchedNatsClient` corrects these faults of nats-py 2.16:

- After a `flush()` that was cancelled or timed out, the client receives no more messages.
- `flush()` may return while earlier published messages still wait to be sent.
- `publish()`, `request()` and `flush()` may swallow the cancellation of their task.
- If the answer was lost with the connection, `request()` and `flush()` wait for their whole timeout.
- With unsent bytes and a server that does not read, `close()` and the handling of a lost connection wait for the TCP
  timeout.
- On uvloop, a write into a connection that was just lost raises a RuntimeError. It ends the writer, for example
  `close()` or the reconnecting task.
- nats-py copies sent bytes twice and received bytes five times. Large messages need one copy here.
- nats-py moves each message through a queue to a task, and each flush too. Most of a small message's cost is that.
- nats-py does not validate `INFO`. It begins TLS only if `INFO` asks for it, and uses addresses from an `INFO` that
  precedes TLS. Any machine between client and server can have written both. `PatchedNatsClient(requires_tls=True)`
  sends nothing without TLS: `NatsTransport` rejects each byte.
- Learned servers are bare addresses. nats-py gives them neither the user of the URL nor, without a check of each, a
  name that their certificates must have. It keeps learned servers that have left the cluster.
"""

import asyncio
import inspect
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, Final, cast

import msgspec

from ...schemas.errors import RemoteProtocolError
from .library import Client, Msg, Srv, Subscription
from .library import errors as nats_errors
from .transport import NatsTransport, NoNats, NoTls, Peer, SubscriptionMessage, encode_headers, parse_headers

logger = logging.getLogger(__name__)

MAX_LEARNED_SERVERS: Final = 64
"""Addresses that one `INFO` may add: several times the servers of a large cluster, each tried within seconds."""
_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.%]+\]):(\d{1,5})", re.ASCII)
MIN_APART_BYTES: Final = 8 * 1024
"""Minimum size of a payload that is sent without a copy, separately from its command. Above it, a copy costs more than
three pieces."""
ACCOUNT_S: Final = 1.0
"""Seconds for the server to say which account a client has."""
SILENT_S: Final = 1.0
"""Seconds after which an attempt without a byte from the server counts as silent, also if the server closed it."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `INFO` that nats-py or this software reads."""

    version: str = ""
    max_payload: Annotated[int, msgspec.Meta(gt=0)] = 1024**2
    headers: bool = False
    auth_required: bool = False
    nonce: str = ""
    """Challenge that the user's key must sign."""
    tls_required: bool = False
    tls_available: bool = False
    """True if the server offers TLS to clients that begin with it."""
    connect_urls: list[str] | None = None
    """The addresses of the cluster's servers, without a scheme."""
    client_id: int = 0
    client_ip: str = ""
    ldm: bool = False

    @property
    def offers_tls(self) -> bool:
        """True if a client may begin a TLS handshake."""
        return self.tls_required or self.tls_available

    @property
    def learned_servers(self) -> list[str]:
        """Addresses that a client can connect to, at most `MAX_LEARNED_SERVERS`."""
        addresses = [url for url in self.connect_urls or () if _is_address(url)]
        return addresses[:MAX_LEARNED_SERVERS]


def parse_info(info: Any) -> ServerInfo:
    """Check the types of a decoded `INFO`.

    Raises:
        RemoteProtocolError: `info` is no object, or a field violates the protocol.
    """
    try:
        return msgspec.convert(info, ServerInfo)
    except msgspec.ValidationError as error:
        raise RemoteProtocolError(f"the NATS server sent an INFO that cannot be used: {error}") from None


def _is_address(url: str) -> bool:
    address = _ADDRESS.fullmatch(url)
    return address is not None and 0 < int(address[1]) < 65536


class Message(Msg):
    """A message whose headers are parsed when they are read. Most of them are not."""

    def __init__(self, client: Client, sid: int, subject: str, reply: str, block: bytes | None, data: bytes) -> None:
        self._client = client
        self._sid = sid
        self.subject = subject
        self.reply = reply
        self.data = data
        self._block = block

    @property
    def headers(self) -> dict[str, str] | None:  # type: ignore[override]
        """The headers by name; None: the message has no headers."""
        return None if self._block is None else parse_headers(self._block)

    def has_header(self, name: str) -> bool:
        """Return True if there is a header of this name."""
        return self._block is not None and name.encode() in self._block and name in (self.headers or ())


Handler = Callable[[Message], None] | Callable[[Msg], Awaitable[None]]
"""Handles a message. A function is called as soon as the message is read; messages wait for a coroutine function."""


class _HandledSubscription(Subscription):
    """A subscription of `PatchedNatsClient.handle`."""

    call: Callable[[Message], object] | None
    """The handler, if it is a function."""
    skips_streamed: bool


class PatchedNatsClient(Client):
    """A nats-py client that handles cancellation, closing and connection loss at any moment.

    Args:
        requires_tls: close the connection to a server that offers no TLS before any byte is sent. This holds for the
            first connection, after a reconnect, and for each learned server.
        replicas: replicas of the streams that this client creates; None: the default of `create_stream`.
    """

    def __init__(self, *, requires_tls: bool = False, replicas: int | None = None) -> None:
        super().__init__()
        self.replicas = replicas
        self._transport = self._wire = NatsTransport(requires_tls=requires_tls, receive=self._receive)
        self._is_flush_due = False

    @property
    def is_in_cluster(self) -> bool:
        """True if the server's `INFO` names a cluster."""
        return bool(self._server_info.get("cluster"))

    def peer(self) -> Peer | None:
        """Return the TLS version and the server's certificate; None: the connection has no TLS."""
        return self._wire.peer()

    async def confirm(self, *, timeout_s: float) -> bool:
        """Return True if the server confirms within `timeout_s` that it has received all earlier publications.

        Return False immediately if the connection is lost, because the answer was lost with it.
        """
        pong = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_ping(pong)
                await pong
        except (nats_errors.Error, OSError):  # a TimeoutError is an OSError
            return False
        return self.is_connected

    async def is_in_only_account(self) -> bool:
        """Return True if this client has the account of a server without users; False also if this cannot be found out.

        Nothing is imported into that account. A program that could forge the answer would have the same rights there.
        """
        if self._server_info.get("auth_required"):
            return False
        try:
            answer = await self.request("$SYS.REQ.USER.INFO", timeout=ACCOUNT_S)
            return bool(msgspec.json.decode(answer.data)["data"]["account"] == "$G")
        except (nats_errors.Error, TimeoutError, msgspec.DecodeError, LookupError, TypeError):
            return False

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        """Send a request as nats-py does. It can be cancelled at any moment.

        Raises:
            nats.errors.ConnectionReconnectingError: the connection was lost before the answer. The request may have
                arrived.
        """
        message: Msg = await _cancellable(super().request(*args, **kwargs))
        return message

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        """Flush as nats-py does. It can be cancelled at any moment, with the errors of `request`."""
        await _cancellable(super().flush(*args, **kwargs))

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | bytes | None = None
    ) -> None:
        """Publish as nats-py does. The headers count towards `max_payload`, as they do in the server.

        Args:
            headers: by name, or as `encode_headers` returns them.
        """
        size = len(payload)
        if self._status != Client.CONNECTED:
            if self.is_closed or self.is_draining_pubs:
                raise nats_errors.ConnectionClosedError
            if not self.is_connected and size + self._pending_data_size > self._max_pending_size:
                raise nats_errors.OutboundBufferLimitError
        if subject.split() != [subject] or (reply and reply.split() != [reply]):
            raise nats_errors.BadSubjectError
        if headers is None:
            head = f"PUB {subject} {reply} {size}\r\n".encode()
        else:
            block = headers if isinstance(headers, bytes) else encode_headers(headers)
            size += len(block)
            head = f"HPUB {subject} {reply} {len(block)} {size}\r\n".encode() + block
        if size > self._max_payload:
            raise nats_errors.MaxPayloadError
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        if size < MIN_APART_BYTES:
            self._pending.append(b"%b%b\r\n" % (head, payload))
        else:
            self._pending += (head, payload, b"\r\n")
        self._pending_data_size += len(head) + len(payload) + 2
        if self._pending_data_size > self._max_pending_size:
            self._wake_flusher()  # it waits until these bytes are sent, and the next line waits for it
            await self._flush_pending(force_flush=True)
        elif not self._is_flush_due:
            self._flush_soon()

    def publish_with_next(self, subjects: Iterable[str], payload: bytes) -> None:
        """Publish a small payload to each of these subjects, in one piece with the next message.

        The caller publishes that message at once.

        Raises:
            nats.errors.BadSubjectError: a subject is wrong; nothing is published.
        """
        end, pieces = f"  {len(payload)}\r\n".encode() + payload + b"\r\n", list[bytes]()
        for subject in subjects:
            if subject.split() != [subject]:
                raise nats_errors.BadSubjectError
            pieces.append(b"PUB %b%b" % (subject.encode(), end))
        self.stats["out_msgs"] += len(pieces)
        self.stats["out_bytes"] += len(pieces) * len(payload)
        self._pending.append(joined := b"".join(pieces))
        self._pending_data_size += len(joined)

    def _flush_soon(self) -> None:
        self._is_flush_due = True
        asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        """Send everything that was published in this turn of the loop. nats-py's task flushes when that has to wait."""
        self._is_flush_due = False
        if not (self._pending and self.is_connected):
            return
        if self._wire.is_writable:
            try:
                self._wire.writelines(self._pending)
            except OSError:
                pass  # the task meets the same error, and handles it
            else:
                self._pending, self._pending_data_size = [], 0
                return
        self._wake_flusher()

    def _wake_flusher(self) -> None:
        if self.is_connected and self._flush_queue is not None and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def handle(
        self, subject: str, handler: Handler, *, queue: str, skips_streamed: bool, max_msgs: int, max_bytes: int
    ) -> Subscription:
        """Subscribe as nats-py does, and call `handler` for each message.

        Args:
            skips_streamed: drop messages that a stream delivered.
            max_msgs: messages that may wait for a coroutine function.
            max_bytes: bytes of these messages.
        """
        if self.is_closed or self.is_draining:
            raise nats_errors.ConnectionClosedError
        self._sid += 1
        # nats-py calls a coroutine function in a task, and moves each message to it through a queue.
        waits = cast("Callable[[Msg], Awaitable[None]]", handler) if inspect.iscoroutinefunction(handler) else None
        subscription = _HandledSubscription(self, self._sid, subject, queue, waits, None, 0, max_msgs, max_bytes)
        subscription.call, subscription.skips_streamed = None if waits else handler, skips_streamed
        subscription._start(self._error_cb)  # type: ignore[no-untyped-call]
        self._subs[self._sid] = subscription
        await self._send_subscribe(subscription)
        return subscription

    def _receive(
        self, sid: int, subject: bytes, reply: bytes, headers: bytes | None, payload: bytes | bytearray
    ) -> bool:
        """Handle or drop a message. Return False if nats-py must handle it."""
        subscription = self._subs.get(sid)
        if type(subscription) is not _HandledSubscription:
            return False
        if self._status != Client.CONNECTED and not self.is_connected:
            return True  # until TLS and the server's first answer, an attacker could have sent it
        if reply and subscription.skips_streamed and reply.startswith(b"$JS.ACK."):
            self.on_streamed(subject)
            return True
        if subscription.call is None:
            return False
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(payload)
        try:
            # Handlers decode large payloads, and a bytearray can be decoded.
            subscription.call(Message(self, sid, subject.decode(), reply.decode(), headers, payload))  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - boundary of the handlers, and the next message must arrive
            self.on_handler_error(error)
        return True

    def on_streamed(self, subject: bytes) -> None:
        """Note a message that was dropped because a stream delivered it."""

    def on_handler_error(self, error: Exception) -> None:
        """Note an exception of a handler."""

    async def _process_connect_init(self) -> None:
        is_tls_first = self.options["tls_handshake_first"]
        is_silent, started = False, time.monotonic()
        self.options["tls_hostname"] = self._name_to_prove()
        try:
            await super()._process_connect_init()
        except (nats_errors.Error, OSError) as error:
            # By default, the server and this client both wait for two seconds, and either may end the attempt first.
            has_waited = isinstance(error, TimeoutError) or time.monotonic() - started >= SILENT_S
            is_silent = has_waited and not self._wire.has_received
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # nats-py does not validate INFO. These errors would end the reconnecting task.
            raise NoNats(f"the NATS server sent an INFO that cannot be used: {error}") from error
        finally:
            # A server with `handshake_first` sends nothing until the client begins TLS. The next attempt begins TLS. If
            # it fails too, the attempt after it waits for INFO again.
            if not self.is_connected:
                self.options["tls_handshake_first"] = self._wire.requires_tls and is_silent and not is_tls_first

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        try:
            checked = parse_info(info)
        except RemoteProtocolError as error:
            raise NoNats(str(error)) from None
        learned = checked.learned_servers
        if initial_connection and self._wire.requires_tls and not self._wire.is_secure:
            if not checked.offers_tls:
                raise NoTls(f"TLS is required, and the NATS server at {self._address_now()} offers none")
            info["tls_required"] = True
            # From nats-server 2.12 on, the server sends the addresses again after the handshake.
            learned = []
        self._learn_servers(learned)
        # nats-py reads the other fields from this dict.
        info["connect_urls"] = []
        await super()._process_info(info, initial_connection)

    def _learn_servers(self, learned: list[str]) -> None:
        """Add the servers that the cluster names, and remove learned servers that it no longer names."""
        if not learned or self._current_server is None:
            return
        self._server_pool = [
            server
            for server in self._server_pool
            if not server.discovered or server is self._current_server or _address(server) in learned
        ]
        known = {_address(server) for server in self._server_pool}
        uri = self._current_server.uri
        user, at, _ = uri.netloc.rpartition("@")
        # Random order: each server names itself first, and all clients of a lost server would try the same next server.
        for address in random.sample(learned, len(learned)):
            if address not in known:
                self._server_pool.append(Srv(uri._replace(netloc=user + at + address), discovered=True))

    def _name_to_prove(self) -> str | None:
        """Return the name that the certificate of the current server must have.

        A server named by URL must prove the name in its URL. A learned server must prove one of these names; each
        attempt uses the next name. A name that another server sends is no proof.
        """
        server = self._current_server
        if server is None or not server.discovered:
            return None if server is None else server.uri.hostname
        names = sorted({one.uri.hostname or "" for one in self._server_pool if not one.discovered})
        return names[server.reconnects % len(names)]

    def _address_now(self) -> str:
        """Return host and port, without password."""
        return "?" if self._current_server is None else _address(self._current_server)

    async def _read_loop(self) -> None:
        try:
            while True:
                for operation in await self._wire.operations():
                    if self.is_closed or self.is_reconnecting:
                        return
                    if isinstance(operation, SubscriptionMessage):
                        sid, subject, reply, headers, payload = operation
                        # Handlers decode large payloads, and a bytearray can be decoded.
                        await self._process_msg(sid, subject, reply, payload, headers)  # type: ignore[arg-type]
                    else:
                        await self._ps.parse(operation)
                        if self._ps.buf:
                            raise NoNats(f"the NATS server sent {operation[:80]!r}")
        except (nats_errors.UnexpectedEOF, nats_errors.ProtocolError, OSError) as error:
            if not (self.is_closed or self.is_reconnecting):
                await self._error_cb(error)
            await self._process_op_err(error)
        except Exception as error:
            # Boundary of the reading task: without a reconnect, the client would receive nothing more.
            logger.exception("nats.reading_failed")
            await self._process_op_err(error)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if not force_flush and self.is_connected and self._flusher_task is not None and not self._flusher_task.done():
            if not self._is_flush_due:
                self._flush_soon()
            return None
        try:
            return await _cancellable(super()._flush_pending(force_flush))
        except OSError as error:
            # nats-py writes here if the flusher task has ended. Unsent bytes wait for the next connection.
            await self._process_op_err(error)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        return parse_headers(headers) or None if headers else None

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        if not self.is_connected:
            raise nats_errors.ConnectionReconnectingError
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        try:
            # nats-py sends a ping before the bytes that wait to be sent.
            self._wire.writelines([*self._pending, b"PING\r\n"])
        except OSError as error:
            await self._process_op_err(error)
            if future is not None:  # a caller waits for the answer
                raise
        else:
            self._pending, self._pending_data_size = [], 0

    async def _process_pong(self) -> None:
        # The future of an abandoned flush() is already done. Setting its result would end the reading task.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_op_err(self, e: Exception) -> None:
        was_connected = self.is_connected
        # nats-py waits until the old transport is closed, and the transport closes only after all bytes are sent.
        if was_connected:
            self._wire.abort()
        await super()._process_op_err(e)
        if was_connected:
            self._fail_answers()

    def _fail_answers(self) -> None:
        """Fail all waits for answers of the lost connection; the next connection brings none."""
        waits = [*self._pongs, *self._resp_map.values()]
        self._pongs = []
        for future in waits:
            if not future.done():
                future.set_exception(nats_errors.ConnectionReconnectingError())
                future.exception()  # marks it as retrieved: asyncio reports an exception that no task reads

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            # The last write met a lost connection. Without unsent bytes, nats-py completes the close.
            logger.warning("nats.final_flush_failed bytes=%s error=%s", self._pending_data_size, error)
            self._pending, self._pending_data_size = [], 0
            self._status = Client.DISCONNECTED
            await super()._close(status, do_cbs)


def _address(server: Srv) -> str:
    """Return host and port, without user and password."""
    netloc: str = server.uri.netloc
    return netloc.rpartition("@")[2]


async def _cancellable(wait: Awaitable[Any]) -> Any:
    """Await code that may swallow the cancellation of its task: nats-py, or its `asyncio.wait_for`."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        return await wait
    finally:
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError
