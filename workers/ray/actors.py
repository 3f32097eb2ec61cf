"""The actors of a fleet on Ray: a worker, and a NATS server."""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import ray

from ...bus.logs import set_up
from ...bus.nats.embedded import EmbeddedServer
from ...schemas.errors import EXIT_DUPLICATE_WORKER, DuplicateWorker, InvalidRequest, RollbusError
from ..__main__ import configure, parser, serve
from ..config import WorkerConfig
from ..worker import Worker


class WorkerActor:
    """One worker. Its engine runs in this actor's process, because vLLM finds a placement group only in an actor."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = list(flags)
        self._worker: Worker | None = None
        self._running: asyncio.Task[Any] | None = None
        self._is_stopping = False

    async def run(self) -> tuple[int, str]:
        """Run the worker to its end. Return the exit code that its process would have, and the reason."""
        self._running = asyncio.current_task()
        try:
            args = parser().parse_args(self._flags)
        except SystemExit:
            return 2, f"wrong option; the worker's log has it: {' '.join(self._flags[2:])}"
        set_up(args.log_level.upper(), args.log_format)
        try:
            config, make_engine = await asyncio.to_thread(configure, args)

            def make(config: WorkerConfig) -> Worker:
                self._worker = Worker(config, make_engine())
                return self._worker

            if not self._is_stopping:
                await serve(config, make)
        except asyncio.CancelledError:
            # Only `stop` cancels this task, before the worker is connected.
            if not self._is_stopping:
                raise
        except InvalidRequest as exc:
            return 2, exc.message
        except DuplicateWorker as exc:
            return EXIT_DUPLICATE_WORKER, str(exc)
        except RollbusError as exc:
            return 1, str(exc)
        return 0, "stopped"

    async def stop(self) -> None:
        """Drain the worker and stop it. `run` then returns."""
        self._is_stopping = True
        if self._worker is not None and self._worker.is_assembled:
            self._worker.stop()
        elif self._running is not None:
            self._running.cancel()


class NatsActor:
    """One NATS server with JetStream. It ends with this actor's process."""

    def __init__(self) -> None:
        self._host = ray.util.get_node_ip_address()
        self._server: EmbeddedServer | None = None
        # Held until the server starts, so that another program does not take the port.
        self._reserved = socket.create_server((self._host, 0))

    async def route(self) -> str:
        """Return the address for the other servers of the cluster."""
        return f"{self._host}:{self._reserved.getsockname()[1]}"

    async def start(self, name: str, password: str, routes: Sequence[str]) -> str:
        """Start the server and return its URL with user and password.

        Args:
            routes: addresses of all servers of the cluster; one: no cluster.
        """
        port = self._reserved.getsockname()[1]
        self._reserved.close()
        login = {"user": "rollbus", "password": password}
        extra: dict[str, Any] = {"server_name": name, "authorization": login}
        if len(routes) > 1:
            peers = [f"nats://rollbus:{password}@{route}" for route in routes]
            listen = f"{self._host}:{port}"
            extra["cluster"] = {"name": "rollbus", "listen": listen, "routes": peers, "authorization": login}
        self._server = EmbeddedServer(host=self._host, extra=extra)
        await self._server.__aenter__()
        return self._server.url.replace("//", f"//rollbus:{password}@")

    async def wait(self) -> str:
        """Wait for the end of the server. Return the end of its log."""
        if self._server is not None:
            await self._server.wait()
        return "" if self._server is None else self._server.log_tail().rpartition("\n")[2]

    async def stop(self) -> None:
        """Stop the server and remove its files."""
        if self._server is not None:
            await self._server.__aexit__(None, None, None)


def new_password() -> str:
    """Return a password for the NATS servers of one fleet."""
    return secrets.token_urlsafe(24)
