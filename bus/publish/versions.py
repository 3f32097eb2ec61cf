"""The chain of a model's published versions, with the lease of its publisher. Lives on the bus thread."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from typing import Final

from msgspec.structs import replace

from ...schemas.errors import ControlCode, ControlError, LocalProtocolError, PermissionDenied, RollbusError
from ...schemas.manifest import ChainRecord, Holder, Link, OpenedVersion
from ..logs import warning_of
from ..nats.connection import connected
from ..nats.jetstream import ApiError, Retries, Unanswered, storage_errors
from ..nats.server import Server
from ..objects.catalog import ensure_bucket
from ..objects.uploads import begin_cleaning
from ..protocol.weights import chain
from ..subjects import Subjects, encode_token
from .chain_store import ChainKey, StoredChain, has_been_silent
from .publication import Publication

logger = logging.getLogger(__name__)


RENEW_S: Final = chain.LEASE_S / 3
"""Seconds between renewals of the lease; two renewals may be lost."""
POLL_S: Final = 0.25
"""Seconds between checks for an announcement, a commit, or the end of an earlier incarnation's lease."""
CLOSE_S: Final = 20.0
"""Seconds for removing uncommitted publications and releasing the lease."""


class VersionChain:
    """The chain of one model's published versions: holds its lease, begins publications, and records what they commit.

    Args:
        server: the bus; the store opens its own connection.
        subjects: subjects of the fleet.
        model: model whose weights are published.
        publisher: name of the client that publishes.

    Attributes:
        record: chain record as last read or written.
        make_room: function that cleans the bucket; called if an object finds no room. Set it before `open`.
    """

    def __init__(self, server: str | Server, subjects: Subjects, model: str, *, publisher: str) -> None:
        self._server = server
        self._fleet = subjects.fleet
        self._model = model
        self._publisher = publisher
        self._holder: Final = Holder(publisher=publisher, incarnation=uuid.uuid4().hex)
        self.record = ChainRecord(model=model)
        self.make_room: Callable[[], Awaitable[None]] = _make_no_room
        self._stack = AsyncExitStack()
        self._key: ChainKey | None = None
        self._stored: StoredChain | None = None
        """Stored chain record; None: unknown."""
        self._epoch: int | None = None
        """Epoch of this store's lease; None: it has no lease."""
        self._lost: ControlError | None = None
        self._lock = asyncio.Lock()
        self.publications: set[Publication] = set()
        """Publications that are neither committed nor discarded."""
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, *, with_lease: bool = True) -> None:
        """Connect, create the bucket if that is allowed, and acquire the lease, which is renewed until `close`.

        If a process of the same name holds the lease, it may be a killed earlier incarnation of this process. `open`
        then waits until that lease expires, and fails if it is renewed.

        Args:
            with_lease: False for ranks other than 0, which only `join`.

        Cancellation: leaves nothing open.

        Raises:
            ControlError: `publisher_busy`: another publisher holds the lease; the message names it. `storage`: the
                bucket does not exist or is full.
            BusBroken: the connection or JetStream failed.
        """
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(connected(self._server, name=f"rollbus versions {self._publisher}"))
            key = ChainKey(nats, self._fleet, self._model)
            self._key = key
            await _make_bucket(key)
            if with_lease:
                await self._take_lease(key)
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                self._renewing = tasks.create_task(self._renew(), name="versions.renew")
            else:
                self.record = (await key.read()).record
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Discard publications that are not committed, release the lease, and disconnect. Safe to repeat."""
        try:
            if self._renewing is not None:
                self._renewing.cancel()
                await asyncio.wait([self._renewing])
                self._renewing = None
            async with asyncio.timeout(CLOSE_S):
                for publication in tuple(self.publications):
                    await publication.discard()
                if self._epoch is not None and self._lost is None:
                    await self.change(lambda record: replace(record, holder=None, opened=None))
        except (RollbusError, TimeoutError) as error:
            logger.warning("versions.lease_release_failed model=%s error=%s", self._model, error)
        finally:
            self._epoch = self._key = None
            await self._stack.aclose()

    @property
    def epoch(self) -> int:
        """Epoch of the lease, as manifests carry it.

        Raises:
            ControlError: `publisher_busy`: another publisher took over.
            LocalProtocolError: the store has no lease.
        """
        if self._lost is not None:
            raise self._lost
        if self._epoch is None:
            raise LocalProtocolError(f"the publisher of {self._model} has no lease: open it first")
        return self._epoch

    async def used_and_limit(self) -> tuple[int, int]:
        """Return the used bytes and the maximum bytes of the bucket.

        Raises:
            ControlError: `storage`: the bucket does not exist.
            BusBroken: JetStream does not answer.
        """
        state = await self._opened().bucket_state()
        return state.used, state.limit

    def begin(
        self, version: int, adapter: str | None = None, *, has_delta: bool = False, has_anchor: bool = True
    ) -> Publication:
        """Begin a publication, under a folder of its own.

        Args:
            version: version of the weights or of the adapter.
            adapter: name of the LoRA adapter; None: weights of the model.
            has_delta: True if it will contain a tensor delta; for ranks that join.
            has_anchor: True if it will contain the whole checkpoint.

        Raises:
            ControlError: `publisher_busy`: another publisher took over.
        """
        key, epoch = self._opened(), self.epoch
        place = "versions" if adapter is None else f"adapters/{encode_token(adapter)}"
        objects = f"{key.bucket}/{place}/{version}-{epoch}-{uuid.uuid4().hex[:8]}"
        opened = OpenedVersion(
            objects=objects, version=version, epoch=epoch, adapter=adapter, has_delta=has_delta, has_anchor=has_anchor
        )
        return self._publication(key, opened)

    async def join(self, version: int, timeout_s: float) -> Publication:
        """Join the version of the weights that rank 0 has announced. This requires no lease.

        Raises:
            ControlError: `timeout`: rank 0 did not announce this version.
            BusBroken: JetStream or the connection failed.
        """
        key, ends_at = self._opened(), time.monotonic() + timeout_s
        while True:
            self.record = record = (await key.read()).record
            opened = record.opened
            wanted = version, None, record.epoch
            if opened and record.holder and (opened.version, opened.adapter, opened.epoch) == wanted:
                return self._publication(key, opened)
            if time.monotonic() >= ends_at:
                problem = f"rank 0 did not begin to publish version {version} within {timeout_s:g} s"
                raise ControlError(ControlCode.TIMEOUT, problem)
            await asyncio.sleep(POLL_S)

    def _publication(self, key: ChainKey, opened: OpenedVersion) -> Publication:
        publication = Publication(self, key, opened)
        self.publications.add(publication)
        return publication

    async def until_committed(self, objects: str, timeout_s: float) -> Link:
        """Wait until rank 0 has committed a publication that this rank joined. Return its link.

        Raises:
            ControlError: `not_found`: rank 0 discarded it, or another publisher took over; `timeout`: neither happened
                in time, or rank 0 fell silent.
            BusBroken: JetStream or the connection failed.
        """
        key, ends_at, silence = self._opened(), time.monotonic() + timeout_s, chain.Silence()
        failed = f"rank 0 did not commit {objects}"
        while True:
            stored = await key.read()
            self.record = record = stored.record
            for link in record.links:
                if link.objects == objects:
                    return link
            if record.opened is None or record.opened.objects != objects:
                withdrawn, reason = record.withdrawn, "it failed, or another publisher took over"
                if withdrawn is not None and withdrawn.objects == objects:
                    reason = withdrawn.reason
                raise ControlError(ControlCode.NOT_FOUND, f"{failed}: {reason}")
            if silence.record(stored.sequence, time.monotonic()) >= chain.SILENT_S:
                raise ControlError(ControlCode.TIMEOUT, f"{failed}: rank 0 {has_been_silent()}")
            if time.monotonic() >= ends_at:
                raise ControlError(ControlCode.TIMEOUT, f"{failed} within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Renew the lease and update `record`, because the answer to a commit may have been lost.

        If the server has lost its storage, create the bucket again if that is allowed, and acquire the lease again.

        Raises:
            ControlError: `publisher_busy`: another publisher took over; `storage`.
            BusBroken: JetStream or the connection failed.
        """
        key, epoch = self._opened(), self.epoch
        await _make_bucket(key)
        await self.change(lambda record: chain.lease_kept(record, self._holder, epoch, self._age_s), is_leasing=True)
        if self.record.epoch > epoch:
            logger.warning("versions.lease_lost model=%s epoch=%s now=%s", self._model, epoch, self.record.epoch)
            self._epoch = self.record.epoch

    async def note_recorded(self, objects: str) -> None:
        """Note that a folder was recorded in the desired state. This folder and the previous one are then kept.

        Raises:
            ControlError: `publisher_busy`: another publisher took over.
            BusBroken: JetStream or the connection failed.
        """
        await self.change(lambda record: replace(record, noted=chain.noted(record.noted, objects)))

    async def clean(self, recorded: AbstractSet[str], *, young_s: float = chain.YOUNG_S) -> None:
        """Delete versions that no worker needs, and leftovers of killed uploads. Log failures.

        Args:
            recorded: folders of the object store that the desired state names; those with published versions are noted.
            young_s: age in seconds below which folders and object parts always stay.
        """
        with warning_of((RollbusError, ApiError), logger, "versions.cleanup_failed model=%s error=%s", self._model):
            key = self._opened()
            for objects in sorted(recorded):
                if chain.is_published(objects, key.bucket):
                    await self.note_recorded(objects)
            tags = {publication.tag for publication in self.publications}
            cleaning = await begin_cleaning(key.nats, key.bucket, open_tags=tags, young_s=young_s)
            kept = await cleaning.kept(self.record, recorded)
            await self.change(lambda record: chain.trimmed(record, recorded, kept))
            await cleaning.delete_folders(kept)
            await cleaning.delete_parts()

    def _opened(self) -> ChainKey:
        if self._key is None:
            raise LocalProtocolError(f"the versions of {self._model} are not open")
        return self._key

    async def _take_lease(self, key: ChainKey) -> None:
        """Acquire the lease. If an earlier incarnation of this process holds it, wait until it expires."""
        first: int | None = None
        while True:
            stored = await key.read()
            try:
                chain.lease_taken(stored.record, self._holder, stored.age_s)
                break
            except ControlError:
                holder = stored.record.holder
                first = stored.sequence if first is None else first
                if holder is None or holder.publisher != self._publisher or stored.sequence != first:
                    raise
            await asyncio.sleep(POLL_S)
        self._stored = stored
        try:
            await self.change(self._version_taken, is_leasing=True)
        except ControlError as error:
            # A killed upload may have filled the bucket. Its leftovers can be deleted under any holder of the lease.
            if error.code is not ControlCode.STORAGE or not await self._delete_leftovers(key, chain.PRESSED_S):
                raise
            await self.change(self._version_taken, is_leasing=True)
        self._epoch = self.record.epoch
        logger.info("versions.lease_acquired model=%s publisher=%s epoch=%s", self._model, self._publisher, self._epoch)
        with warning_of(RollbusError, logger, "versions.cleanup_failed model=%s error=%s", self._model):
            # No other publisher can commit any more, and this publisher has stored nothing yet.
            await self._delete_leftovers(key, 0.0)

    async def _delete_leftovers(self, key: ChainKey, young_s: float) -> int:
        """Delete leftovers of killed publications. Return the number of their objects.

        Raises:
            ControlError: `storage`: JetStream refuses.
            BusBroken: JetStream or the connection failed.
        """
        with storage_errors(f"the bucket {key.bucket!r} cannot be cleaned"):
            cleaning = await begin_cleaning(key.nats, key.bucket)
            return await cleaning.delete_parts(tagged_young_s=young_s)

    def _version_taken(self, record: ChainRecord) -> ChainRecord:
        if record.holder == self._holder:  # an unanswered write was stored
            return record
        return chain.lease_taken(record, self._holder, self._age_s)

    @property
    def _age_s(self) -> float:
        return self._stored.age_s if self._stored is not None else 0.0

    async def _renew(self) -> None:
        """Renew the lease until it is lost."""
        while self._lost is None:
            await asyncio.sleep(RENEW_S)
            with warning_of(RollbusError, logger, "versions.lease_renewal_failed model=%s error=%s", self._model):
                await self.refresh()

    async def change(self, change: Callable[[ChainRecord], ChainRecord], *, is_leasing: bool = False) -> None:
        """Write the chain record that `change` returns. Call `change` again if another program wrote first.

        `change` must return its argument if its change was already made.

        Raises:
            ControlError: `publisher_busy`: another publisher holds the lease now; `storage`; errors of `change`.
            LocalProtocolError: this store has no lease and is not acquiring one.
            Unanswered: the record may or may not have been written.
        """
        key, retries = self._opened(), Retries()
        async with self._lock:
            while True:
                try:
                    before = self._stored or await key.read()
                    self._stored, self.record = before, before.record
                    if not is_leasing:
                        chain.check_lease(before.record, self._holder, self.epoch)
                    after = change(before.record)
                    self._stored = None
                    sequence = await key.write(after, before.sequence)
                    if sequence is not None:
                        self._stored, self.record = StoredChain(after, sequence, 0.0), after
                        return
                    await retries.note_refusal(before.sequence)
                except Unanswered as error:
                    await retries.wait(error)
                except ControlError as error:
                    if error.code is ControlCode.PUBLISHER_BUSY and self._epoch is not None:
                        self._lost = error
                    raise


async def _make_no_room() -> None:
    """Free nothing. Used by stores whose user does not know the recorded folders, so that none may be deleted."""


async def _make_bucket(key: ChainKey) -> None:
    try:
        await key.bucket_state()
    except ControlError:
        with contextlib.suppress(PermissionDenied):  # then the next line raises the error
            await ensure_bucket(key.nats, key.bucket)
        await key.bucket_state()
