"""Serves the application on a listening socket until it is stopped."""

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Final

import uvicorn

from ... import bus
from . import Settings
from .app import make_app
from .edge import SEND_BYTES, Connection, Edge
from .openai.parsers import load_parsers

KEEP_ALIVE_S: Final = 75
"""Seconds, longer than clients keep idle connections. Otherwise a client could send while the service closes."""
MAX_TIMEOUT_MS: Final = 2**31 - 1
"""Limit of the socket option: 25 days."""
WANTED_DESCRIPTORS: Final = 16_384


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of file descriptors to the hard limit. Each connection needs one descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
    service = app.state.service
    # The accepted connections inherit both options. The system closes a connection whose client confirms no data for
    # this time, and keeps little unsent data, so that the service notices a client that does not read.
    timeout_ms = min(round(settings.client_timeout_s * 1000), MAX_TIMEOUT_MS)
    on.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    on.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SEND_BYTES)
    server = _HttpServer(
        uvicorn.Config(
            Edge(app, settings.client_timeout_s),
            ws="none",
            lifespan="off",
            http=Connection,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            # uvicorn declares whole seconds and passes them to a timeout that takes any.
            timeout_graceful_shutdown=settings.stop_timeout_s,  # type: ignore[arg-type]
        )
    )
    signalled: asyncio.CancelledError | None = None
    with closing(on):
        async with service.sessions.serving(), service.services.serving(), asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve([on]))
            watching = tasks.create_task(service.live.run())
            try:
                yield
            except asyncio.CancelledError as error:
                # The group would cancel the server, and with it the open requests. A second signal does.
                signalled = error
            finally:
                watching.cancel()
                service.live.viewers.end()
                server.should_exit = True
                await service.loads.stop()
    if signalled is not None:
        raise signalled


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for uvicorn's error at each answer that the service ends early, as for a client that stalls."""
    return not str(record.msg).startswith("ASGI callable returned without completing response")


logging.getLogger("uvicorn.error").addFilter(_is_news)


class _HttpServer(uvicorn.Server):
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve. If this is cancelled, as by a second signal, cancel the open requests too: they need the client."""
        try:
            await super().serve(sockets)
        except asyncio.CancelledError:
            for task in self.server_state.tasks:
                task.cancel()
            raise

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the command that runs the service."""
        yield
