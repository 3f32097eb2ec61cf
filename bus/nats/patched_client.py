"""nats-py's client with its traps closed; `rollbus.bus.nats.connection` gives it our options and errors.

nats-py 2.16 gets these things wrong, which `PatchedNatsClient` mends: after a `flush()` that was cancelled or timed out
nothing is received any more; a `flush()` is answered although what was published before it still waits to be sent;
`publish()`, `request()` and `flush()` may swallow their task's cancellation; `request()` and `flush()` wait for their
whole time for an answer that was lost with the connection; where bytes are unsent, `close()` and the reaction to a lost
connection wait for a server that does not read until TCP gives up; and on uvloop, what is written into a connection
just lost ends whoever writes, `close()` and the task that reconnects among them, with a RuntimeError. And it copies
what it sends twice and what it receives five times, where once will do: large messages take ours.

It also begins TLS only where the server's `INFO` asks for it, and takes addresses from an `INFO` that came before TLS:
anybody between client and server can have written both. `PatchedNatsClient(requires_tls=True)` sends nothing without
TLS: `NatsTransport` refuses each byte. Learned servers are bare addresses: nats-py gives them neither the user of the
URL nor, without a check of each, a name that their certificates must bear, and keeps those that are gone.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable
from typing import Any, Final

from nats import errors as nats_errors
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg

from ...schemas.errors import RemoteProtocolError
from .operations import SubscriptionMessage
from .server_info import parse_info
from .transport import NatsTransport, NoNats, NoTls, Peer

__all__ = ["PatchedNatsClient"]

logger = logging.getLogger(__name__)

MIN_APART_BYTES: Final = 8 * 1024
"""A payload of so much is handed on as it is, beside its command: its copy would cost more than three pieces do."""


class PatchedNatsClient(Client):
    """A nats-py client that can be cancelled, closed and cut off at any moment.

    Args:
        requires_tls: close a connection before anything is sent to a server that offers no TLS, each time: at the first
            connection, after a reconnect, and with each learned server.
        replicas: of the streams that are created here; None: as many as is usual.
    """

    def __init__(self, *, requires_tls: bool = False, replicas: int | None = None) -> None:
        super().__init__()
        self.replicas = replicas
        self._transport = self._wire = NatsTransport(requires_tls=requires_tls)

    @property
    def is_in_cluster(self) -> bool:
        """True if the server is one of several, by what it says of itself."""
        return bool(self._server_info.get("cluster"))

    def peer(self) -> Peer | None:
        """Return what TLS says about the server; None: this connection has no TLS."""
        return self._wire.peer()

    async def confirm(self, *, timeout_s: float) -> bool:
        """Wait until the server has taken all that was published before; False if it did not say so in time.

        False at once where the connection is lost: the answer cannot come any more.
        """
        answers = self._pongs_received  # without a connection, `flush` returns as if all were well
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except (nats_errors.Error, OSError):  # a TimeoutError is an OSError
            return False
        return self.is_connected and self._pongs_received > answers

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        """Like nats-py's, but it can be cancelled at any moment.

        Raises:
            nats.errors.ConnectionReconnectingError: the connection was lost while it waited; it may have arrived.
        """
        message: Msg = await _cancellable(super().request(*args, **kwargs))
        return message

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        """Likewise."""
        await _cancellable(super().flush(*args, **kwargs))

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        if headers is not None or payload_size < MIN_APART_BYTES or not subject:
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        # nats-py copies a payload twice to have its command in one piece.
        head = f"PUB {subject} {reply} {payload_size}\r\n".encode()
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        self._pending += [head, payload]
        self._pending_data_size += len(head) + payload_size
        await self._send_command(b"\r\n")
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    async def _process_connect_init(self) -> None:
        is_tls_first = self.options["tls_handshake_first"]
        is_silent = False
        self.options["tls_hostname"] = self._name_to_prove()
        try:
            await super()._process_connect_init()
        except (nats_errors.Error, OSError) as error:
            is_silent = isinstance(error, TimeoutError) and not self._wire.has_received
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # nats-py takes an INFO for what it should be. Anything else would end the task that reconnects.
            raise NoNats(f"the NATS server sent an INFO that cannot be used: {error}") from error
        finally:
            # A server with `handshake_first` says nothing until the client begins with TLS. The next attempt does so;
            # if it fails too, the one after it listens first again.
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
            # From nats-server 2.12 on they come again behind the handshake.
            learned = []
        self._learn_servers(learned)
        # nats-py reads the rest of it from this dict.
        info["connect_urls"] = []
        await super()._process_info(info, initial_connection)

    def _learn_servers(self, learned: list[str]) -> None:
        """Add the servers that the cluster names to those that are tried, and remove learned ones that it does not."""
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
        # In any order: each names itself first, and the clients of one that ends would all go to the same next one.
        for address in random.sample(learned, len(learned)):
            if address not in known:
                self._server_pool.append(Srv(uri._replace(netloc=user + at + address), discovered=True))

    def _name_to_prove(self) -> str | None:
        """Return the name that the certificate of the present server must bear.

        A server of a URL has to prove the name in it. A learned one has to prove any of these names, one at each
        attempt: what servers say of the names of others proves nothing.
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
                        # Whoever takes a large one decodes it: a bytearray does.
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
            # Boundary of the reading task: without a reconnect nothing would be read any more.
            logger.exception("nats.reading_failed")
            await self._process_op_err(error)

    async def _flush_pending(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await _cancellable(super()._flush_pending(*args, **kwargs))
        except OSError as error:
            # It writes by itself where the task that does so has ended. What is unsent waits for the next connection.
            await self._process_op_err(error)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        try:
            # nats-py writes a ping past what waits to be sent.
            if self.is_connected and self._pending:
                self._wire.writelines(self._pending)
                self._pending, self._pending_data_size = [], 0
            await super()._send_ping(future)
        except OSError as error:
            await self._process_op_err(error)
            if future is not None:  # someone waits for the answer
                raise

    async def _process_pong(self) -> None:
        # The future of a flush() that was given up is done already; setting it would end the task that reads.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_op_err(self, e: Exception) -> None:
        was_connected = self.is_connected
        # nats-py waits until the old transport is closed, and it closes only once all is sent.
        if was_connected:
            self._wire.abort()
        await super()._process_op_err(e)
        if was_connected:
            self._fail_answers()

    def _fail_answers(self) -> None:
        """End all waiting for what the lost connection should have brought; nobody answers again over the next one."""
        waits = [*self._pongs, *self._resp_map.values()]
        self._pongs = []
        for future in waits:
            if not future.done():
                future.set_exception(nats_errors.ConnectionReconnectingError())
                future.exception()  # of a ping that nobody waits for, asyncio would say that nobody looked

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            # The last bytes met a lost connection. Without them nats-py also does the rest of its closing.
            logger.warning("nats.unsent bytes=%s error=%s", self._pending_data_size, error)
            self._pending, self._pending_data_size = [], 0
            self._status = Client.DISCONNECTED
            await super()._close(status, do_cbs)


def _address(server: Srv) -> str:
    """Return host and port, without user and password."""
    netloc: str = server.uri.netloc
    return netloc.rpartition("@")[2]


async def _cancellable(wait: Awaitable[Any]) -> Any:
    """Await what may take its task's cancellation for itself: nats-py's own code, or `asyncio.wait_for` in it."""
    task = asyncio.current_task()
    cancels = task.cancelling() if task is not None else 0
    try:
        return await wait
    finally:
        if task is not None and task.cancelling() > cancels:
            raise asyncio.CancelledError
