"""Stages one source of the object store: finds its folder in the folder store, or builds it there.

A version is built from a complete download, or from a local folder and the fetched deltas. If anything of such a plan
is missing or wrong, the next plan is tried, which fetches more; the last plan uses an anchor. The manifest is validated
before anything is fetched or allocated. With every plan, each tensor is verified against the hash in the version's
manifest.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ...bus.objects.catalog import NO_LIMIT, BucketState
from ...bus.objects.layout import decode_digest
from ...bus.objects.reader import FolderReader, ObjectReader
from ...bus.protocol.weights.chain import FetchPlan, chain_length, fetch_plans
from ...bus.protocol.weights.tensors import layouts, max_body_bytes
from ...schemas.errors import (
    FREE_SPACE,
    ControlCode,
    ControlError,
    RemoteProtocolError,
    bad_source,
    is_disk_full,
    storage_failure,
)
from ...schemas.manifest import (
    DELTA_PREFIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Link,
    Manifest,
    TensorDelta,
    decode_manifest,
    delta_name,
)
from ...schemas.weights import PublishedVersion
from .checkpoint import check_tensors, digest_of_published, read_checkpoint
from .content import Tensor
from .store import FolderStore, Hold, PartialFolder, files_stamp
from .tensor_files import Change, build_jobs, check_no_others, copy_others, prepare_files, verify_file, verify_jobs
from .threads import Progress, run_quietly

logger = logging.getLogger(__name__)


MAX_SLACK: Final = 1024**2
"""Bytes by which a delta may exceed the size of all tensors."""
_UPLOAD: Final = "upload"
"""The subfolder of a partial folder into which a plain upload is fetched."""
MAX_LOOKS: Final = 4
"""Attempts to use or build a folder. A folder is damaged at most once, unless its disk is damaged, and other processes
rarely delete it."""
_MAX_PROBLEMS: Final = 3
"""How many failed plans an error message lists; if more failed, it shows only the last."""
_BUILT: Final = "folder"
"""The subfolder of a partial folder in which the version is built."""


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


class Fetcher:
    """Fetches folders of the object store to this machine.

    Args:
        objects: reads the object store.
        store: stores the fetched folders.
        checks: the checks of each source.
        progress: counts the fetched and the built bytes.
    """

    def __init__(self, objects: ObjectReader, store: FolderStore, checks: Checks, progress: Progress) -> None:
        self._objects = objects
        self._store = store
        self._checks = checks
        self._progress = progress

    async def fetch(self, objects: str) -> Fetched:
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
                    await asyncio.to_thread(self._checks.manifest, manifest)
                    content = await asyncio.to_thread(digest_of_published, manifest)
                    published = describe(manifest, await folder.bucket_state())
                hold = await self._find_or_build(folder, manifest)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            where += f"; {FREE_SPACE}" if is_disk_full(error) else ""
            raise storage_failure(f"objects:{objects} cannot be staged: {error.strerror or error}{where}") from error
        except asyncio.CancelledError:
            if hold is not None:  # cancelled while the object folder was being closed
                hold.release()
            raise
        return Fetched(hold, published, content)

    async def _find_or_build(self, folder: FolderReader, manifest: Manifest | None) -> Hold:
        progress = self._progress
        digest = folder.digest if manifest is None else manifest.digest
        for _ in range(MAX_LOOKS):
            opened = await self._store.open(digest, lambda: progress.begin("waiting"))
            if isinstance(opened, PartialFolder):
                async with _building(opened, progress):
                    path = await self._build(folder, manifest, opened)
                    progress.begin("checking")
                    await asyncio.to_thread(self._checks.folder, path)
                    opened.complete(path, await asyncio.to_thread(files_stamp, path))
                # The hold is None if another process locked the folder first, or has deleted it.
                if (hold := self._store.hold(digest)) is not None:
                    return hold
            elif await self._is_sound(opened, folder, manifest):
                return opened
        raise storage_failure(f"{self._store.folder(digest)} was found damaged or deleted repeatedly")

    async def _is_sound(self, hold: Hold, folder: FolderReader, manifest: Manifest | None) -> bool:
        """Return True if a folder of the store is valid. A damaged folder is deleted."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(hold)
            if not hold.is_of_this_boot or not await asyncio.to_thread(hold.is_unchanged):
                files = await asyncio.to_thread(files_stamp, hold.folder)
                try:
                    await self._verify(folder, manifest, hold.folder)
                except (ControlError, OSError) as error:
                    logger.warning("folders.damage_detected folder=%s error=%s", hold.folder, error)
                    await asyncio.to_thread(hold.retire)
                    return False
                hold.confirm(files)
            self._progress.begin("checking")
            await asyncio.to_thread(self._checks.folder, hold.folder)
            stack.pop_all()
        return True

    async def _build(self, folder: FolderReader, manifest: Manifest | None, partial: PartialFolder) -> Path:
        if manifest is not None:
            return await self._build_version(manifest, folder, partial)
        files = {name: info.size for name, info in folder.names.items()}
        await run_quietly([lambda _: partial.make_room(sum(files.values()))])
        self._progress.begin("fetching", sum(files.values()))
        await fetch_files(folder, files, partial.path / _UPLOAD, self._progress)
        return partial.path / _UPLOAD

    async def _build_version(self, newest: Manifest, folder: FolderReader, partial: PartialFolder) -> Path:
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
                return await self._carry_out(plan, newest, folder, partial)
            except ControlError as error:
                if error.code is not ControlCode.BAD_SOURCE:
                    raise
                problems.append(error.message)
                begin = f"base {plan.base}" if plan.anchor is None else f"anchor {plan.anchor.objects}"
                way = f"{begin} and {len(plan.deltas)} deltas"
                logger.warning("version.build_failed objects=%s way=%s error=%s", newest.own.objects, way, error)
        shown = "; ".join(dict.fromkeys(problems)) if len(problems) <= _MAX_PROBLEMS else problems[-1]
        nothing = f"objects:{newest.own.objects} has no anchor, and no chain that begins with a folder on this machine"
        raise bad_source(shown or nothing)

    async def _carry_out(self, plan: FetchPlan, newest: Manifest, folder: FolderReader, partial: PartialFolder) -> Path:
        progress = self._progress
        async with contextlib.AsyncExitStack() as stack:
            base: Path | None = None
            if plan.base is not None:
                # The folder may have been deleted since the plan was made.
                if (hold := self._store.hold(plan.base)) is None:
                    raise bad_source(f"{self._store.folder(plan.base)} was deleted meanwhile")
                base = stack.enter_context(hold).folder
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
        tensors = await asyncio.to_thread(_tensors_of, newest)
        parts: list[_Part] = []
        for link in (*(() if plan.anchor is None else (plan.anchor,)), *plan.deltas):
            if link == newest.own:
                opened, manifest = folder, newest
            else:
                opened = await stack.enter_async_context(self._objects.open_folder(link.objects))
                manifest = await read_link(opened, link, newest)
            is_anchor = link is plan.anchor
            parts.append(await asyncio.to_thread(_check_part, link, opened, manifest, tensors, is_anchor=is_anchor))
        return parts

    async def _verify(self, folder: FolderReader, manifest: Manifest | None, path: Path) -> None:
        """Compare a folder with the store: a crash of the machine may have lost some of it, or people changed it.

        Raises:
            ControlError: `bad_source`.
            OSError: a file was deleted during the check.
        """
        if manifest is not None:
            await verify_version(manifest, path, self._progress)
            names = {*manifest.files, *(entry.file for entry in manifest.tensors)}
        else:
            files = {path / name: decode_digest(info).hex() for name, info in folder.names.items()}
            await run_quietly(partial(verify_file, file, sha256) for file, sha256 in files.items())
            names = {*folder.names}
        await asyncio.to_thread(check_no_others, path, names)


