"""The publication of one version: first its objects, then its manifest, then the chain record.

A version is valid only after the chain record names it. An adapter is valid after its manifest is stored.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from ...schemas.errors import ControlCode, ControlError, LocalProtocolError, RollbusError, bad_source, storage_failure
from ...schemas.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_REASON_CHARS,
    ChainRecord,
    Manifest,
    OpenedVersion,
    RankList,
    TensorEntry,
    WithdrawnVersion,
    decode_rank_list,
)
from ..logs import warning_of
from ..nats.jetstream import ApiError, put, storage_errors
from ..nats.library import NUID
from ..objects.catalog import delete_prefix, describe_object, find_object
from ..objects.layout import MAX_FILES, ObjectInfo, check_path, split_objects
from ..objects.reader import open_reader
from ..objects.uploads import new_part_id, part_tag
from ..objects.writer import Pieces, Sender, delete_stored, each_piece, open_sender, put_pieces, store_folder
from ..protocol.weights import chain
from .chain_store import REASON, ChainKey, as_info, as_rank_object, find_failure, sign_name, silence_of

if TYPE_CHECKING:
    from .versions import VersionChain

logger = logging.getLogger(__name__)

RANK_POLL_S: Final = 0.25
"""Seconds between checks for the lists of the other ranks."""
LIST: Final = "list"
"""Name of the object with the list of a rank."""
FAIL_S: Final = 10.0
"""Seconds for reporting a failure to rank 0. If the server is away, rank 0 waits until its own timeout."""


class Publication:
    """A publication in progress, from `VersionChain.begin` or `join`. Make only one call at a time.

    A call that fails or is cancelled discards the whole publication, as `discard` does.

    Attributes:
        opened: the publication as other ranks see it.
        objects: folder of the publication, `<bucket>/<prefix>`.
        version: version that is published.
        epoch: epoch of the lease.
        tag: tag in the ids of the folder's object parts.
    """

    def __init__(self, versions: "VersionChain", key: ChainKey, opened: OpenedVersion) -> None:
        self._versions = versions
        self._key = key
        self.opened: Final = opened
        self.objects: Final = opened.objects
        self.version: Final = opened.version
        self.epoch: Final = opened.epoch
        self._bucket, self._prefix = split_objects(opened.objects)
        self.tag: Final = self._prefix[-8:]
        self._nuids = NUID()
        self._infos: list[ObjectInfo] = []
        self._stack = contextlib.AsyncExitStack()
        self._sender: Sender | None = None
        self._has_ranks = False
        self._is_over = False
        # Reason for the ranks that wait for the commit; empty until it is known.
        self._reason = ""

    async def put(self, name: str, pieces: Pieces) -> ObjectInfo:
        """Store an object of the folder. Return its description, which `commit` stores.

        Args:
            name: name of the object; in a folder of safetensors, the name of the file.
            pieces: content, split at any byte. At most one piece and a window of 4 MiB are in memory at a time.

        Cancellation: discards the publication.

        Raises:
            ControlError: `bad_source`: the name is not valid, or the folder has too many objects; `storage`: the bucket
                has no room, and the publication is discarded.
            LocalProtocolError: the publication has ended.
            BusBroken: JetStream or the connection failed. The publication is discarded if the server returns soon, and
                otherwise by a later `clean`.
        """
        check_path(name, f"a file of objects:{self.objects}")
        self._check_open()
        if len(self._infos) >= MAX_FILES - 1:
            raise bad_source(f"{self.objects} has {MAX_FILES} objects with its manifest; no more are allowed")
        async with self._or_discarded():
            return await self._put(f"{self._prefix}/{name}", pieces)

    async def commit(self, manifest: Manifest) -> None:
        """Store all descriptions, with the manifest's last, and add the version to the chain record.

        Cancellation: discards the publication, unless the chain record may already name it.

        Raises:
            LocalProtocolError: the links of the manifest differ from those of `chain.links_with`, this store has no
                lease, or the publication has ended.
            ControlError: `publisher_busy`: another publisher took over; `storage`. The publication is discarded.
            BusBroken: JetStream or the connection failed. The chain record may name the version if its write had begun.
                Otherwise the publication is discarded, at once or by a later `clean`.
        """
        self._check_open()
        async with self._or_discarded():
            data = msgspec.json.encode(manifest)
            if len(data) > MAX_MANIFEST_BYTES:
                raise LocalProtocolError(f"a manifest of {len(data)} bytes; allowed: {MAX_MANIFEST_BYTES}")
            # Before the first description is stored, check that the lease holds and the manifest continues the chain.
            await self._versions.change(lambda record: _check(record, manifest))
            await self._put(f"{self._prefix}/{MANIFEST}", [data])
            await store_folder(self._key.nats, await self._open_sender(), self.objects, self._infos)
        try:
            await self._versions.change(lambda record: chain.committed(record, manifest))
        except ControlError:
            if not any(link.objects == self.objects for link in self._versions.record.links):
                await self.discard()
                raise
            # The answer to a write was lost, and another publisher took over afterwards. The version is committed.
        finally:
            # The folder stays if it is unknown whether the record names it. If it does not, `clean` deletes the folder.
            await self._end()
        size = sum(info.size for info in self._infos)
        logger.info("publication.committed objects=%s files=%s bytes=%s", self.objects, len(self._infos), size)
        if self._has_ranks:
            await self._delete_lists()

    async def discard(self) -> None:
        """Remove the stored objects unless the publication is over. Log failures; `clean` deletes the rest later."""
        if self._is_over:
            return
        await self._end()
        if self._infos:
            await delete_stored(self._key.nats, self._bucket, tuple(self._infos))
        if self._has_ranks:
            await self._delete_lists()
            with warning_of(RollbusError, logger, "publication.withdrawal_failed objects=%s error=%s", self.objects):
                await self._versions.change(lambda record: _withdrawn(record, self.objects, self._reason))

    async def announce(self) -> None:
        """Allow other ranks to join.

        Raises:
            ControlError: `publisher_busy`: another publisher took over.
            BusBroken: JetStream or the connection failed.
        """
        self._check_open()
        self._has_ranks = True
        await self._versions.change(lambda record: msgspec.structs.replace(record, opened=self.opened, withdrawn=None))

    @contextlib.asynccontextmanager
    async def alive(self, rank: int) -> AsyncIterator[None]:
        """Send signs of life to rank 0 during the block. Without them, rank 0 treats this rank as lost."""
        info = ObjectInfo(name=sign_name(self._list_prefix, rank), bucket=self._bucket, nuid="alive")

        async def give() -> None:
            try:
                await put(self._key.nats, *describe_object(self._key.nats, info))
            except (RollbusError, ApiError) as error:
                prefix = self._list_prefix
                logger.warning("publication.sign_publish_failed prefix=%s rank=%s error=%s", prefix, rank, error)

        async def go_on() -> None:
            while True:
                await asyncio.sleep(chain.SIGN_S)
                await give()

        await give()
        giving = asyncio.get_running_loop().create_task(go_on(), name="publication.signs")
        try:
            yield
        finally:
            giving.cancel()
            await asyncio.wait([giving])

    async def give(self, rank: int, tensors: Sequence[TensorEntry]) -> None:
        """Store the list of this rank's objects and tensors for rank 0, which owns the objects from then on.

        Args:
            rank: number of this process; not 0.
            tensors: entries for the manifest.

        Raises:
            ControlError: `storage`: the bucket has no room.
            BusBroken: JetStream or the connection failed.
        """
        self._check_open()
        given = RankList(
            version=self.version,
            epoch=self.epoch,
            rank=rank,
            objects=tuple(as_rank_object(info) for info in self._infos),
            tensors=tuple(tensors),
        )
        folder = f"{self._list_prefix}/{rank}"
        async with self._or_discarded():
            info = await self._put(f"{folder}/{LIST}", [msgspec.json.encode(given)])
            await store_folder(self._key.nats, await self._open_sender(), f"{self._bucket}/{folder}", [info])
        await self._end()

    async def fail(self, rank: int, reason: str) -> None:
        """Delete the objects of this rank and report the reason to rank 0. Log failures.

        Args:
            rank: number of this process; not 0.
            reason: reason for rank 0 and the ranks that wait for it.
        """
        await self.discard()
        name, metadata = f"{self._list_prefix}/failed/{rank}", {REASON: reason[:MAX_REASON_CHARS]}
        info = ObjectInfo(name=name, bucket=self._bucket, nuid="failed", metadata=metadata)
        try:
            async with asyncio.timeout(FAIL_S):
                await put(self._key.nats, *describe_object(self._key.nats, info))
        except (RollbusError, ApiError, TimeoutError) as error:
            logger.warning("publication.failure_publish_failed objects=%s rank=%s error=%s", self.objects, rank, error)

    async def collect(self, num_ranks: int, timeout_s: float) -> tuple[RankList, ...]:
        """Wait for the lists of ranks 1 to `num_ranks` - 1, and add their objects to this publication.

        Returns:
            The lists, by rank.

        Cancellation: discards the publication.

        Raises:
            ControlError: `timeout`: ranks, which the message names, stored no list or fell silent; `bad_source`: a rank
                failed, or a list is damaged or of another version. The publication and all its objects are discarded.
            BusBroken: JetStream or the connection failed.
        """
        self._check_open()
        self._has_ranks = True
        found: dict[int, RankList] = {}
        silences: dict[int, chain.Silence] = {}
        async with self._or_discarded():
            try:
                async with asyncio.timeout(timeout_s):
                    while missing := [rank for rank in range(1, num_ranks) if rank not in found]:
                        for rank in missing:
                            await self._collect_from(rank, found, silences)
                        if len(found) < num_ranks - 1:
                            await asyncio.sleep(RANK_POLL_S)
            except TimeoutError:
                missing = [rank for rank in range(1, num_ranks) if rank not in found]
                shown = ", ".join(f"{rank}{'' if rank in silences else ' (did not join)'}" for rank in missing)
                reason = f"of {num_ranks} ranks, these stored no list within {timeout_s:g} s: {shown}"
                raise self._withdraw(ControlCode.TIMEOUT, reason) from None
        return tuple(given for _, given in sorted(found.items()))

    async def _collect_from(self, rank: int, found: dict[int, RankList], silences: dict[int, chain.Silence]) -> None:
        folder = f"{self._list_prefix}/{rank}"
        with storage_errors(f"the list of rank {rank} cannot be read"):
            failure = await find_failure(self._key.nats, self._bucket, f"{self._list_prefix}/failed/{rank}")
            if failure is not None:
                raise self._withdraw(ControlCode.BAD_SOURCE, f"rank {rank} failed: {failure}")
            if await find_object(self._key.nats, self._bucket, f"{folder}/{LIST}", is_signed=True) is None:
                if silence := await silence_of(self._key.nats, self._bucket, self._list_prefix, rank, silences):
                    raise self._withdraw(ControlCode.TIMEOUT, silence)
                return
        async with open_reader(self._key.nats, f"{self._bucket}/{folder}") as reader:
            data = await reader.read(LIST, MAX_MANIFEST_BYTES)
        try:
            given = decode_rank_list(data)
        except RollbusError as error:
            raise _bad_list(rank, str(error)) from error
        names = {info.name for info in self._infos}
        for given_object in given.objects:
            check_path(given_object.name, f"an object of rank {rank}")
            is_own = part_tag(given_object.nuid) == self.tag and given_object.name.startswith(f"{self._prefix}/")
            if not is_own or given_object.name in names:
                raise _bad_list(rank, f"object {given_object.name[:200]!r} belongs to another publication or rank")
        if (given.version, given.epoch, given.rank) != (self.version, self.epoch, rank):
            raise _bad_list(rank, f"it is of version {given.version}, epoch {given.epoch}, rank {given.rank}")
        self._infos += [as_info(self._bucket, given_object) for given_object in given.objects]
        if len(self._infos) >= MAX_FILES:
            raise _bad_list(
                rank, f"its {len(given.objects)} objects raise the total to more than {MAX_FILES} with the manifest"
            )
        found[rank] = given

    def _withdraw(self, code: ControlCode, reason: str) -> ControlError:
        """Store the reason for the other ranks, and return the error for this one."""
        self._reason = reason[:MAX_REASON_CHARS]
        return ControlError(code, f"version {self.version} is not published: {self._reason}")

    @property
    def _list_prefix(self) -> str:
        """Prefix of the ranks' lists. It is outside the folder, so that the lists are no files of the folder."""
        return f"ranks/{self._prefix.rpartition('/')[2]}"

    async def _put(self, full_name: str, pieces: Pieces) -> ObjectInfo:
        sender = await self._open_sender()
        info = ObjectInfo(name=full_name, bucket=self._bucket, nuid=new_part_id(self.tag, self._nuids))
        index = len(self._infos)
        self._infos.append(info)
        info = await put_pieces(sender, info, self._within_room(pieces))
        self._infos[index] = info
        return info

    async def _within_room(self, pieces: Pieces) -> AsyncGenerator[bytes | bytearray | memoryview, None]:
        """Yield the pieces. Fail before the bucket is full if cleaning does not help: the chain record needs room."""
        num_bytes, room = 0, await self._room()
        async with contextlib.aclosing(each_piece(pieces)) as given:
            async for piece in given:
                num_bytes += memoryview(piece).nbytes
                if num_bytes > room:
                    room += await self._free_room()
                if num_bytes > room:
                    state = await self._key.bucket_state()
                    raise storage_failure(
                        f"the bucket {self._bucket!r} has no room: {state.used} of {state.limit} bytes are used, and "
                        f"an object needs at least {num_bytes + chain.SPARE_BYTES}"
                    )
                yield piece

    async def _room(self) -> int:
        state = await self._key.bucket_state()
        return state.limit - state.used - chain.SPARE_BYTES

    async def _free_room(self) -> int:
        """Clean the bucket. Return the number of freed bytes."""
        await (await self._open_sender()).finish()  # bytes in flight would count as used after the cleaning
        before = await self._room()
        await self._versions.make_room()
        return await self._room() - before

    async def _open_sender(self) -> Sender:
        if self._sender is None:
            self._sender = await self._stack.enter_async_context(open_sender(self._key.nats))
        return self._sender

    @contextlib.asynccontextmanager
    async def _or_discarded(self) -> AsyncIterator[None]:
        """Discard the publication if the block fails or is cancelled."""
        try:
            yield
        except BaseException:
            await self.discard()
            raise

    async def _end(self) -> None:
        self._is_over = True
        self._versions.publications.discard(self)
        await self._stack.aclose()

    async def _delete_lists(self) -> None:
        """Delete the lists of ranks. Log failures; a later `clean` deletes the rest."""
        with warning_of(RollbusError, logger, "publication.lists_delete_failed objects=%s error=%s", self.objects):
            await delete_prefix(self._key.nats, f"{self._bucket}/{self._list_prefix}")

    def _check_open(self) -> None:
        if self._is_over:
            raise LocalProtocolError(f"the publication {self.objects} is over")


def _check(record: ChainRecord, manifest: Manifest) -> ChainRecord:
    """Return the record unchanged if the manifest continues its chain."""
    chain.committed(record, manifest)
    return record


def _withdrawn(record: ChainRecord, objects: str, reason: str) -> ChainRecord:
    """Return the record without this publication, so that no further rank joins it."""
    if record.opened is None or record.opened.objects != objects:
        return record
    withdrawn = WithdrawnVersion(objects=objects, reason=reason) if reason else None
    return msgspec.structs.replace(record, opened=None, withdrawn=withdrawn)


def _bad_list(rank: int, problem: str) -> ControlError:
    return bad_source(f"the list of rank {rank} is rejected: {problem}")
