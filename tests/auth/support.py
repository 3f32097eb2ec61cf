"""A NATS server that accepts only known users, and the credentials of its users."""

import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path

from rollbus.bus.auth.credentials import Credentials, Role, load_credentials
from rollbus.bus.auth.users import credentials_path, ensure_users
from rollbus.bus.control.updates import provision
from rollbus.bus.nats.connection import Connection, open_connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.nats.server import Server
from rollbus.frontend.cli.app import main
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from rollbus.workers.worker import Worker
from tests.cli.support import Ended
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import require_binary

FLEET = "F"
MODEL = "m"
NAMES = {
    Role.TRAINER: ("alice", "bob"),
    Role.PUBLISHER: ("carol", "dave"),
    Role.WORKER: ("w0", "w1"),
    Role.FRONTEND: ("front", "front2"),
    Role.ADMIN: ("boss",),
    Role.VIEWER: ("eye",),
}
UPLOAD_BYTES = 64 * 1024**2
"""Size limit of the bucket of each model's publishers."""
PUBLISHED = {"carol": (MODEL,), "dave": ("forged",)}
"""The models of each publisher."""


def run_here(*args: str) -> Ended:
    """Run a subcommand of `rollbus` that needs no server in the process of the test."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(args)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, stdout.getvalue(), stderr.getvalue())


class Guarded:
    """A NATS server and the credentials files of its users."""

    def __init__(self, server: EmbeddedServer, folder: Path) -> None:
        self.server = server
        self._folder = folder

    @property
    def url(self) -> str:
        """The URL of the server without a user."""
        return self.server.url

    def path(self, name: str) -> Path:
        """Return the path of a user's credentials file."""
        [role] = [role for role, names in NAMES.items() if name in names]
        return credentials_path(self._folder, FLEET, role, name)

    def credentials(self, name: str) -> Credentials:
        """Return the credentials of a user."""
        return load_credentials(self.path(name))

    def login(self, name: str) -> Server:
        """Return the server with the credentials of this user."""
        return Server(self.url, self.credentials(name))

    def worker(
        self, name: str = "w0", **fields: object
    ) -> contextlib.AbstractAsyncContextManager[tuple[Worker, SyntheticEngine]]:
        """Run a worker as this user. `fields` are those of `synthetic_worker`."""
        own = {"worker_id": name, "credentials": self.credentials(name)}
        return synthetic_worker(self.url, FLEET, model=MODEL, **(own | fields))  # type: ignore[arg-type]

    @contextlib.asynccontextmanager
    async def connected(self, name: str) -> AsyncIterator[Connection]:
        """Open a bare NATS connection of this user, without a client or a worker."""
        nats = await open_connection(self.login(name), name=name)
        try:
            yield nats
        finally:
            await nats.shut()

    def violations(self) -> list[str]:
        """Return the lines of the server's log that report a denied operation."""
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
