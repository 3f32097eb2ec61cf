"""Fetching a folder out of the object store: checked, complete or not there at all."""

import asyncio
import contextlib
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Final

from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError
from ..nats.connection import connected
from ..nats.server import Server
from .folder_reader import FolderReader, open_reader
from .layout import ObjectInfo, split_objects
from .new_file import check_room, reason
from .token_bucket import TokenBucket

__all__ = ["FOLDER_PREFIX", "PARTIAL_PREFIX", "ObjectReader"]

logger = logging.getLogger(__name__)

FOLDER_PREFIX: Final = "objects-"
"""Begins the name of a fetched folder."""
PARTIAL_PREFIX: Final = ".objects-"
"""Begins the name of a folder that is being fetched; one that a killed process left is rubbish."""


class ObjectReader:
    """Fetches folders, on a connection of its own for each, so that megabytes do not hold up tokens.

    Args:
        server: where the objects are.
        name: of whoever fetches, for the server's monitoring.
        fetch_rate: bytes in a second, at least 1, over all that is fetched at a time; None: no limit. While one
            object is slowed down, up to 4 MiB of it may already be on their way.
    """

    def __init__(self, server: str | Server, *, name: str, fetch_rate: int | None = None) -> None:
        self._server = server
        self._name = name
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
                folder = await stack.enter_async_context(open_reader(nats, objects, self._rate))
            except (BusBroken, BusClosed) as error:
                raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be fetched: {error}") from error
            yield folder

    async def fetch_folder(self, objects: str, into: Path, report: Callable[[str], None]) -> Path:
        """Fetch the folder written `<bucket>/<prefix>`, unless it is there already.

        Args:
            into: where the fetched folder is made, under a name that says what is in it: the same objects with the
                same content always give the same name. Made if missing; used by one process only.
            report: called with `fetching` before anything is.

        Returns:
            The fetched folder: every file has the size and SHA-256 that the store says.

        Cancellation: leaves nothing behind.

        Raises:
            ControlError: `bad_source`: nothing is there, it is damaged, or a name could lead out of the folder;
                `storage`: NATS or the disk failed, naming what. Nothing is left behind.
        """
        async with self.open_folder(objects) as opened:
            folder = into / (FOLDER_PREFIX + opened.digest)
            if not await asyncio.to_thread(_has_all, folder, opened.names):
                report("fetching")
                try:
                    await _fetch(opened, folder)
                except OSError as error:
                    raise ControlError(
                        ControlCode.STORAGE, f"objects:{objects} cannot be written below {into}: {reason(error)}"
                    ) from error
            return folder


async def _fetch(opened: FolderReader, folder: Path) -> None:
    """Fetch all files into a folder beside `folder`, which it becomes when it is complete."""
    started = time.monotonic()
    partial = folder.with_name(PARTIAL_PREFIX + uuid.uuid4().hex)
    try:
        await opened.run(_make_folder, partial, opened.size)
        for path in opened.names:
            await opened.fetch(path, partial / path, lambda _: None)
        await opened.run(_put_in_place, partial, folder)
    finally:
        await opened.run(_remove, partial)
    what = (folder, len(opened.names), opened.size, time.monotonic() - started)
    logger.info("objects.fetched folder=%s files=%s bytes=%s seconds=%.3f", *what)


def _has_all(folder: Path, files: Mapping[str, ObjectInfo]) -> bool:
    """Whether a folder that was fetched before still is whole."""
    try:
        return all((folder / path).stat().st_size == info.size for path, info in files.items())
    except OSError:
        return False


def _make_folder(partial: Path, total_bytes: int) -> None:
    partial.mkdir(parents=True)
    check_room(partial, total_bytes)


def _put_in_place(partial: Path, folder: Path) -> None:
    _remove(folder)  # what is left of an earlier one that lost files
    partial.rename(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
