"""A worker's sources of weights and adapters: every one is checked before anything of the engine is touched.

Invariant: a path that was returned was a complete checkpoint, or adapter, for the worker's own model, below an allowed
root or in the folder store; after an error nothing has changed but perhaps that store.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...bus.objects import ObjectReader
from ...schemas.control import WeightSource
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_LORAS
from ...schemas.manifest import Manifest
from ...schemas.weights import PublishedVersion, Staging
from .adapter import adapter_files, check_adapter
from .checkpoint import check_model, has_checkpoint, read_checkpoint, read_config
from .fetcher import Checks, Fetcher
from .folder_store import FolderStore, Hold
from .headers import Tensor
from .places import clear_old_cache, store_root
from .progress import Progress, Report
from .published import check_manifest
from .read_ahead import FileNotes, WatchedFolders, checkpoint_files, note_files, read_ahead
from .roots import allowed_folder, bad_source
from .staged import StagedFolders

__all__ = ["Report", "Staged", "WeightSources"]

VerifyUnchanged = Callable[[], Awaitable[None]]

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS: Final = 2
"""Generations on a machine: the one in use, and the one before or after it."""
MAX_WATCHED: Final = 64
"""Folders with checkpoints that paths named: more than a fleet goes back to."""


class Staged(NamedTuple):
    """What a staging took."""

    fetched_bytes: int
    """What came over the network."""
    seconds: float


class _Own(NamedTuple):
    """What the worker's own checkpoint is like."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


