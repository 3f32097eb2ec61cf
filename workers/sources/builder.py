"""Builds the folder of a published version: fetched whole, or made of a folder that is at hand and what has changed.

There are several ways to a version. One on which anything is missing or wrong is left for the next, which fetches more;
the last one is an anchor. Whatever the way was, each tensor has the hash that the version's manifest says.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects import FolderReader, ObjectReader
from ...bus.protocol.weights.fetch_plan import FetchPlan, fetch_plans
from ...schemas.errors import ControlCode, ControlError
from ...schemas.manifest import Link, Manifest, TensorDelta, TensorEntry, delta_name
from .checkpoint import read_checkpoint
from .folder_store import FolderStore, Hold, PartialFolder
from .headers import Tensor
from .progress import Progress
from .published import anchor_files, check_same_tensors, delta_files, read_link
from .quiet_threads import run_quietly
from .roots import bad_source
from .tensor_files import Change, build_jobs, copy_others, prepare_files, verify_file, verify_jobs

__all__ = ["Builder", "fetch_files", "verify_version"]

logger = logging.getLogger(__name__)

_MAX_PROBLEMS: Final = 3
"""In an error message."""
_BUILT: Final = "folder"
"""Of a partial folder: what it becomes."""


class _Part(NamedTuple):
    """What is fetched of one version."""

    link: Link
    folder: FolderReader
    is_anchor: bool
    files: Mapping[str, int]
    """Objects and their sizes."""
    changes: Mapping[str, TensorDelta]
    """Of a delta, by the name of the tensor; the rest of the manifest is not kept."""

    def path(self, partial: PartialFolder) -> Path:
        """Return where they go: the same at each try, so that it goes on with what is there."""
        name = hashlib.sha256(self.link.objects.encode()).hexdigest()[:16]
        return partial.path / f"{'anchor' if self.is_anchor else 'delta'}-{name}"


class Builder:
    """Builds versions below `store`, one at a time.

    Args:
        objects: reads the object store.
        store: has the folders that are at hand.
    """

    def __init__(self, objects: ObjectReader, store: FolderStore) -> None:
        self._objects = objects
        self._store = store

    def __repr__(self) -> str:
        """One line with the store."""
        return f"<Builder {self._store}>"

    async def build(self, newest: Manifest, folder: FolderReader, partial: PartialFolder, progress: Progress) -> Path:
        """Build a version; return the complete folder, which lies below `partial`.

        Args:
            newest: its manifest, checked.
            folder: its objects.

        Cancellation: what was fetched stays in `partial`.

        Raises:
            ControlError: `bad_source`: no way leads to it, and nothing of the tries is worth keeping; `storage`.
        """
        problems: list[str] = []
        for plan in fetch_plans(newest.links, await asyncio.to_thread(self._store.digests)):
            try:
                return await self._carry_out(plan, newest, folder, partial, progress)
            except ControlError as error:
                if error.code is not ControlCode.BAD_SOURCE:
                    raise
                problems.append(error.message)
                logger.warning(
                    "version.build_failed objects=%s way=%s error=%s", newest.own.objects, _shown(plan), error
                )
        shown = "; ".join(dict.fromkeys(problems)) if len(problems) <= _MAX_PROBLEMS else problems[-1]
        nothing = f"objects:{newest.own.objects} has no anchor, and no chain that begins with a folder on this machine"
        raise bad_source(shown or nothing)

    async def _carry_out(
        self, plan: FetchPlan, newest: Manifest, folder: FolderReader, partial: PartialFolder, progress: Progress
    ) -> Path:
        async with contextlib.AsyncExitStack() as stack:
            base: Path | None = None
            if plan.base is not None:
                base = stack.enter_context(_holding(self._store, plan.base)).folder
            parts = await self._open_parts(stack, plan, newest, folder)
            anchor = next((part for part in parts if part.is_anchor), None)
            deltas = [part for part in parts if not part.is_anchor]
            needed = sum(sum(part.files.values()) for part in parts)
            is_written = anchor is None or bool(deltas)
            # Each `run_quietly` waits for its threads even if it is cancelled: nothing writes after the lock has gone.
            await run_quietly([lambda _: _make_room(partial, needed, newest, is_written=is_written)])
            progress.begin("fetching", needed)
            for part in parts:
                await fetch_files(part.folder, part.files, part.path(partial), progress)
            if anchor is not None:
                base = anchor.path(partial)
                if not deltas:
                    await verify_version(newest, base, progress)
                    return base
            if base is None:
                raise bad_source(f"objects:{newest.own.objects} has no version to begin with")
            return await _apply(base, deltas, newest, partial, progress)

    async def _open_parts(
        self, stack: contextlib.AsyncExitStack, plan: FetchPlan, newest: Manifest, folder: FolderReader
    ) -> list[_Part]:
        """Open the versions that a plan needs, and check all that is known before anything is fetched."""
        entries = await asyncio.to_thread(lambda: {entry.name: entry for entry in newest.tensors})
        parts: list[_Part] = []
        for link in (*(() if plan.anchor is None else (plan.anchor,)), *plan.deltas):
            if link == newest.own:
                opened, manifest = folder, newest
            else:
                opened = await stack.enter_async_context(self._objects.open_folder(link.objects))
                manifest = await read_link(opened, link, newest)
            is_anchor = link is plan.anchor
            parts.append(await asyncio.to_thread(_check_part, link, opened, manifest, entries, is_anchor=is_anchor))
        return parts


def _check_part(
    link: Link, folder: FolderReader, manifest: Manifest, newest: Mapping[str, TensorEntry], *, is_anchor: bool
) -> _Part:
    """Check a version against the newest one, and keep what the plan needs of its manifest; blocks."""
    check_same_tensors(manifest, newest)
    if is_anchor:
        return _Part(link, folder, is_anchor, anchor_files(folder, manifest), {})
    changes = {entry.name: entry.delta for entry in manifest.tensors if entry.delta is not None}
    return _Part(link, folder, is_anchor, delta_files(folder, manifest), changes)


async def fetch_files(folder: FolderReader, files: Mapping[str, int], into: Path, progress: Progress) -> None:
    """Fetch files below `into`, but for what an earlier try has fetched.

    Raises:
        ControlError: `bad_source`, `storage`.
    """
    for name in files:
        path = into / name
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True, mode=0o700)
        await folder.fetch(name, path, progress.add_fetched)


async def verify_version(manifest: Manifest, folder: Path, progress: Progress) -> None:
    """Compare each tensor and each other file of a folder with a manifest.

    Raises:
        ControlError: `bad_source`, naming the first that differs.
    """
    progress.begin("checking", await asyncio.to_thread(_bytes_of, manifest))
    await run_quietly(verify_jobs(manifest, folder, progress.add))
    for name, sha256 in manifest.files.items():
        await asyncio.to_thread(verify_file, folder / name, sha256)


async def _apply(base: Path, deltas: list[_Part], newest: Manifest, partial: PartialFolder, progress: Progress) -> Path:
    """Build the newest version of a base and the changes since."""
    progress.begin("building", await asyncio.to_thread(_bytes_of, newest))
    folder = partial.path / _BUILT
    changes, tensors = await asyncio.to_thread(_inputs, base, deltas, newest, partial)
    await run_quietly([lambda _: prepare_files(newest, folder)])
    await run_quietly(build_jobs(newest, tensors, changes, folder, progress.add))
    await run_quietly([lambda _: copy_others(newest, base, folder)])
    return folder


def _inputs(
    base: Path, deltas: list[_Part], newest: Manifest, partial: PartialFolder
) -> tuple[dict[str, list[Change]], Mapping[str, Tensor]]:
    """Return the changes of each tensor, in the order of the chain, and the checked tensors of the base; blocks."""
    changes: dict[str, list[Change]] = {}
    for part in deltas:
        path = part.path(partial)
        for name, delta in part.changes.items():
            changes.setdefault(name, []).append(Change(path / delta_name(delta.object), delta))
    tensors = read_checkpoint(base)
    for entry in newest.tensors:
        found = tensors.get(entry.name)
        if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise bad_source(f"{base} has not the tensor {entry.name[:200]!r} as {entry.dtype}{list(entry.shape)}")
    return changes, tensors


def _bytes_of(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


def _make_room(partial: PartialFolder, fetched: int, newest: Manifest, *, is_written: bool) -> None:
    """Have room for what is fetched, and for what is written with it; blocks."""
    written = 0
    if is_written:
        written = _bytes_of(newest)
        partial.reuse(_BUILT)
    partial.make_room(fetched + written)


def _shown(plan: FetchPlan) -> str:
    begin = f"base {plan.base}" if plan.anchor is None else f"anchor {plan.anchor.objects}"
    return f"{begin} and {len(plan.deltas)} deltas"


@contextlib.contextmanager
def _holding(store: FolderStore, digest: str) -> Iterator[Hold]:
    """Hold a folder that was at hand a moment ago."""
    if (hold := store.hold(digest)) is None:
        raise bad_source(f"{store.folder(digest)} is not at hand any more")
    try:
        yield hold
    finally:
        hold.release()
