"""A worker's sources of weights and adapters: each source is validated before the engine changes.

Invariant: a returned path was a complete checkpoint or adapter for the worker's own model, below an allowed root or in
the folder store. An error changes nothing except perhaps the folder store.
"""

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...bus.logs import warning_of
from ...bus.objects.reader import ObjectReader
from ...schemas.errors import ControlCode, ControlError, bad_source, storage_failure
from ...schemas.limits import MAX_LORAS, Recent
from ...schemas.manifest import Manifest
from ...schemas.weights import PublishedVersion, Staging, WeightSource
from .checkpoint import (
    Watched,
    check_adapter,
    check_model,
    find_changed_file,
    folder_content,
    has_checkpoint,
    holds_adapter,
    read_ahead,
    read_checkpoint,
    read_config,
    start_content,
)
from .content import ContentHasher, FolderContent, Tensor, reading, resolve_allowed
from .fetcher import Checks, Fetcher, check_manifest
from .store import FolderStore, Hold, store_root
from .threads import Progress, Report

VerifyUnchanged = Callable[[], Awaitable[None]]

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS: Final = 2
"""Fetched checkpoints on a machine: the current one, and the previous or the next one."""
MAX_WATCHED: Final = 64
"""Remembered checkpoint folders that paths named: more than a fleet returns to."""
MAX_KNOWN: Final = 1024
"""Maximum number of remembered sources: more than the number of adapters that are loaded at a time."""
UPLOAD_GOOD_S: Final = 60.0
"""Seconds after which an upload is compared with the object store again, because its name may have new content. A
published version never changes."""


class _Own(NamedTuple):
    """The worker's own checkpoint."""

    tensors: Mapping[str, Tensor] | None = None
    """None: they are unknown."""
    config: Mapping[str, Any] = {}
    """The content of config.json."""


class _KnownFolder(NamedTuple):
    digest: str
    content: str
    """Digest of the weights in the folder, which does not depend on its files."""
    expires_at: float
    """Time on the monotonic clock after which the source is compared with the object store again."""


