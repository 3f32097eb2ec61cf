"""Fetching a folder out of the object store: checked, complete or not there at all."""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Final

from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError, LocalProtocolError
from ..nats.connection import Connection, connected
from ..nats.server import Server
from .catalog import list_prefix
from .layout import ObjectInfo, check_path, decode_digest, split_objects
from .object_chunks import read_object_chunks
from .signed import check_folder, folder_digest

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
    """

    def __init__(self, server: str | Server, *, name: str) -> None:
        self._server = server
        self._name = name

    def __repr__(self) -> str:
        """One line."""
        return f"<ObjectReader {self._name}>"

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
        _, prefix = split_objects(objects)
        try:
            async with connected(self._server, name=f"{self._name}-objects") as nats:
                infos = await list_prefix(nats, objects, is_signed=True)
                if nats.signatures.are_demanded:
                    check_folder(objects, infos)
                files = {info.name.removeprefix(f"{prefix}/"): info for info in infos}
                for path in files:
                    check_path(path, f"a file of objects:{objects}")
                folder = into / (FOLDER_PREFIX + folder_digest(objects, infos))
                if not await asyncio.to_thread(_has_all, folder, files):
                    report("fetching")
                    await self._fetch(nats, files, folder)
                return folder
        except (BusBroken, BusClosed) as error:
            raise ControlError(ControlCode.STORAGE, f"objects:{objects} cannot be fetched: {error}") from error
        except OSError as error:
            raise ControlError(
                ControlCode.STORAGE, f"objects:{objects} cannot be written below {into}: {_reason(error)}"
            ) from error

    async def _fetch(self, nats: Connection, files: dict[str, ObjectInfo], folder: Path) -> None:
        """Fetch all files into a folder beside `folder`, which it becomes when it is complete."""
        started = time.monotonic()
        total = sum(info.size for info in files.values())
        partial = folder.with_name(PARTIAL_PREFIX + uuid.uuid4().hex)
        # One thread writes and removes, in that order, also when the waiting for it was cancelled.
        disk = ThreadPoolExecutor(1, thread_name_prefix="objects")
        run = asyncio.get_running_loop().run_in_executor
        try:
            await run(disk, _make_folder, partial, total)
            for path, info in files.items():
                await self._fetch_file(nats, info, partial / path, disk)
            await run(disk, _put_in_place, partial, folder)
        finally:
            await run(disk, _remove, partial)
            disk.shutdown(wait=False)
        seconds = time.monotonic() - started
        logger.info("objects.fetched folder=%s files=%s bytes=%s seconds=%.3f", folder, len(files), total, seconds)

    async def _fetch_file(self, nats: Connection, info: ObjectInfo, path: Path, disk: ThreadPoolExecutor) -> None:
        """Fetch one file; while the disk's thread writes and hashes what came, more comes."""
        expected = decode_digest(info)
        run = asyncio.get_running_loop().run_in_executor
        file = _NewFile(path)
        try:
            await run(disk, file.open)
            async with contextlib.aclosing(read_object_chunks(nats, info)) as batches:
                async for parts in batches:
                    await run(disk, file.write, parts)
        finally:
            await run(disk, file.close)
        if file.digest.digest() != expected:
            raise ControlError(
                ControlCode.BAD_SOURCE,
                f"objects:{info.bucket}/{info.name} is damaged: its SHA-256 is {file.digest.hexdigest()}, the store's "
                f"description says {expected.hex()}",
            )


class _NewFile:
    """A file that is written and hashed; its methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.digest = hashlib.sha256()

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("xb", buffering=0)

    def write(self, parts: list[bytes]) -> None:
        for part in parts:
            self.digest.update(part)
            self._write_all(memoryview(part))

    def _write_all(self, rest: memoryview) -> None:
        if self._file is None:
            raise LocalProtocolError(f"{self._path} is written before it is open")
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _has_all(folder: Path, files: dict[str, ObjectInfo]) -> bool:
    """Whether a folder that was fetched before still is whole."""
    try:
        return all((folder / path).stat().st_size == info.size for path, info in files.items())
    except OSError:
        return False


def _make_folder(partial: Path, total_bytes: int) -> None:
    """Make the folder, if there is room: better to say so now than after the disk is full for everyone on it."""
    partial.mkdir(parents=True)
    free = shutil.disk_usage(partial).free
    if free < total_bytes:
        raise ControlError(
            ControlCode.STORAGE, f"{partial.parent} has room for {free} bytes, and {total_bytes} are to be fetched"
        )


def _put_in_place(partial: Path, folder: Path) -> None:
    _remove(folder)  # what is left of an earlier one that lost files
    partial.rename(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _reason(error: OSError) -> str:
    return f"{error.strerror or error} ({error.filename})" if error.filename else f"{error.strerror or error}"
