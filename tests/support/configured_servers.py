"""Real nats-servers that run from configuration files of the software under test."""

import contextlib
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from rollbus.bus.auth.cluster import ROUTE_PORT_OFFSET
from tests.support.nats_server import require_binary
from tests.support.patience import SOON_S

PORTS: Final = (10_000, 20_000)
"""Port range of the servers. Also with the route offset, it lies below the client ports of Linux (32,768 and above)."""


def free_nodes(count: int) -> list[str]:
    """Return addresses on this machine whose client and route ports are free.

    The system does not assign these ports to outgoing connections, which could otherwise occupy them before the server
    does.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            port = random.randrange(*PORTS)
            with contextlib.ExitStack() as pair, contextlib.suppress(OSError):
                for one in (port, port + ROUTE_PORT_OFFSET):
                    pair.enter_context(socket.create_server(("127.0.0.1", one)))
                held.enter_context(pair.pop_all())
                ports.append(port)
    return [f"127.0.0.1:{port}" for port in ports]


def check_config(path: Path) -> None:
    """Assert that nats-server accepts a configuration."""
    command = [str(require_binary()), "-t", "-c", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert ended.returncode == 0, ended.stderr


class ConfiguredServer:
    """One nats-server, which a test can stop and start again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server without waiting until it is ready."""
        with self._path.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen([str(require_binary()), "-c", str(self._path)], stdout=log, stderr=log)

    def end(self, *, is_killed: bool = False) -> None:
        """Stop the server, by SIGKILL if `is_killed`."""
        if self._process is not None:
            self._process.kill() if is_killed else self._process.terminate()
            self._process.wait(SOON_S)
            self._process = None


@contextlib.asynccontextmanager
async def configured_servers(paths: Sequence[Path]) -> AsyncIterator[list[ConfiguredServer]]:
    """Run one server for each configuration."""
    servers = [ConfiguredServer(path) for path in paths]
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.end, is_killed=True)
            server.start()
        yield servers