class StagedFolders:
    """Staged folders of one kind (checkpoints or adapters), by the name of the source in commands.

    A worker that finds its source here need not contact the object store again.

    Args:
        store: contains the folders.
        hasher: computes digests.
        max_watched: the maximum number of remembered folders that paths named.
        max_held: number of the last staged or found folders that are held, so that no process deletes them before the
            engine reads them.
        is_adapter: True for adapters.
    """

    def __init__(
        self, store: FolderStore, hasher: ContentHasher, max_watched: int, max_held: int, *, is_adapter: bool
    ) -> None:
        self.store = store
        self.is_adapter = is_adapter
        self._hasher = hasher
        self._max_held = max_held
        # Folders that paths named, as they were hashed. The folder that was read last is the last one.
        self._watched = Recent[Path, Watched](max_watched)
        self._known = Recent[str, _KnownFolder](MAX_KNOWN)
        self._holds: dict[str, Hold] = {}

    def add(self, objects: str, hold: Hold, content: str, *, is_published: bool) -> Path:
        """Record the folder of a source and the digest of its weights, hold the folder and return its path."""
        expires_at = math.inf if is_published else time.monotonic() + UPLOAD_GOOD_S
        self._known[objects] = _KnownFolder(hold.digest, content, expires_at)
        self._hold(hold)
        return hold.folder

    def find(self, objects: str, *, is_any_age: bool = False) -> Hold | None:
        """Return the folder of a source, and hold it. Return None if no valid folder is on this machine.

        Args:
            is_any_age: also return an upload that has expired.
        """
        known = self._known.get(objects)
        if known is None or not (is_any_age or time.monotonic() < known.expires_at):
            return None
        if (hold := self.store.hold(known.digest)) is not None:
            self._hold(hold)
        return hold

    def digest_of(self, folder: Path) -> str | None:
        """Return the digest of the weights in a folder that was added or watched, or None."""
        if (watched := self._watched.get(folder)) is not None:
            return watched.digest
        known = (known.content for known in self._known.values() if known.digest == folder.name)
        return next(known, None) if folder.parent == self.store.root else None

    def find_digest(self, content: FolderContent) -> str | None:
        """Return the digest of a folder that a path named, or None if it is not known or the folder has changed."""
        watched = self._watched.get(content.folder)
        if watched is None or watched.notes != content.notes:
            return None
        self._watched.move_to_end(content.folder)
        return watched.digest

    async def watch(self, path: str, content: FolderContent, progress: Progress, *, is_urgent: bool = False) -> str:
        """Hash a folder, read it into the page cache, and return its digest.

        Args:
            path: the path that leads to the folder.
            is_urgent: True if a worker waits for the digest before it serves.

        Raises:
            ControlError: `bad_source`: a file cannot be read; `storage`: a file changed meanwhile.
        """
        with reading(path):
            digest, read = await self._hasher.digest(content, progress, is_urgent=is_urgent)
            unread = {tensor.file for tensor in content.tensors.values()} - read
            await read_ahead({file: content.notes[file] for file in unread}, progress)
        self._watched[content.folder] = Watched(content.notes, digest)
        return digest

    def expire_upload(self, folder: Path) -> None:
        """Expire an upload that is being used, so that it is compared with the object store before its next use."""
        for name, known in list(self._known.items()):
            if known.digest == folder.name and known.expires_at != math.inf:
                self._known[name] = known._replace(expires_at=-math.inf)

    async def use(
        self, folder: Path, digest: str | None, code: ControlCode, stack: contextlib.ExitStack
    ) -> tuple[Hold | None, VerifyUnchanged]:
        """Hold a folder of the store until the stack ends. Return the hold and the check for after the load.

        Args:
            folder: the folder that the engine loads. It has no hold if a path named it.
            digest: the digest that the folder must have, or None.
            code: the error code of a change that is found after the load.

        Raises:
            ControlError: `storage`: the folder was deleted, or files have changed since it was validated.
        """
        hold, watched = None, self._watched.get(folder)
        if folder.parent == self.store.root:
            if (hold := self.store.hold(folder.name)) is None:
                raise storage_failure(f"{folder} was deleted meanwhile: stage its source again")
            stack.enter_context(hold)

        def find_changed(*, is_strict: bool) -> Path | None:
            if hold is not None:
                return None if hold.is_unchanged() else folder
            return None if watched is None else find_changed_file(watched.notes, is_strict=is_strict)

        async def verify_unchanged() -> None:
            if (file := await asyncio.to_thread(find_changed, is_strict=False)) is not None:
                raise ControlError(code, f"{file} changed during the load")

        has_other = watched is not None and digest not in {None, watched.digest}
        if has_other or await asyncio.to_thread(find_changed, is_strict=True) is not None:
            raise storage_failure(f"files of {folder} were changed: stage its source again")
        return hold, verify_unchanged

    def release(self) -> None:
        """Release all holds."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()

    def _hold(self, hold: Hold) -> None:
        if (before := self._holds.pop(hold.digest, None)) is not None:
            before.release()
        self._holds[hold.digest] = hold
        while len(self._holds) > self._max_held:
            self._holds.pop(next(iter(self._holds))).release()


class WeightSources:
    """Validates sources, and stages sources of the object store. Files are read on other threads.

    Args:
        roots: folders below which paths are allowed. If there are none, no path is allowed; sources in the object store
            still are.
        own: the checkpoint that the worker was started with, which sources must match. If it is None or a folder
            without safetensors, it is unknown, and the worker only checks that a source is consistent in itself.
        cache: folder for the fetched files of all workers of this fleet; created when needed.
        model: name of the model of these weights and adapters, as in published versions.
        worker: name of this worker, for a separate folder on a file system without locks.
        objects: reads the object store; None to refuse sources there.
        stage_bytes: limit for all fetched files below `cache`; None if only the disk is the limit.
    """

    def __init__(  # noqa: PLR0913 - there is one call site, which knows all values
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
        self._objects = objects
        self._own = _Own()
        root = store_root(cache, worker)
        self._hasher = ContentHasher(root / "digests")
        checkpoints = FolderStore(root / "checkpoints", model=model, max_bytes=stage_bytes, kept=KEPT_CHECKPOINTS)
        self._checkpoints = StagedFolders(checkpoints, self._hasher, MAX_WATCHED, 1, is_adapter=False)
        adapters = FolderStore(root / "adapters", model=model, max_bytes=stage_bytes, kept=MAX_LORAS)
        self._adapters = StagedFolders(adapters, self._hasher, MAX_LORAS, MAX_LORAS, is_adapter=True)
        self._present: Hold | None = None
        # Only one source is fetched at a time, and only one is read: parallel transfers would not be faster.
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._progress: Progress | None = None
        self.last_staged: Progress | None = None
        """The last finished staging, with its fetched bytes; None if no staging has finished."""
        self.published: PublishedVersion | None = None
        """The published version of the last staged checkpoint; None if it was a plain upload, or if none was staged."""

    @property
    def staging(self) -> Staging | None:
        """The progress of the current staging; None if nothing is being staged."""
        return None if self._progress is None else self._progress.staging

    async def checkpoint(self, source: WeightSource, report: Report) -> Path:
        """Return the real path of a complete checkpoint with the tensors, shapes and dtypes of the worker's own.

        A checkpoint that is already on this machine is only validated. Concurrent calls for one source share its
        staging. The returned folder is kept until another checkpoint is requested.

        Args:
            report: called when a stage begins: `waiting`, `fetching`, `building`, `reading` or `checking`.

        Cancellation: the fetched bytes stay for the next try. A thread that reads headers finishes its work.

        Raises:
            ControlError: `path_refused`, `bad_source`, `storage`. The message has the expected and the actual value.
        """
        return await self._get(source, report, self._checkpoints)

    async def adapter(
        self, source: WeightSource, report: Report, *, max_rank: int | None = None, is_reload: bool = False
    ) -> Path:
        """Return the real path of a LoRA adapter whose modules and shapes fit the worker's own checkpoint.

        Cancellation and errors are the same as in `checkpoint`. The last `MAX_LORAS` fetched adapters are kept, the
        maximum number of adapters in a desired state.

        Args:
            report: as in `checkpoint`.
            max_rank: the largest rank that the engine accepts, or None if the engine states no limit.
            is_reload: True if the engine had the adapter before. A local upload is then not compared with the object
                store, because requests wait.
        """
        return await self._get(source, report, self._adapters, max_rank=max_rank, is_any_age=is_reload)

    def digest_of(self, folder: Path) -> str | None:
        """Return the digest of a folder that `checkpoint`, `adapter` or `start_digest` has staged, or None."""
        return self._checkpoints.digest_of(folder) or self._adapters.digest_of(folder)

    @property
    def has_own(self) -> bool:
        """True if the worker was started with a checkpoint."""
        return self._own_path is not None and self._own_path.exists()

    async def start_digest(self) -> str | None:
        """Return the digest of the checkpoint that the worker was started with, or None if there is none to read.

        Raises:
            ControlError: `storage`: a file changed meanwhile; `bad_source`: a file cannot be read.
        """
        own = self._own_path
        if own is None or not self.has_own:
            return None
        with reading(own):
            content = await asyncio.to_thread(start_content, own)
        if not content.tensors:
            return None
        if (digest := self._checkpoints.find_digest(content)) is not None:
            return digest
        progress = Progress(WeightSource(path=str(own)), lambda _stage: None)
        return await self._checkpoints.watch(str(own), content, progress, is_urgent=True)

    @contextlib.asynccontextmanager
    async def using(self, folder: Path, digest: str | None = None) -> AsyncIterator[VerifyUnchanged]:
        """Keep `folder` while an engine reads it. If the block succeeds, keep it afterwards as the current weights.

        Yields a function that compares the files with their state when the folder was validated. Call the function
        after the load. It raises ControlError (`half_written`) if files differ: what the engine has read is then
        unknown.

        Args:
            digest: the digest that the folder must have; None accepts every content.

        Raises:
            ControlError: `storage`: the folder was deleted or changed after its validation.
        """
        with contextlib.ExitStack() as stack:
            hold, verify_unchanged = await self._checkpoints.use(folder, digest, ControlCode.HALF_WRITTEN, stack)
            yield verify_unchanged
            stack.pop_all()
        self._checkpoints.expire_upload(folder)
        if self._present is not None:
            self._present.release()
        self._present = hold

    @contextlib.asynccontextmanager
    async def using_adapter(self, folder: Path, digest: str | None = None) -> AsyncIterator[VerifyUnchanged]:
        """Keep the folder of an adapter while an engine reads it.

        Yields and raises the same as `using`, but every error has the code `storage`.
        """
        with contextlib.ExitStack() as stack:
            yield (await self._adapters.use(folder, digest, ControlCode.STORAGE, stack))[1]

    async def clean_up(self) -> None:
        """Delete unneeded files: older folders, and the remains of killed builders."""
        await _try_to_clean(self._checkpoints.store)
        await _try_to_clean(self._adapters.store)

    def close(self) -> None:
        """Release all holds. The fetched folders stay for the workers of this machine."""
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
        *,
        max_rank: int | None = None,
        is_any_age: bool = False,
    ) -> Path:
        checks = Checks(
            lambda folder: self._check_folder(folder, max_rank, is_adapter=staged.is_adapter),
            lambda manifest: self._check_manifest(manifest, is_adapter=staged.is_adapter),
        )
        if source.path is not None:
            report("checking")
            content = await asyncio.to_thread(
                _read_allowed, source.path, self._roots, checks, is_adapter=staged.is_adapter
            )
            async with self._reading:
                if staged.find_digest(content) is None:
                    with self._counting(Progress(source, report)) as progress:
                        await staged.watch(source.path, content, progress)
            return content.folder
        if self._objects is None or source.objects is None:
            raise bad_source(f"{source} is refused: this worker reads no object store")
        find = functools.partial(self._find, source.objects, report, staged, checks, is_any_age=is_any_age)
        if (found := await find()) is not None:
            return found
        async with self._lock:
            # Another call may have staged the source while this call waited for the lock.
            if (found := await find()) is not None:
                return found
            with self._counting(Progress(source, report)) as progress:
                fetched = await Fetcher(self._objects, staged.store, checks, progress).fetch(source.objects)
                digest = fetched.content or await self._digest_of_upload(fetched.hold, progress, staged)
            folder = staged.add(source.objects, fetched.hold, digest, is_published=fetched.published is not None)
            if not staged.is_adapter:
                self.published = fetched.published
            await _try_to_clean(staged.store)
        return folder

    async def _find(
        self, objects: str, report: Report, staged: StagedFolders, checks: Checks, *, is_any_age: bool
    ) -> Path | None:
        """Return the local folder of a source. Return None if there is none, or if its files have changed."""
        hold = staged.find(objects, is_any_age=is_any_age)
        if hold is None or not await asyncio.to_thread(hold.is_unchanged):
            return None
        if staged.is_adapter:
            staged.expire_upload(hold.folder)
        report("checking")
        await asyncio.to_thread(checks.folder, hold.folder)
        return hold.folder

    async def _digest_of_upload(self, hold: Hold, progress: Progress, staged: StagedFolders) -> str:
        """Return the digest of a fetched folder without a manifest."""
        try:
            content = await asyncio.to_thread(folder_content, hold.folder, None, is_adapter=staged.is_adapter)
            digest, _ = await self._hasher.digest(content, progress)
        except BaseException:
            hold.release()
            raise
        return digest

    @contextlib.contextmanager
    def _counting(self, progress: Progress) -> Iterator[Progress]:
        """Publish this staging as `staging` while the block runs, and as `last_staged` afterwards."""
        started = time.monotonic()
        self._progress = progress
        try:
            yield progress
        finally:
            if self._progress is progress:
                self._progress = None
        self.last_staged = progress
        seconds = time.monotonic() - started
        source, num_bytes = progress.staging.source, progress.fetched_bytes
        logger.info("sources.staged source=%s fetched_bytes=%s seconds=%.3f", source, num_bytes, seconds)

    def _check_folder(self, folder: Path, max_rank: int | None, *, is_adapter: bool) -> None:
        if is_adapter:
            check_adapter(folder, self._read_own().tensors, max_rank)
            return
        if holds_adapter(folder):
            problem = f"{folder} is a LoRA adapter, and no checkpoint: load it with load_lora under a name of its own"
            raise ControlError(ControlCode.IS_ADAPTER, problem)
        tensors, own = read_checkpoint(folder), self._read_own()
        if own.tensors is not None:
            check_model(folder, tensors, own.tensors, own.config)

    def _check_manifest(self, manifest: Manifest, *, is_adapter: bool) -> None:
        if is_adapter != (manifest.adapter is not None):
            kind = (
                "a checkpoint, and no adapter" if is_adapter else f"the adapter {manifest.adapter!r}, and no checkpoint"
            )
            raise bad_source(f"objects:{manifest.own.objects} is {kind}")
        check_manifest(manifest, self._model, None if is_adapter else self._read_own().tensors)

    def _read_own(self) -> _Own:
        """Read the worker's own checkpoint only once, because the engine's model does not change with the files."""
        if self._own.tensors is None and self._own_path is not None and has_checkpoint(self._own_path):
            self._own = _Own(read_checkpoint(self._own_path), read_config(self._own_path))
        return self._own


async def _try_to_clean(store: FolderStore) -> None:
    """Delete unneeded files, and only log a failure: if the disk has a fault, the next staging reports it."""
    with warning_of(OSError, logger, "sources.cleanup_failed error=%s"):
        await asyncio.to_thread(store.clean_up)


def _read_allowed(path: str, roots: Sequence[Path], checks: Checks, *, is_adapter: bool) -> FolderContent:
    """Validate the location and the content of a folder. Blocks."""
    folder = resolve_allowed(path, roots)
    with reading(path):
        return folder_content(folder, checks.folder, is_adapter=is_adapter)