class WeightSources:
    """Checks sources, and stages those that lie in the object store. Files are read on other threads.

    Args:
        roots: below which paths are allowed; none: no path is, while the object store still works.
        own: the checkpoint that the worker was started with: others must be like it. None, or a folder without
            safetensors: not known, and sources are only checked in themselves.
        cache: where the workers of this fleet keep what they fetch; made when needed.
        model: whose weights and adapters these are, as its publishers call it.
        worker: name of this one, for a folder of its own where the file system has no locks.
        objects: reads the object store; None: sources there are refused.
        stage_bytes: limit of all that is fetched below `cache`; None: the disk's.
    """

    def __init__(  # noqa: PLR0913 - all is known where it is made, once
        self,
        *,
        roots: Sequence[Path],
        own: Path | None,
        cache: Path,
        model: str,
        worker: str,
        objects: ObjectReader | None,
        stage_bytes: int | None = None,
    ) -> None:
        self._roots = tuple(roots)
        self._own_path = own
        self._model = model
        self._old_cache = cache / worker
        self._objects = objects
        self._own: _Own | None = None
        root = store_root(cache, worker)
        checkpoints = FolderStore(root / "checkpoints", model=model, max_bytes=stage_bytes, kept=KEPT_CHECKPOINTS)
        self._checkpoints = StagedFolders(checkpoints, max_held=1)
        adapters = FolderStore(root / "adapters", model=model, max_bytes=stage_bytes, kept=MAX_LORAS)
        self._adapters = StagedFolders(adapters, max_held=MAX_LORAS)
        self._watched = WatchedFolders(MAX_WATCHED)
        self._watched_adapters = WatchedFolders(MAX_LORAS)
        self._present: Hold | None = None
        # What is fetched comes one at a time, and so does what is read: together it would be no faster.
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._progress: Progress | None = None
        self.last_staged: Staged | None = None
        """Of the last staging that came to its end; None: there was none."""
        self.published: PublishedVersion | None = None
        """Of the checkpoint that came last from the object store, or was found to be on the machine; None: it was no
        published version, or there was none."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Sources roots={len(self._roots)} checkpoints={self._checkpoints} present={self._present}>"

    @property
    def staging(self) -> Staging | None:
        """How far the present staging is; None: nothing is being staged."""
        return None if self._progress is None else self._progress.staging

    async def checkpoint(self, source: WeightSource, report: Report) -> Path:
        """Return the real path of a complete checkpoint with the tensors, shapes and dtypes of the worker's own.

        One that is at hand is only checked. Several calls for one source share its staging. What was returned last
        stays until another is asked for.

        Args:
            report: called with `waiting`, `fetching`, `building`, `reading` and `checking` as that begins.

        Cancellation: what was fetched stays for the next try; headers are read to the end, on their thread.

        Raises:
            ControlError: `path_refused`, `bad_source`, `storage`; says what was expected and what was found.
        """
        checks = Checks(self._check_checkpoint, self._check_manifest)
        return await self._get(source, report, self._checkpoints, checks)

    async def adapter(
        self, source: WeightSource, report: Report, *, max_rank: int | None = None, is_reload: bool = False
    ) -> Path:
        """Return the real path of a LoRA adapter whose modules and shapes fit the worker's own checkpoint.

        The rest is as in `checkpoint`; of fetched adapters as many stay as a desired state may have.

        Args:
            report: as in `checkpoint`.
            max_rank: the largest that the engine takes; None: it says nothing of ranks.
            is_reload: the engine had it, and requests wait: an upload that is at hand is not compared with the store.
        """
        checks = Checks(lambda folder: self._check_adapter(folder, max_rank), self._check_adapter_manifest)
        return await self._get(source, report, self._adapters, checks, is_any_age=is_reload)

    @contextlib.asynccontextmanager
    async def using(self, folder: Path) -> AsyncIterator[VerifyUnchanged]:
        """Let `folder` stay while an engine reads it, and from then on as the present weights if that goes well.

        Yields a function that compares the files with what they were when the folder was checked. Call it after the
        load; it raises ControlError (`half_written`) if they differ, so that nobody knows what the engine has read.

        Raises:
            ControlError: `storage`: it was deleted or changed since it was checked.
        """
        with contextlib.ExitStack() as stack:
            hold = _hold(folder, self._checkpoints.store, stack)
            yield await _unchanged(folder, hold, self._watched, ControlCode.HALF_WRITTEN)
            stack.pop_all()
        self._checkpoints.expire_upload(folder)
        if self._present is not None:
            self._present.release()
        self._present = hold

    @contextlib.asynccontextmanager
    async def using_adapter(self, folder: Path) -> AsyncIterator[VerifyUnchanged]:
        """Let the folder of an adapter stay while an engine reads it; the rest is as in `using`, always `storage`."""
        with contextlib.ExitStack() as stack:
            hold = _hold(folder, self._adapters.store, stack)
            yield await _unchanged(folder, hold, self._watched_adapters, ControlCode.STORAGE)

    async def clean_up(self) -> None:
        """Delete what nobody needs: older generations, what killed builders left, and the cache of older releases."""
        for clean in (self._checkpoints.store.clean_up, self._adapters.store.clean_up):
            await _try_to_clean(clean)
        await _try_to_clean(lambda: clear_old_cache(self._old_cache))

    def close(self) -> None:
        """Hold nothing any more; what was fetched stays for the machine's workers."""
        self._checkpoints.release()
        self._adapters.release()
        if self._present is not None:
            self._present.release()
            self._present = None

    async def _get(
        self,
        source: WeightSource,
        report: Report,
        staged: StagedFolders,
        checks: Checks,
        *,
        is_any_age: bool = False,
    ) -> Path:
        if source.path is not None:
            report("checking")
            folder, notes = await asyncio.to_thread(_allowed, source.path, self._roots, checks)
            if staged is self._checkpoints:
                await self._read_ahead(source.path, folder, Progress(source, report))
            else:
                self._watched_adapters.add(source.path, folder, notes)
            return folder
        if self._objects is None or source.objects is None:
            raise ControlError(ControlCode.BAD_SOURCE, f"{source} is refused: this worker reads no object store")
        find = functools.partial(self._find, source.objects, report, staged, checks, is_any_age=is_any_age)
        if (found := await find()) is not None:
            return found
        async with self._lock:
            # Another call may have staged it meanwhile.
            if (found := await find()) is not None:
                return found
            with self._counting(Progress(source, report)) as progress:
                fetched = await Fetcher(self._objects, staged.store).fetch(source.objects, checks, progress)
            folder = staged.add(source.objects, fetched.hold, is_published=fetched.published is not None)
            if staged is self._checkpoints:
                self.published = fetched.published
            await _try_to_clean(staged.store.clean_up)
        return folder

    async def _find(
        self, objects: str, report: Report, staged: StagedFolders, checks: Checks, *, is_any_age: bool
    ) -> Path | None:
        """Return the folder of a source that is at hand, and whose files nobody has changed."""
        hold = staged.find(objects, is_any_age=is_any_age)
        if hold is None or not await asyncio.to_thread(hold.is_unchanged):
            return None
        if staged is self._adapters:
            staged.expire_upload(hold.folder)
        report("checking")
        await asyncio.to_thread(checks.folder, hold.folder)
        return hold.folder

    async def _read_ahead(self, path: str, folder: Path, progress: Progress) -> None:
        """Read a checkpoint that `path` names once, unless that was done before and nothing has changed since."""
        async with self._reading:
            try:
                notes = await asyncio.to_thread(lambda: note_files(checkpoint_files(folder, read_checkpoint(folder))))
                if not self._watched.is_noted(folder, notes):
                    with self._counting(progress):
                        await read_ahead(notes, progress)
            except OSError as error:
                raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
            self._watched.add(path, folder, notes)

    @contextlib.contextmanager
    def _counting(self, progress: Progress) -> Iterator[Progress]:
        """Tell of this staging while the block runs, and what it took."""
        started = time.monotonic()
        self._progress = progress
        try:
            yield progress
        finally:
            if self._progress is progress:
                self._progress = None
        self.last_staged = Staged(progress.fetched_bytes, time.monotonic() - started)
        source = progress.staging.source
        logger.info("sources.staged source=%s fetched_bytes=%s seconds=%.3f", source, *self.last_staged)

    def _check_checkpoint(self, folder: Path) -> None:
        tensors = read_checkpoint(folder)
        own = self._read_own()
        if own is not None:
            check_model(folder, tensors, own.tensors, own.config)

    def _check_manifest(self, manifest: Manifest) -> None:
        if manifest.adapter is not None:
            raise bad_source(f"objects:{manifest.own.objects} is the adapter {manifest.adapter!r}, and no checkpoint")
        own = self._read_own()
        check_manifest(manifest, self._model, None if own is None else own.tensors)

    def _check_adapter(self, folder: Path, max_rank: int | None) -> None:
        own = self._read_own()
        check_adapter(folder, None if own is None else own.tensors, max_rank)

    def _check_adapter_manifest(self, manifest: Manifest) -> None:
        if manifest.adapter is None:
            raise bad_source(f"objects:{manifest.own.objects} is a checkpoint, and no adapter")
        check_manifest(manifest, self._model, None)

    def _read_own(self) -> _Own | None:
        """Read the worker's own checkpoint, once: what the engine has does not change with the files."""
        if self._own is None and self._own_path is not None and has_checkpoint(self._own_path):
            self._own = _Own(read_checkpoint(self._own_path), read_config(self._own_path))
        return self._own


