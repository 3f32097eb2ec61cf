"""Stages one source of the object store: finds its folder in the folder store, or builds it there."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects.folder_reader import FolderReader
from ...bus.objects.layout import decode_digest
from ...bus.objects.reader import ObjectReader
from ...schemas.errors import FREE_SPACE, ControlCode, ControlError, is_disk_full
from ...schemas.manifest import Manifest
from ...schemas.weights import PublishedVersion
from .adapter import published_content
from .builder import Builder, fetch_files, verify_version
from .folder_store import FolderStore, Hold, PartialFolder
from .progress import Progress
from .published import describe, read_manifest
from .quiet_threads import Scratch, run_quietly
from .stamps import files_stamp
from .tensor_files import check_no_others, verify_file

__all__ = ["Checks", "Fetched", "Fetcher"]

logger = logging.getLogger(__name__)

_UPLOAD: Final = "upload"
"""The subfolder of a partial folder into which a plain upload is fetched."""
MAX_LOOKS: Final = 4
"""Attempts to use or build a folder. A folder is damaged at most once, unless its disk is damaged, and other processes
rarely delete it."""


class Checks(NamedTuple):
    """The checks of a source. Both functions block, and raise ControlError (`bad_source`) for an invalid source."""

    folder: Callable[[Path], None]
    """Called with the folder before the folder is used."""
    manifest: Callable[[Manifest], None]
    """Called with the manifest, if the source has one, before anything else is fetched."""


class Fetched(NamedTuple):
    """A staged source."""

    hold: Hold
    published: PublishedVersion | None
    """None for a plain upload, whose name may get other content later."""
    content: str | None
    """Digest of the weights, from the manifest; None for a plain upload."""


class Fetcher:
    """Fetches folders of the object store to this machine.

    Args:
        objects: reads the object store.
        store: stores the fetched folders.
    """

    def __init__(self, objects: ObjectReader, store: FolderStore) -> None:
        self._objects = objects
        self._store = store

    def __repr__(self) -> str:
        """One line with the store."""
        return f"<Fetcher {self._store}>"

    async def fetch(self, objects: str, checks: Checks, progress: Progress) -> Fetched:
        """Return the folder of a source, and hold it.

        Cancellation: the fetched bytes stay for the next try.

        Raises:
            ControlError: `bad_source`, `storage`.
        """
        hold: Hold | None = None
        published: PublishedVersion | None = None
        content: str | None = None
        try:
            async with self._objects.open_folder(objects) as folder:
                manifest = await read_manifest(folder, objects)
                if manifest is not None:
                    await asyncio.to_thread(checks.manifest, manifest)
                    content = await asyncio.to_thread(published_content, manifest)
                    published = describe(manifest, await folder.bucket_state())
                hold = await self._find_or_build(folder, manifest, checks, progress)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            where += f"; {FREE_SPACE}" if is_disk_full(error) else ""
            raise ControlError(
                ControlCode.STORAGE, f"objects:{objects} cannot be staged: {error.strerror or error}{where}"
            ) from error
        except asyncio.CancelledError:
            if hold is not None:  # cancelled while the object folder was being closed
                hold.release()
            raise
        return Fetched(hold, published, content)

    async def _find_or_build(
        self, folder: FolderReader, manifest: Manifest | None, checks: Checks, progress: Progress
    ) -> Hold:
        digest = folder.digest if manifest is None else manifest.digest
        for _ in range(MAX_LOOKS):
            opened = await self._store.open(digest, lambda: progress.begin("waiting"))
            if isinstance(opened, PartialFolder):
                async with _building(opened, progress):
                    path = await self._build(folder, manifest, opened, progress)
                    progress.begin("checking")
                    await asyncio.to_thread(checks.folder, path)
                    opened.complete(path, await asyncio.to_thread(files_stamp, path))
                # The hold is None if another process locked the folder first, or has deleted it.
                if (hold := self._store.hold(digest)) is not None:
                    return hold
            elif await self._is_sound(opened, folder, manifest, checks, progress):
                return opened
        raise ControlError(ControlCode.STORAGE, f"{self._store.folder(digest)} was found damaged or deleted repeatedly")

    async def _is_sound(
        self, hold: Hold, folder: FolderReader, manifest: Manifest | None, checks: Checks, progress: Progress
    ) -> bool:
        """Return True if a folder of the store is valid. A damaged folder is deleted."""
        with contextlib.ExitStack() as stack:
            stack.callback(hold.release)
            if not hold.is_of_this_boot or not await asyncio.to_thread(hold.is_unchanged):
                files = await asyncio.to_thread(files_stamp, hold.folder)
                try:
                    await self._verify(folder, manifest, hold.folder, progress)
                except (ControlError, OSError) as error:
                    logger.warning("folders.damage_detected folder=%s error=%s", hold.folder, error)
                    await asyncio.to_thread(hold.retire)
                    return False
                hold.confirm(files)
            progress.begin("checking")
            await asyncio.to_thread(checks.folder, hold.folder)
            stack.pop_all()
        return True

    async def _build(
        self, folder: FolderReader, manifest: Manifest | None, partial: PartialFolder, progress: Progress
    ) -> Path:
        if manifest is not None:
            return await Builder(self._objects, self._store).build(manifest, folder, partial, progress)
        files = {name: info.size for name, info in folder.names.items()}
        await run_quietly([lambda _: partial.make_room(sum(files.values()))])
        progress.begin("fetching", sum(files.values()))
        await fetch_files(folder, files, partial.path / _UPLOAD, progress)
        return partial.path / _UPLOAD

    async def _verify(self, folder: FolderReader, manifest: Manifest | None, path: Path, progress: Progress) -> None:
        """Compare a folder with the store: a crash of the machine may have lost some of it, or people changed it.

        Raises:
            ControlError: `bad_source`.
            OSError: a file was deleted during the check.
        """
        if manifest is not None:
            await verify_version(manifest, path, progress)
            names = {*manifest.files, *(entry.file for entry in manifest.tensors)}
        else:
            files = {path / name: decode_digest(info).hex() for name, info in folder.names.items()}
            await run_quietly(partial(_verify_file, file, sha256) for file, sha256 in files.items())
            names = {*folder.names}
        await asyncio.to_thread(check_no_others, path, names)


def _verify_file(file: Path, sha256: str, _scratch: Scratch) -> None:
    verify_file(file, sha256)


@contextlib.asynccontextmanager
async def _building(partial: PartialFolder, progress: Progress) -> AsyncIterator[None]:
    """Release the lock if the build fails; delete the partial folder if its content is invalid or the disk is full."""
    is_complete = is_useless = False
    progress.on_move = partial.touch
    try:
        yield
        is_complete = True
    except (ControlError, OSError) as error:
        is_bad = isinstance(error, ControlError) and error.code is ControlCode.BAD_SOURCE
        # A partial folder that stayed would keep the disk full.
        is_useless = is_bad or is_disk_full(error)
        raise
    finally:
        progress.on_move = None
        if is_useless:
            await asyncio.to_thread(partial.leave, discard=True)
        elif not is_complete:
            partial.leave(discard=False)
