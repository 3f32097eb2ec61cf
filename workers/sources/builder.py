"""Builds the folder of a published version: from a complete download, or from a local folder and the fetched deltas.

A version can be built by several plans. If anything of a plan is missing or wrong, the builder tries the next plan,
which fetches more; the last plan uses an anchor. With every plan, each tensor is verified against the hash in the
version's manifest.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects.folder_reader import FolderReader
from ...bus.objects.reader import ObjectReader
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
"""How many failed plans an error message lists; if more failed, it shows only the last."""
_BUILT: Final = "folder"
"""The subfolder of a partial folder in which the version is built."""


class _Part(NamedTuple):
    """The objects of one version that a plan fetches."""

    link: Link
    folder: FolderReader
    is_anchor: bool
    files: Mapping[str, int]
    """The size in bytes of each object, by name."""
    changes: Mapping[str, TensorDelta]
    """The changes of a delta, by tensor name. The rest of the manifest is not kept, which saves memory."""

    def path(self, partial: PartialFolder) -> Path:
        """Return the target folder. The path is the same in each try, so a retry resumes the download."""
        name = hashlib.sha256(self.link.objects.encode()).hexdigest()[:16]
        return partial.path / f"{'anchor' if self.is_anchor else 'delta'}-{name}"


class Builder:
    """Builds versions below `store`, one at a time.

    Args:
        objects: reads the object store.
        store: contains the local folders.
    """

    def __init__(self, objects: ObjectReader, store: FolderStore) -> None:
        self._objects = objects
        self._store = store

    def __repr__(self) -> str:
        """One line with the store."""
        return f"<Builder {self._store}>"

    async def build(self, newest: Manifest, folder: FolderReader, partial: PartialFolder, progress: Progress) -> Path:
        """Build a version and return its complete folder, which lies below `partial`.

        Args:
            newest: the validated manifest of the version.
            folder: the objects of the version.

        Cancellation: the fetched files stay in `partial`.

        Raises:
            ControlError: `bad_source`: every plan failed, so the caller can delete `partial`; `storage`.
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
            # `run_quietly` waits for its threads even if it is cancelled, so no thread writes after the lock is freed.
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
        """Open the versions that a plan needs, and validate their manifests before any object is fetched."""
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
    """Check a version against the newest one, and return the data of its manifest that the plan needs. Blocks."""
    check_same_tensors(manifest, newest)
    if is_anchor:
        return _Part(link, folder, is_anchor, anchor_files(folder, manifest), {})
    changes = {entry.name: entry.delta for entry in manifest.tensors if entry.delta is not None}
    return _Part(link, folder, is_anchor, delta_files(folder, manifest), changes)


async def fetch_files(folder: FolderReader, files: Mapping[str, int], into: Path, progress: Progress) -> None:
    """Fetch files below `into`, except for the bytes that an earlier try has fetched.

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
        ControlError: `bad_source`. The message names the first tensor or file that differs.
    """
    progress.begin("checking", await asyncio.to_thread(_bytes_of, manifest))
    await run_quietly(verify_jobs(manifest, folder, progress.add))
    for name, sha256 in manifest.files.items():
        await asyncio.to_thread(verify_file, folder / name, sha256)


async def _apply(base: Path, deltas: list[_Part], newest: Manifest, partial: PartialFolder, progress: Progress) -> Path:
    """Apply the deltas to a base folder, which builds the newest version."""
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
    """Return the changes of each tensor in the order of the chain, and the validated tensors of the base. Blocks."""
    changes: dict[str, list[Change]] = {}
    for part in deltas:
        path = part.path(partial)
        for name, delta in part.changes.items():
            changes.setdefault(name, []).append(Change(path / delta_name(delta.object), delta))
    tensors = read_checkpoint(base)
    for entry in newest.tensors:
        found = tensors.get(entry.name)
        if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise bad_source(f"{base} has no tensor {entry.name[:200]!r} of {entry.dtype}{list(entry.shape)}")
    return changes, tensors


def _bytes_of(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


def _make_room(partial: PartialFolder, fetched: int, newest: Manifest, *, is_written: bool) -> None:
    """Reserve disk space for the fetched objects and for the folder that is built from them. Blocks."""
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
    """Hold a local folder that may have been deleted since the plan was made."""
    if (hold := store.hold(digest)) is None:
        raise bad_source(f"{store.folder(digest)} was deleted meanwhile")
    try:
        yield hold
    finally:
        hold.release()
