"""A TCP proxy in front of a NATS server, which simulates a cut, a silent partition and a slow network."""

import asyncio
import contextlib
import enum
import socket
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

BUFFER_BYTES = 64 * 1024
"""Buffer size in the kernel and in the proxy, per connection and direction: small, so that a slow reader blocks its
sender.
"""


class Direction(enum.Flag):
    """The direction of bytes."""

    TO_SERVER = enum.auto()
    TO_CLIENT = enum.auto()
    BOTH = TO_SERVER | TO_CLIENT


@contextlib.asynccontextmanager
async def tcp_proxy(url: str) -> AsyncIterator["TcpProxy"]:
    """Run a proxy to the server at `url`; close all its connections at the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        proxy = TcpProxy(url, tasks)
        await proxy.restore()
        try:
            yield proxy
        finally:
            proxy.cut()


class TcpProxy:
    """The proxy and the state of its network; `tcp_proxy` creates it."""

    def __init__(self, url: str, tasks: asyncio.TaskGroup) -> None:
        self.lead_to(url)
        self._tasks = tasks
        self._port = 0
        self._listener: asyncio.Server | None = None
        self._pipes: set[_Pipe] = set()
        self.held = Direction(0)
        """The directions whose bytes the proxy holds back."""
        self.bytes_per_s: float | None = None
        """Bytes per second to each client; None means no limit."""
        self.make_filter: Callable[[], Callable[[bytes], bytes]] | None = None
        """Makes the filter for the bytes to the client, once for each new connection."""

    def __repr__(self) -> str:
        """Return the state on one line."""
        state = "cut" if self._listener is None else f"holds {self.held}" if self.held else "open"
        return f"<TcpProxy {self.url} {state} connections={self.num_connections}>"

    @property
    def url(self) -> str:
        """The URL that clients use in place of the server's URL."""
        return f"nats://127.0.0.1:{self._port}"

    @property
    def is_open(self) -> bool:
        """True if the proxy accepts connections."""
        return self._listener is not None

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return sum(pipe.direction is Direction.TO_SERVER for pipe in self._pipes)

    def lead_to(self, url: str) -> None:
        """Connect new connections to the server at `url`."""
        parts = urlsplit(url)
        self._server_host, self._server_port = parts.hostname or "", parts.port or 0

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for pipe in list(self._pipes):
            pipe.abort()

    async def restore(self) -> None:
        """Accept connections on the same port as before."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    def freeze(self, direction: Direction = Direction.BOTH) -> None:
        """Hold back all bytes in `direction`, also those of new connections, without closing a connection."""
        self.held |= direction
        self._update_pipes()

    def thaw(self) -> None:
        """Forward all bytes, beginning with those held back."""
        self.held = Direction(0)
        self._update_pipes()

    def _update_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.pause_or_resume()

    def _accept(self) -> "_Pipe":
        return _Pipe(self, Direction.TO_SERVER)

    async def _find_server(self, client: "_Pipe") -> None:
        loop = asyncio.get_running_loop()
        try:
            _, server = await loop.create_connection(
                lambda: _Pipe(self, Direction.TO_CLIENT), self._server_host, self._server_port
            )
        except OSError:
            client.abort()
            return
        server.join(client)
        client.join(server)

    def add(self, pipe: "_Pipe") -> None:
        """Register a new pipe, and connect to the server if the pipe belongs to a client."""
        if self._listener is None:
            pipe.abort()
            return
        self._pipes.add(pipe)
        if pipe.direction is Direction.TO_SERVER:
            self._tasks.create_task(self._find_server(pipe), name="proxy.find_server")

    def remove(self, pipe: "_Pipe") -> None:
        """Remove a pipe that has ended."""
        self._pipes.discard(pipe)


class _Pipe(asyncio.Protocol):
    """One socket of a connection, whose received bytes go to the socket of its peer."""

    def __init__(self, proxy: TcpProxy, direction: Direction) -> None:
        self.direction = direction
        self._proxy = proxy
        self._transport: asyncio.Transport
        self._peer: _Pipe | None = None
        self._is_peer_full = False
        self._rests: asyncio.TimerHandle | None = None
        self._filter = proxy.make_filter() if proxy.make_filter and direction is Direction.TO_CLIENT else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the buffer sizes, and read nothing until the peer exists."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.pause_or_resume()
        self._proxy.add(self)

    def join(self, peer: "_Pipe") -> None:
        """Start to forward bytes; abort the peer if this socket has closed in the meantime."""
        self._peer = peer
        if self._transport.is_closing():
            peer.abort()
        self.pause_or_resume()

    def pause_or_resume(self) -> None:
        """Read only while the network forwards bytes and the peer can accept them."""
        if self._transport.is_closing():
            return
        must_wait = self._peer is None or self._is_peer_full or self._rests is not None
        if must_wait or self.direction in self._proxy.held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Forward bytes, then pause as long as a slow network would need for them."""
        if self._peer is None:
            return
        self._peer._transport.write(data if self._filter is None else self._filter(data))
        if self._proxy.bytes_per_s is not None and self.direction is Direction.TO_CLIENT:
            pause_s = len(data) / self._proxy.bytes_per_s
            self._rests = asyncio.get_running_loop().call_later(pause_s, self._end_pause)
            self.pause_or_resume()

    def _end_pause(self) -> None:
        self._rests = None
        self.pause_or_resume()

    def pause_writing(self) -> None:
        """Pause the peer's reading, because this socket is full."""
        self._set_peer_full(is_full=True)

    def resume_writing(self) -> None:
        """Resume the peer's reading, because this socket accepts bytes again."""
        self._set_peer_full(is_full=False)

    def _set_peer_full(self, *, is_full: bool) -> None:
        if self._peer is not None:
            self._peer._is_peer_full = is_full
            self._peer.pause_or_resume()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the peer after it has sent its buffered bytes."""
        self._proxy.remove(self)
        if self._rests is not None:
            self._rests.cancel()
        if self._peer is not None:
            self._peer._transport.close()

    def abort(self) -> None:
        """Close both sockets immediately and discard buffered bytes."""
        self._transport.abort()
        if self._peer is not None:
            self._peer._transport.abort()
