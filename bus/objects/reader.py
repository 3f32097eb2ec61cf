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
    """Opens folders, on a connection of its own for each, so that megabytes do not hold up tokens.

    Args:
        server: where the objects are.
        name: of whoever fetches, for the server's monitoring.
        fetch_rate: bytes in a second, at least 1, over all that is fetched at a time; None: no limit. While one
            object is slowed down, up to 4 MiB of it may already be on their way.
        nice: how far the thread that hashes and writes stands back where others want its core. As no more than those
            4 MiB come before it has written them, the whole fetch is then as slow as it.
    """

    def __init__(self, server: str | Server, *, name: str, fetch_rate: int | None = None, nice: int = 0) -> None:
        self._server = server
        self._name = name
        self._nice = nice
        self._rate = None if fetch_rate is None else TokenBucket(fetch_rate, time.monotonic())

    def __repr__(self) -> str:
        """One line."""
        return f"<ObjectReader {self._name}>"

    @contextlib.asynccontextmanager
    async def open_folder(self, objects: str) -> AsyncIterator[FolderReader]:
        """Open the folder written `<bucket>/<prefix>` for reading single objects of it.

        Raises:
            ControlError: `bad_source`: nothing is there, it is not the folder that was signed, or a name could lead
                out of it; `storage`: NATS failed.
        """
        split_objects(objects)
        async with contextlib.AsyncExitStack() as stack:
            try:
                nats = await stack.enter_async_context(connected(self._server, name=f"{self._name}-objects"))
                folder = await stack.enter_async_context(open_reader(nats, objects, self._rate, nice=self._nice))
            except (BusBroken, BusClosed) as error:
                raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be fetched: {error}") from error
            yield folder
