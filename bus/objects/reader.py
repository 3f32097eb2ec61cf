"""Opens folders of the object store to read single objects."""

import contextlib
import time
from collections.abc import AsyncIterator

from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError
from ..nats.connection import connected
from ..nats.server import Server
from .folder_reader import FolderReader, open_reader
from .layout import split_objects
from .token_bucket import TokenBucket

__all__ = ["ObjectReader"]


class ObjectReader:
    """Opens folders. Each folder has its own connection, so that megabytes do not delay tokens.

    Args:
        server: server that stores the objects.
        name: name of the reading program, for the server's monitoring.
        fetch_rate: bytes per second, at least 1, over all concurrent fetches; None: no limit. When a fetch is slowed
            down, up to 4 MiB of its object may already be in flight.
        nice: nice value of the thread that hashes and writes. At most those 4 MiB arrive before the thread has written
            them, so the whole fetch is as slow as the thread.
    """

    def __init__(self, server: str | Server, *, name: str, fetch_rate: int | None = None, nice: int = 0) -> None:
        self._server = server
        self._name = name
        self._nice = nice
        self._rate = None if fetch_rate is None else TokenBucket(fetch_rate, time.monotonic())

    def __repr__(self) -> str:
        """Return one line."""
        return f"<ObjectReader {self._name}>"

    @contextlib.asynccontextmanager
    async def open_folder(self, objects: str) -> AsyncIterator[FolderReader]:
        """Open the folder `<bucket>/<prefix>` to read single objects of it.

        Raises:
            ControlError: `bad_source`: the folder has no objects, differs from the signed folder, or has a name that
                could lead out of it; `storage`: NATS failed.
        """
        split_objects(objects)
        async with contextlib.AsyncExitStack() as stack:
            try:
                nats = await stack.enter_async_context(connected(self._server, name=f"{self._name}-objects"))
                folder = await stack.enter_async_context(open_reader(nats, objects, self._rate, nice=self._nice))
            except (BusBroken, BusClosed) as error:
                raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be fetched: {error}") from error
            yield folder
