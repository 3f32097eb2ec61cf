"""Serving the application: on a socket of its own, until told to stop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING

import uvicorn

import bus
from frontend.http.app import make_app
from frontend.http.edge import Edge
from frontend.http.settings import Settings

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol
else:
    # The faster one of the two, if it is installed.
    from uvicorn.protocols.http.auto import AutoHTTPProtocol as HttpProtocol

__all__ = ["listen", "serving"]

STOP_TIMEOUT_S = 5
"""What is still under way when the service is told to stop has so long to end; then its requests are aborted."""
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections: else they meet one that closes as they send."""


def listen(host: str, port: int) -> socket.socket:
    """Take the address, so that whoever cannot have it hears so before anything is started.

    Raises:
        OSError: it is taken, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol: asyncio sends small pieces at once only where it is named (TCP_NODELAY).
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.listen(2048)
    except OSError:
        taken.close()
        raise
    return taken


@asynccontextmanager
async def serving(rb: bus.Client, settings: Settings, on: socket.socket) -> AsyncIterator[None]:
    """Serve on a listening socket while the block lasts; then what is under way is ended."""
    server = _Server(
        uvicorn.Config(
            Edge(make_app(rb, settings), settings.client_timeout_s),
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
    )
    with closing(on):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([on]))
            await server.is_up.wait()
            try:
                yield
            finally:
                server.should_exit = True


class _Connection(HttpProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Let the application cut the connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.is_up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the command that serves, not to the server."""
        yield
