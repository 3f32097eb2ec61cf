"""Publishes versions of one model's weights: stores the changes, commits the version, and makes the fleet load it."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from ...schemas.control import FinishWeightUpdate, LoadLora, UpdateWeights
from ...schemas.errors import ControlCode, ControlError, InvalidRequest, NoWorkers, RollbusError, bad_source
from ...schemas.manifest import (
    DELTA_PREFIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Link,
    Manifest,
    RankList,
    TensorEntry,
    content_digest,
    decode_manifest,
)
from ...schemas.weights import WeightSource
from ..client.runtime import Runtime
from ..nats.connection import connected
from ..objects.reader import open_reader
from ..objects.uploads import sources_in
from ..protocol.fleet.authority import Load
from ..protocol.fleet.command_result import CommandIncomplete, CommandResult
from ..protocol.weights.chain import (
    PRESSED_S,
    YOUNG_S,
    Contents,
    contents,
    links_with,
    needed_for_version,
    needs_anchor,
)
from ..protocol.weights.tensors import ADAPTER_TENSORS
from ..thread_calls import call_to_end
from .draft import Draft, StoredObject, TensorFeed, file_objects, read_off_loop, with_index
from .options import PublishedWeights, PublishOptions
from .publication import Publication
from .tensors import Checkpoint, FolderFile, Snapshot, TensorKind, bad_tensor, fill
from .versions import VersionChain

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """What a publication stores, and counts and entries of what is stored so far."""

    publication: Publication
    contents: Contents
    draft: Draft
    started: float
    links: tuple[Link, ...] = ()
    """Links that the version follows. Stored here, because a renewal of the lease may read other links meanwhile."""
    files: Mapping[str, FolderFile] = field(default_factory=dict)
    adapter: str | None = None
    ranks_timeout_s: float | None = None
    """Seconds to wait for other ranks. None if only rank 0 publishes."""
    num_bytes: int = 0
    upload_began: float | None = None
    upload_s: float = 0.0
    num_changed: int = 0
    delta_bytes: int = 0
    entries: Sequence[TensorEntry] = ()

    def join(self, lists: Iterable[RankList], kinds: Mapping[str, TensorKind] | None) -> None:
        """Add the tensors and the sizes of the objects that the other ranks have stored.

        Args:
            kinds: kinds of all required tensors, by name. None: the given tensors are complete.

        Raises:
            InvalidRequest: two ranks gave the same tensor, or no rank gave a required tensor.
        """
        ranks = {entry.name: 0 for entry in self.entries}
        entries = list(self.entries)
        for given in lists:
            for entry in given.tensors:
                if (other := ranks.setdefault(entry.name, given.rank)) != given.rank:
                    problem = f"was given by ranks {other} and {given.rank}"
                    raise bad_tensor(entry.name, problem, "each tensor from one rank")
                # A delta leaves out unchanged tensors.
                self.num_changed += entry.delta is not None or not self.contents.delta
            entries += given.tensors
            for stored in given.objects:
                self.num_bytes += stored.size
                if stored.name.rpartition("/")[2].startswith(DELTA_PREFIX):
                    self.delta_bytes += stored.size
        missing = next((name for name in kinds or () if name not in ranks), None)
        if missing is not None:
            raise bad_tensor(missing, "was given by no rank", "all tensors of the checkpoint")
        # Sorting keeps the order within a file, because one rank has written the file.
        self.entries = sorted(entries, key=lambda entry: entry.file)

    def result(self, digest: str, compare_s: float) -> PublishedWeights:
        """Return the result of the committed publication."""
        return PublishedWeights(
            version=self.publication.version,
            objects=self.publication.objects,
            digest=digest,
            is_anchor=self.contents.anchor,
            num_tensors=len(self.entries),
            num_changed=self.num_changed,
            model_bytes=sum(entry.size for entry in self.entries),
            stored_bytes=self.num_bytes,
            compare_s=compare_s,
            upload_s=self.upload_s,
            seconds=time.monotonic() - self.started,
        )


class VersionPublisher:
    """Decides what a publication of one model stores, stores it, and updates the fleet. Runs on a client's bus thread.

    Args:
        runtime: runtime of the client.
        checkpoint: checkpoint with which training began. None: the first publication defines the tensors.
        rank: rank of this process among `num_ranks`. Rank 0 holds the lease, commits, and updates the fleet.
    """

    def __init__(
        self, runtime: Runtime, model: str, checkpoint: Checkpoint | None, *, rank: int, num_ranks: int
    ) -> None:
        config = runtime.config
        self._runtime = runtime
        self._versions = VersionChain(config.server, config.subjects, model, publisher=config.client)
        self._model = model
        self._kinds = None if checkpoint is None else checkpoint.kinds
        self._files: Mapping[str, FolderFile] = {} if checkpoint is None else checkpoint.files
        self._snapshot = Snapshot()
        self._rank = rank
        self._num_ranks = num_ranks
        # True after a rank failed or a worker could not build a version. The rank or worker may then lack the content
        # of rank 0.
        self._is_out_of_step = False
        if not rank:
            # Folders without a recorded version then stay for only one minute.
            self._versions.make_room = partial(self._clean, young_s=PRESSED_S)
        self._is_busy = asyncio.Lock()

    @property
    def last_version(self) -> int | None:
        """Last version that any publisher committed. None if there is none."""
        links = self._versions.record.links
        return links[-1].version if links else None

    async def open(self, base: str | os.PathLike[str] | None) -> None:
        """Acquire the lease.

        Args:
            base: folder of the last published version. None: the first version will be an anchor.

        Cancellation: leaves nothing open.

        Raises:
            InvalidRequest: no version was published, or `base` differs from the last published version.
            ControlError: `publisher_busy`, or the bucket or the last manifest is not usable.
            BusBroken: JetStream or the connection failed.
        """
        await self._versions.open(with_lease=self._rank == 0)
        if base is not None:
            try:
                await self._read_base(base)
            except BaseException:
                await self.close()
                raise

    async def _read_base(self, folder: str | os.PathLike[str]) -> None:
        """Fill the snapshot from a folder."""
        if not self._versions.record.links:
            raise InvalidRequest("base", f"is {folder}, and no version is published", "no base")
        link = self._versions.record.links[-1]
        async with (
            connected(self._runtime.config.server, name=f"rollbus versions {self._runtime.config.client}") as nats,
            open_reader(nats, link.objects) as reader,
        ):
            manifest = decode_manifest(await reader.read(MANIFEST, MAX_MANIFEST_BYTES))
        await asyncio.to_thread(fill, self._snapshot, manifest, self._files, folder)

    async def close(self) -> None:
        """Release the lease."""
        await self._versions.close()

    async def publish(self, feed: TensorFeed, options: PublishOptions[UpdateWeights]) -> PublishedWeights:
        """Store the tensors of `feed` as a version and commit it. Then update the fleet, if `options` ask for it.

        Publications run one after another. A publication is not visible before its commit. A failed publication leaves
        nothing in the store.

        Cancellation: before the commit, the stored objects are deleted. After the commit, the version stays.

        Raises:
            InvalidRequest: an item is no tensor, or differs in kind from the last version. Nothing is published.
            ControlError: the desired state or the bucket rejects the version. Nothing is published.
            NoWorkers: the version is stored, and no worker can load it.
            CommandIncomplete: the version is stored, and not all workers have loaded it.
            BusBroken: JetStream or the connection failed.
        """
        async with self._turn(feed):
            if self._rank:
                return await self._give(feed, options)
            published = await self._store_weights(feed, options)
            try:
                return await self._load(published, options)
            except CommandIncomplete as error:
                failures = (ack.error for ack in error.ledger.failed.values())
                # An object of the chain is damaged. The next delta must not build on it.
                self._is_out_of_step |= any(one is not None and one.code is ControlCode.BAD_SOURCE for one in failures)
                raise

    async def publish_adapter(
        self, feed: TensorFeed, files: Mapping[str, FolderFile], options: PublishOptions[LoadLora]
    ) -> PublishedWeights:
        """Store and commit a whole LoRA adapter. Then load it, if `options` ask for it. Errors: as `publish`."""
        command = options.command
        async with self._turn(feed):
            if options.updates:
                await self._check_adapter(command)
            whole = Contents(anchor=True, delta=False)
            publication = self._versions.begin(command.version, command.name)
            draft = Draft(whole, Snapshot(), None, file=ADAPTER_TENSORS)
            job = _Job(publication, whole, draft, options.started, files=files, adapter=command.name)
            return await self._load(await self._store(feed, job), options)

    @contextlib.asynccontextmanager
    async def _turn(self, feed: TensorFeed) -> AsyncIterator[None]:
        """Wait for the end of other publications, and end the pass over the tensors after the block."""
        try:
            async with self._is_busy:
                yield
        finally:
            await feed.stop()

    async def _check_adapter(self, command: LoadLora) -> None:
        """Raise the errors of loading the adapter before a command is sent. Nothing is stored at this point.

        Raises:
            ControlError: `not_allowed` if this user may not load adapters, or the desired state rejects the version.
        """
        try:
            await self._runtime.updates.check_version(command)
        except ControlError as error:
            if error.code is not ControlCode.NOT_ALLOWED:
                raise
            hint = "update=False stores the adapter; an admin can then load it with load_lora"
            raise ControlError(error.code, f"{error.message}. {hint}") from error

    async def _load(self, published: PublishedWeights, options: PublishOptions[Load]) -> PublishedWeights:
        """Make the fleet load what was published, if `options` ask for it. Return the result with the outcome."""
        if not options.updates:
            await self._clean()
            return published
        result = await self.load(published.objects, options)
        return structs.replace(published, ledger=result, seconds=time.monotonic() - options.started)

    async def load(self, objects: str, options: PublishOptions[Load]) -> CommandResult:
        """Make the fleet load a committed version or adapter, and delete old versions.

        Raises:
            NoWorkers: the version is stored, and no worker can load it.
        """
        command = structs.replace(options.command, source=WeightSource(objects=objects))
        what, call = f"version {command.version}", "update_weights("
        if isinstance(command, LoadLora):
            what, call = f"adapter {command.name!r}", f"load_lora({command.name!r}, "
        try:
            if isinstance(command, LoadLora):
                return await self._runtime.updates.load_lora(
                    command, is_next_version=False, upload=False, on_ack=options.on_ack
                )
            return await self._runtime.updates.update_weights(
                command, upload=False, on_ack=options.on_ack, min_staged=options.min_staged
            )
        except NoWorkers as error:
            raise NoWorkers(
                message=f"{what} is stored as objects:{objects}, and no worker has loaded it: {error}. When workers "
                f"are running, call fleet.{call}objects={objects!r}, version={command.version})"
            ) from error
        finally:
            await self._clean()

    async def _clean(self, *, young_s: float = YOUNG_S) -> None:
        """Delete old versions that the desired state does not name.

        A failure is logged. The next call deletes the remaining folders.
        """
        try:
            recorded = sources_in(await self._runtime.updates.state(self._model))
        except RollbusError as error:
            logger.warning("weights.cleanup_failed model=%s error=%s", self._model, error)
            return
        await self._versions.clean(recorded, young_s=young_s)

    async def _plan(
        self, options: PublishOptions[UpdateWeights], given_bytes: int
    ) -> tuple[tuple[Link, ...], Contents]:
        """Return the links before the new version, and what to store of it.

        Args:
            given_bytes: bytes of this rank's tensors. 0: unknown.

        Raises:
            InvalidRequest: workers would reject the version.
            ControlError: the desired state rejects the version, or the bucket has no room for it after a cleanup.
            BusBroken: JetStream or the connection failed.
        """
        state = await self._runtime.updates.state(self._model)
        await self._versions.refresh()
        links = self._versions.record.links
        if options.updates:
            await self._runtime.updates.check_version(options.command, min_staged=options.min_staged)
        elif links and options.command.version <= links[-1].version and not options.command.allow_rollback:
            raise ControlError(
                ControlCode.OLD_VERSION,
                f"version {options.command.version} is not newer than the last published version {links[-1].version}; "
                "set allow_rollback to publish it",
            )
        recorded = state.registers.get("weights")
        reason = needs_anchor(
            links,
            snapshot=None if self._is_out_of_step else self._snapshot.digest or None,
            after_transfer=recorded is not None and isinstance(recorded.command, FinishWeightUpdate),
            # A starting worker has no capabilities yet. Ignore it: otherwise each version would be a whole checkpoint.
            workers_read_deltas=all(
                worker.capabilities.weight_deltas
                for worker in await self._runtime.watcher.known_workers()
                if worker.model == self._model and worker.capabilities is not None
            ),
        )
        anchor_bytes = _anchor_bytes(links, self._snapshot, self._kinds, given_bytes)
        used, limit = await self._versions.used_and_limit()
        if used + needed_for_version(links, anchor_bytes) > limit:
            await self._versions.make_room()
            used, limit = await self._versions.used_and_limit()
            links = self._versions.record.links
        return links, contents(reason, links, anchor_bytes=anchor_bytes, used=used, limit=limit)

    async def _store_weights(self, feed: TensorFeed, options: PublishOptions[UpdateWeights]) -> PublishedWeights:
        links, what = await self._plan(options, feed.given_bytes)
        publication = self._versions.begin(options.command.version, has_delta=what.delta, has_anchor=what.anchor)
        timeout_s = options.ranks_timeout_s if self._num_ranks > 1 else None
        async with self._draft(what, feed) as draft:
            job = _Job(publication, what, draft, options.started, links, self._files, ranks_timeout_s=timeout_s)
            published = await self._store(feed, job)
            await call_to_end(draft.commit, published.digest)
        self._is_out_of_step = False
        return published

    async def _give(self, feed: TensorFeed, options: PublishOptions[UpdateWeights]) -> PublishedWeights:
        """Store this rank's tensors for the version that rank 0 publishes, and wait for its commit."""
        version, timeout_s = options.command.version, options.ranks_timeout_s
        publication = await self._versions.join(version, timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            try:
                opened, links = publication.opened, self._versions.record.links
                if opened.has_delta and (not links or links[-1].digest != self._snapshot.digest):
                    problem = f"rank {self._rank} does not have the version before {version}"
                    raise bad_source(f"{problem}; the next version will be an anchor")
                what = Contents(anchor=opened.has_anchor, delta=opened.has_delta)
                async with publication.alive(self._rank):
                    draft = await stack.enter_async_context(self._draft(what, feed))
                    job = _Job(publication, what, draft, options.started)
                    await self._store_tensors(feed, job)
                await publication.give(self._rank, job.entries)
            except BaseException as error:
                # Without this report, rank 0 would wait for this rank until its timeout.
                await publication.fail(self._rank, f"{type(error).__name__}: {error}")
                raise
            link = await self._versions.until_committed(publication.objects, timeout_s)
            await call_to_end(draft.commit, link.digest)
        return job.result(link.digest, feed.compare_s)

    @contextlib.asynccontextmanager
    async def _draft(self, contents: Contents, feed: TensorFeed) -> AsyncIterator[Draft]:
        """Create a draft. If the block fails, roll the draft back, so that the snapshot is as before."""
        draft = Draft(contents, self._snapshot, self._kinds, rank=self._rank, num_ranks=self._num_ranks)
        try:
            yield draft
        except BaseException:
            # If the thread may still compare a tensor, the snapshot stays empty: the next version is an anchor.
            if await feed.stop():
                await call_to_end(draft.restore)
            raise

    async def _store(self, feed: TensorFeed, job: _Job) -> PublishedWeights:
        """Store all objects, while the tensors are drawn, and commit the publication."""
        publication = job.publication
        try:
            if job.ranks_timeout_s is not None:
                await publication.announce()
            await self._store_tensors(feed, job)
            if job.ranks_timeout_s is not None:
                self._is_out_of_step = True
                job.join(await publication.collect(self._num_ranks, job.ranks_timeout_s), self._kinds)
            job.files = with_index(job.files, job.entries)
            if job.contents.anchor:
                for found in file_objects(job.files):
                    await self._put(job, found)
            manifest = self._manifest(job)
            await publication.commit(manifest)
        except BaseException:
            await publication.discard()
            raise
        published = job.result(manifest.digest, feed.compare_s)
        logger.info(
            "weights.published model=%s version=%s objects=%s"
            " changed=%s tensors=%s bytes=%s model_bytes=%s seconds=%.3f",
            *(self._model, published.version, published.objects, published.num_changed, published.num_tensors),
            *(published.stored_bytes, published.model_bytes, published.seconds),
        )
        return published

    async def _store_tensors(self, feed: TensorFeed, job: _Job) -> None:
        """Store this rank's tensors while they are drawn."""
        feed.begin(job.draft)
        async for found in feed.objects():
            await self._put(job, found)
        job.entries, job.num_changed = job.draft.entries(), job.draft.num_changed
        job.delta_bytes = job.draft.delta_bytes

    async def _put(self, job: _Job, found: StoredObject) -> None:
        job.upload_began = job.upload_began or time.monotonic()
        await job.publication.put(found.name, read_off_loop(found))
        job.upload_s = time.monotonic() - job.upload_began
        job.num_bytes += found.num_bytes

    def _manifest(self, job: _Job) -> Manifest:
        files = {name: file.sha256 for name, file in job.files.items()}
        digest = content_digest(job.entries, files)
        delta_bytes = job.delta_bytes if job.contents.delta else None
        link = Link(
            objects=job.publication.objects,
            version=job.publication.version,
            digest=digest,
            delta_bytes=delta_bytes,
            anchor_bytes=job.num_bytes - (delta_bytes or 0) if job.contents.anchor else None,
        )
        return Manifest(
            model=self._model,
            adapter=job.adapter,
            version=job.publication.version,
            digest=digest,
            epoch=job.publication.epoch,
            publisher=self._runtime.config.client,
            tensors=tuple(job.entries),
            files=files,
            links=links_with(job.links, link),
        )


def _anchor_bytes(
    links: tuple[Link, ...], snapshot: Snapshot, kinds: Mapping[str, TensorKind] | None, given_bytes: int
) -> int:
    """Return the size of an anchor of this version in bytes. Without a checkpoint, this is a lower bound."""
    if kinds is not None:
        return sum(kind.size for kind in kinds.values())
    own = sum(tensor.kind.size for tensor in snapshot.tensors.values())
    # With several ranks, each rank knows only its own tensors. Earlier links have the size of all tensors.
    return max(given_bytes, own, *(link.anchor_bytes or 0 for link in links))