async def _try_to_clean(clean: Callable[[], None]) -> None:
    """Delete what nobody needs; a failure fails nothing else: what is staged next says what is wrong with the disk."""
    try:
        await asyncio.to_thread(clean)
    except OSError as error:
        logger.warning("sources.cleanup_failed error=%s", error)


def _allowed(path: str, roots: Sequence[Path], checks: Checks) -> tuple[Path, FileNotes]:
    """Check where a folder lies, and what is in it; return also what an adapter's files were before that."""
    folder = allowed_folder(path, roots)
    try:
        notes = note_files(adapter_files(folder))
    except OSError as error:
        raise bad_source(f"{path} cannot be read: {error.strerror or error}") from error
    checks.folder(folder)
    return folder, notes


def _hold(folder: Path, store: FolderStore, stack: contextlib.ExitStack) -> Hold | None:
    """Hold a folder of the store until the stack ends; None: it is no folder of the store.

    Raises:
        ControlError: `storage`: it was deleted.
    """
    if folder.parent != store.root:
        return None
    hold = store.hold(folder.name)
    if hold is None:
        raise ControlError(ControlCode.STORAGE, f"{folder} was deleted meanwhile: stage its source again")
    stack.callback(hold.release)
    return hold


async def _unchanged(folder: Path, hold: Hold | None, watched: WatchedFolders, code: ControlCode) -> VerifyUnchanged:
    """Check that the files are what they were when the folder was checked; return what checks it after a load.

    Args:
        folder: which one.
        hold: of the folder; None: a path named it.
        watched: has what its files were, then.
        code: of a change that is found after the load.

    Raises:
        ControlError: `storage`: they are not.
    """

    def is_changed() -> bool:
        return watched.is_changed(folder) if hold is None else not hold.is_unchanged()

    async def verify_unchanged() -> None:
        if await asyncio.to_thread(is_changed):
            raise ControlError(code, f"files of {folder} were changed while they were loaded")

    if await asyncio.to_thread(is_changed):
        raise ControlError(ControlCode.STORAGE, f"files of {folder} were changed: stage its source again")
    return verify_unchanged
