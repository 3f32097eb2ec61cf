"""A worker's sources of weights and adapters: every one is checked before anything of the engine is touched.

Invariant: a path that was returned was a complete checkpoint, or adapter, for the worker's own model, below an allowed
root; after an error nothing has changed but perhaps the cache.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...bus.objects import ObjectReader
from ...bus.objects.reader import FOLDER_PREFIX, PARTIAL_PREFIX
from ...schemas.control import WeightSource
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_LORAS
from .adapter import check_adapter
from .checkpoint import check_model, has_checkpoint, read_checkpoint, read_config
from .headers import Tensor
from .roots import allowed_folder

__all__ = ["Report", "Sources"]

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Called with the stage that a command has reached, for people."""
KEPT_CHECKPOINTS: Final = 2
"""Fetched ones that stay: the one in use, and the one before, to go back to."""


class _Own(NamedTuple):
    """What the worker's own checkpoint is like."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


class Sources:
    """Checks sources, and fetches those that lie in the object store. Files are read on other threads.

    Args:
        roots: below which paths are allowed; none: no path is, while the object store still works.
        own: the checkpoint that the worker was started with: others must be like it. None, or a folder without
            safetensors: not known, and sources are only checked in themselves.
        cache: for what is fetched; this worker's alone, made when needed.
        objects: reads the object store; None: sources there are refused.
    """

    def __init__(self, *, roots: Sequence[Path], own: Path | None, cache: Path, objects: ObjectReader | None) -> None:
        self._roots = tuple(roots)
        self._own_path = own
        self._cache = cache
        self._objects = objects
        self._own: _Own | None = None
        # What is fetched comes one at a time, as it shares the cache.
        self._lock = asyncio.Lock()
        self._checkpoints: list[Path] = []
        """Fetched, the last used one last."""
        self._adapters: list[Path] = []
        """Likewise."""
        self._in_use: set[Path] = set()
        """Stays in any case."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Sources roots={len(self._roots)} fetched={len(self._checkpoints)}+{len(self._adapters)}>"

    async def checkpoint(self, source: WeightSource, report: Report) -> Path:
        """Return the real path of a complete checkpoint with the tensors, shapes and dtypes of the worker's own.

        What was fetched stays until `KEPT_CHECKPOINTS` others were.

        Args:
            report: called with `fetching` and `checking` as that begins.

        Cancellation: a file that is being fetched is removed; headers are read to the end, on their thread.

        Raises:
            ControlError: `path_refused`, `bad_source`, `storage`; says what was expected and what was found.
        """
        return await self._get(source, report, self._checkpoints, KEPT_CHECKPOINTS, self._check_checkpoint)

    async def adapter(self, source: WeightSource, report: Report, *, max_rank: int | None = None) -> Path:
        """Return the real path of a LoRA adapter whose modules and shapes fit the worker's own checkpoint.

        The rest is as in `checkpoint`; of fetched adapters as many stay as a desired state may have.

        Args:
            report: as in `checkpoint`.
            max_rank: the largest that the engine takes; None: it says nothing of ranks.
        """
        return await self._get(
            source, report, self._adapters, MAX_LORAS, lambda folder: self._check_adapter(folder, max_rank)
        )

    @contextlib.contextmanager
    def using(self, folder: Path) -> Iterator[None]:
        """Let `folder` stay, whatever is fetched while the block runs: an engine reads it."""
        self._in_use.add(folder)
        try:
            yield
        finally:
            self._in_use.discard(folder)

    async def clear(self) -> None:
        """Delete what this or an earlier life of the worker fetched; nothing else that lies in the cache."""
        async with self._lock:
            self._checkpoints.clear()
            self._adapters.clear()
            await asyncio.to_thread(_clear, self._cache)

    async def _get(
        self,
        source: WeightSource,
        report: Report,
        kept: list[Path],
        max_kept: int,
        check: Callable[[Path], None],
    ) -> Path:
        if source.path is not None:
            report("checking")
            return await asyncio.to_thread(_allowed, source.path, self._roots, check)
        async with self._lock:
            folder = await self._fetch(source, report)
            kept[:] = [*(other for other in kept if other != folder), folder]
            report("checking")
            try:
                await asyncio.to_thread(_allowed, str(folder), (self._cache,), check)
            except ControlError:
                kept.remove(folder)
                await self._delete(folder)
                raise
            old = [other for other in kept[:-max_kept] if other not in self._in_use]
            kept[:] = [other for other in kept if other not in old]
            for unused in old:
                await self._delete(unused)
            return folder

    async def _fetch(self, source: WeightSource, report: Report) -> Path:
        """Fetch a folder; return its real path."""
        if self._objects is None or source.objects is None:
            raise ControlError(ControlCode.BAD_SOURCE, f"{source} is refused: this worker reads no object store")
        folder = await self._objects.fetch_folder(source.objects, self._cache, report)
        return await asyncio.to_thread(folder.resolve)

    async def _delete(self, folder: Path) -> None:
        """Delete what was fetched and is not kept."""
        if folder not in self._checkpoints and folder not in self._adapters:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            logger.info("sources.deleted folder=%s", folder)

    def _check_checkpoint(self, folder: Path) -> None:
        tensors = read_checkpoint(folder)
        own = self._read_own()
        if own is not None:
            check_model(folder, tensors, own.tensors, own.config)

    def _check_adapter(self, folder: Path, max_rank: int | None) -> None:
        own = self._read_own()
        check_adapter(folder, None if own is None else own.tensors, max_rank)

    def _read_own(self) -> _Own | None:
        """Read the worker's own checkpoint, once: what the engine has does not change with the files."""
        if self._own is None and self._own_path is not None and has_checkpoint(self._own_path):
            self._own = _Own(read_checkpoint(self._own_path), read_config(self._own_path))
        return self._own


def _allowed(path: str, roots: Sequence[Path], check: Callable[[Path], None]) -> Path:
    """Check where a folder lies, and what is in it."""
    folder = allowed_folder(path, roots)
    check(folder)
    return folder


def _clear(cache: Path) -> None:
    if not cache.is_dir():
        return
    for entry in cache.iterdir():
        if entry.name.startswith((FOLDER_PREFIX, PARTIAL_PREFIX)):
            shutil.rmtree(entry, ignore_errors=True)
    with contextlib.suppress(OSError):  # other things are in it
        cache.rmdir()
