"""Serves the application on a listening socket until it is stopped."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager

import uvicorn

from ... import bus
from .app import make_app
from .edge import EXPENDABLE, KEEP_ALIVE_S, Edge, HttpConnection, OpenConnections, max_connections
from .openai.parsers import load_parsers
from .settings import Settings
from .status import OPEN_ROUTES

STOP_TIMEOUT_S = 5
"""Seconds that open requests have to finish when the service stops. Then they are aborted."""
ACCEPT_AGAIN_S = 0.1
"""Seconds between a failed accept and the next one. Usually no file descriptor was left, and the oldest connection was
closed to free one."""


logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address. Call this before you start anything else, so that an error occurs first.

    Raises:
        OSError: the address is in use, or it is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Name the protocol: without it, asyncio does not set TCP_NODELAY and would delay small pieces.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(2048)
    except OSError:
        listening.close()
        raise
    return listening


@asynccontextmanager
async def serving(rb: bus.Client, settings: Settings, on: socket.socket) -> AsyncIterator[None]:
    """Serve on a listening socket while the block lasts. Then end the open requests."""
    # The import takes seconds. It runs before the first request, in a thread.
    parsers = await asyncio.to_thread(load_parsers, settings.tool_call_parser, settings.reasoning_parser)
    app = make_app(rb, settings, parsers)
    connections = OpenConnections(
        max_connections(settings.max_in_flight), settings.client_timeout_s, app.state.service.metrics.connection_cut
    )
    server = _HttpServer(
        uvicorn.Config(
            Edge(app, connections, settings.client_timeout_s, frozenset(path for _, path in OPEN_ROUTES)),
            http=HttpConnection,
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
            tasks.create_task(server.serve([]))
            await server.is_up.wait()
            accepting = tasks.create_task(server.accept(on, connections))
            watching = tasks.create_task(app.state.service.live.run())
            try:
                yield
            finally:
                accepting.cancel()
                watching.cancel()
                app.state.service.live.end()
                server.should_exit = True
                await app.state.service.loads.stop()


class _HttpServer(uvicorn.Server):
    """uvicorn's server, which accepts connections one by one, so that older ones can be closed to make room for each.

    uvloop's own server accepts all waiting connections before it reports the first one. If no file descriptor is left,
    it closes new connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and set `is_up`."""
        await super().startup(sockets)
        self.is_up.set()

    async def accept(self, on: socket.socket, connections: OpenConnections) -> None:
        """Accept connections until cancelled, then close the socket. Close older connections if there are too many."""
        loop = asyncio.get_running_loop()

        def make() -> HttpConnection:
            return HttpConnection(connections, self.config, self.server_state, loop)

        has_failed = False
        with closing(on):
            on.setblocking(False)
            while True:
                try:
                    accepted, _ = await loop.sock_accept(on)
                except ConnectionError:
                    # The client has already disconnected.
                    continue
                except OSError as error:
                    if not has_failed:
                        logger.warning("http.accept_failed error=%s", error)
                    has_failed = True
                    connections.cut_oldest(*EXPENDABLE)
                    await asyncio.sleep(ACCEPT_AGAIN_S)
                    continue
                has_failed = False
                connections.make_room()
                try:
                    await loop.connect_accepted_socket(make, accepted)
                except OSError as error:
                    accepted.close()
                    logger.info("http.connection_failed error=%s", error)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command that runs the service."""
        yield