async def read_manifest(folder: FolderReader, objects: str) -> Manifest | None:
    """Read the manifest of a folder. Return None if it has none: the folder is an upload, not a published version.

    Raises:
        ControlError: `bad_source`: the manifest does not decode, or belongs to another folder; `storage`.
    """
    if MANIFEST not in folder.names:
        return None
    data = await folder.read(MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = await asyncio.to_thread(decode_manifest, data)
    except RemoteProtocolError as error:
        raise bad_source(f"objects:{objects}: {error}") from error
    if manifest.own.objects != objects:
        raise bad_source(f"objects:{objects} has the manifest of objects:{manifest.own.objects}")
    return manifest


def describe(manifest: Manifest, bucket: BucketState) -> PublishedVersion:
    """Return the information that the worker reports about a version and about its bucket."""
    own = manifest.own
    return PublishedVersion(
        version=manifest.version,
        stored_bytes=(own.delta_bytes or 0) + (own.anchor_bytes or 0),
        model_bytes=sum(entry.size for entry in manifest.tensors),
        chain_length=chain_length(manifest.links),
        used_bytes=bucket.used,
        limit_bytes=0 if bucket.limit == NO_LIMIT else bucket.limit,
    )


def check_manifest(manifest: Manifest, model: str, own: Mapping[str, Tensor] | None) -> None:
    """Check that a version belongs to the worker's model, and that its chain is valid.

    Args:
        model: the worker's model. The manifest of an adapter names the model of the adapter's base.
        own: tensors of the worker's checkpoint, or None if they are unknown.

    Raises:
        ControlError: `bad_source`. The message names both models, or the first wrong tensor or link.
    """
    where = f"objects:{manifest.own.objects}"
    if manifest.model != model:
        # Models of one family have the same tensors, so matching tensors do not prove that the model is the same.
        raise bad_source(f"{where} is of the model {manifest.model!r}; expected: {model!r}, as the worker's")
    bucket = manifest.own.objects.partition("/")[0]
    folders = [link.objects for link in manifest.links]
    if len(set(folders)) != len(folders):
        raise bad_source(f"{where} has a chain with a version twice")
    for folder in folders:
        if folder.partition("/")[0] != bucket:
            raise bad_source(f"{where} has the version objects:{folder} in its chain, which is in another bucket")
    if own is not None:
        # The sizes of tensors limit the decompressed bytes, and the sizes of files limit the written bytes.
        check_tensors(where, _tensors_of(manifest), own)


def _tensors_of(manifest: Manifest) -> dict[str, Tensor]:
    # A large model has a hundred thousand tensors in a few hundred files.
    paths = {file: Path(manifest.own.objects, file) for file in {entry.file for entry in manifest.tensors}}
    return {entry.name: Tensor(entry.dtype, entry.shape, paths[entry.file]) for entry in manifest.tensors}


async def read_link(folder: FolderReader, link: Link, newest: Manifest) -> Manifest:
    """Read the manifest of another version of the chain of `newest`.

    Raises:
        ControlError: `bad_source`: the manifest is missing, of another model, or of another version than `link`;
            `storage`.
    """
    where = f"objects:{link.objects}"
    manifest = await read_manifest(folder, link.objects)
    if manifest is None:
        raise bad_source(f"{where} has no {MANIFEST}: it is no published version")
    if (manifest.model, manifest.adapter) != (newest.model, newest.adapter):
        raise bad_source(f"{where} is of the model {manifest.model!r}; expected: {newest.model!r}")
    if (manifest.digest, manifest.version) != (link.digest, link.version):
        raise bad_source(f"{where} is the version {manifest.version} of digest {manifest.digest}; expected: {link}")
    return manifest


def delta_files(folder: FolderReader, manifest: Manifest) -> dict[str, int]:
    """Return the objects that contain the changes of a version's delta, with their sizes.

    Raises:
        ControlError: `bad_source`: an object is missing, or a change is outside of its object or too large.
    """
    where = f"objects:{manifest.own.objects}"
    files: dict[str, int] = {}
    for entry in manifest.tensors:
        if (delta := entry.delta) is None:
            continue
        shown, name = f"{where} has the tensor {entry.name[:200]!r}", delta_name(delta.object)
        if name not in folder.names:
            raise bad_source(f"{shown} in {name}, which is missing")
        files[name] = folder.names[name].size
        num_items = entry.size // entry.item_bytes
        if delta.offset + delta.num_bytes > files[name]:
            raise bad_source(f"{shown} up to byte {delta.offset + delta.num_bytes} of {name}, which has {files[name]}")
        if delta.num_changed > num_items or max(delta.num_bytes, delta.body_bytes) > max_body_bytes(
            delta.encoding, delta.num_changed, num_items, entry.item_bytes
        ):
            raise bad_source(f"{shown} with a change that is larger than the tensor can have: {delta}")
    if sum(files.values()) > MAX_SLACK + sum(entry.size for entry in manifest.tensors):
        raise bad_source(f"{where} has a delta that is larger than all its tensors")
    return files


def anchor_files(folder: FolderReader, manifest: Manifest) -> dict[str, int]:
    """Return the objects of a version's anchor, with their sizes.

    Raises:
        ControlError: `bad_source`: an object is missing, or its size is not that of its tensors.
    """
    where = f"objects:{manifest.own.objects}"
    files: dict[str, int] = {}
    for file in layouts(manifest.tensors):
        if file.name not in folder.names or folder.names[file.name].size != file.size:
            raise bad_source(f"{where} lacks {file.name}, or its size is not the {file.size} bytes of its tensors")
        files[file.name] = file.size
    for name in manifest.files:
        if name not in folder.names or name.startswith(DELTA_PREFIX):
            raise bad_source(f"{where} lacks {name}, which its manifest names")
        files[name] = folder.names[name].size
    return files


def _check_part(
    link: Link, folder: FolderReader, manifest: Manifest, newest: Mapping[str, Tensor], *, is_anchor: bool
) -> _Part:
    """Check a version against the newest one, and return the data of its manifest that the plan needs. Blocks.

    The tensors must be those of the newest version of the chain, whose sizes are already checked.
    """
    check_tensors(f"objects:{link.objects}", _tensors_of(manifest), newest, "the newest version")
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
    progress.begin("checking", await asyncio.to_thread(_count_bytes, manifest))
    await run_quietly(verify_jobs(manifest, folder, progress.add))
    for name, sha256 in manifest.files.items():
        await asyncio.to_thread(verify_file, folder / name, sha256)


async def _apply(base: Path, deltas: list[_Part], newest: Manifest, partial: PartialFolder, progress: Progress) -> Path:
    """Apply the deltas to a base folder, which builds the newest version."""
    progress.begin("building", await asyncio.to_thread(_count_bytes, newest))
    folder = partial.path / _BUILT
    changes, tensors = await asyncio.to_thread(_read_inputs, base, deltas, newest, partial)
    await run_quietly([lambda _: prepare_files(newest, folder)])
    await run_quietly(build_jobs(newest, tensors, changes, folder, progress.add))
    await run_quietly([lambda _: copy_others(newest, base, folder)])
    return folder


def _read_inputs(
    base: Path, deltas: list[_Part], newest: Manifest, partial: PartialFolder
) -> tuple[dict[str, list[Change]], Mapping[str, Tensor]]:
    """Return the changes of each tensor in the order of the chain, and the validated tensors of the base. Blocks."""
    changes: dict[str, list[Change]] = {}
    for part in deltas:
        path = part.path(partial)
        for name, delta in part.changes.items():
            changes.setdefault(name, []).append(Change(path / delta_name(delta.object), delta))
    tensors = read_checkpoint(base)
    check_tensors(base, tensors, _tensors_of(newest), "the newest version")
    return changes, tensors


def _count_bytes(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.tensors)


def _make_room(partial: PartialFolder, fetched: int, newest: Manifest, *, is_written: bool) -> None:
    """Reserve disk space for the fetched objects and for the folder that is built from them. Blocks."""
    written = 0
    if is_written:
        written = _count_bytes(newest)
        partial.reuse(_BUILT)
    partial.make_room(fetched + written)


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
