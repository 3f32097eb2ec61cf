"""A server that lets in whom it knows, and its users."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rollbus.bus.auth.credentials import Credentials, Role, load_credentials
from rollbus.bus.auth.users import credentials_path, ensure_users
from rollbus.bus.control.provision import provision
from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from tests.support.nats_server import require_binary

__all__ = ["FLEET", "MODEL", "Guarded", "guarded"]

FLEET = "F"
MODEL = "m"
NAMES = {
    Role.TRAINER: ("alice", "bob"),
    Role.PUBLISHER: ("carol", "dave"),
    Role.WORKER: ("w0", "w1"),
    Role.FRONTEND: ("front",),
    Role.ADMIN: ("boss",),
    Role.VIEWER: ("eye",),
}
UPLOAD_BYTES = 64 * 1024**2
"""Of the bucket of each model's publishers."""
PUBLISHED = {"carol": (MODEL,), "dave": ("forged",)}
"""Models of the publishers."""


class Guarded:
    """The server, and the files of its users."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self._folder = folder

    @property
    def url(self) -> str:
        """Of the server, for whoever knows no user."""
        return self.server.url

    def path(self, name: str) -> Path:
        """The credentials file of a user."""
        [role] = [role for role, names in NAMES.items() if name in names]
        return credentials_path(self._folder, FLEET, role, name)

    def credentials(self, name: str) -> Credentials:
        """What stands in it."""
        return load_credentials(self.path(name))

    def login(self, name: str) -> Server:
        """The server as this user connects to it."""
        return Server(self.url, self.credentials(name))

    @contextlib.asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Connection]:
        """A bare connection of this user, as a program of its own would make it."""
        nats = await open_connection(self.login(name), name=name)
        try:
            yield nats
        finally:
            await nats.shut()

    def violations(self) -> list[str]:
        """What the server says that somebody tried and may not."""
        return [line for line in self.server.log_tail().splitlines() if "Violation" in line]


@contextlib.asynccontextmanager
async def guarded(folder: Path, *, models: tuple[str, ...] = (MODEL,)) -> AsyncIterator[Guarded]:
    """Run a server with the users of `NAMES`, and the queues of `models`."""
    require_binary()
    wanted = [(FLEET, role, name) for role, names in NAMES.items() for name in names]
    entries = ensure_users(
        folder, wanted, {(FLEET, Role.PUBLISHER, name): models for name, models in PUBLISHED.items()}
    )
    async with EmbeddedServer(users=[entry.user for entry in entries]) as server:
        guard = Guarded(server, folder)
        await provision(guard.login("boss"), FLEET, models, upload_bytes=UPLOAD_BYTES)
        yield guard
