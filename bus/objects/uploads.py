"""The uploads of controllers and publishers: they are stored under their own prefixes, and old ones are deleted.

The ids of a publication's object parts contain the tag of its folder, which shows the leftovers of killed publishers.
"""

import logging
import re
import uuid
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from ...schemas.control import DesiredState, LoadLora, UpdateWeights
from ...schemas.errors import ControlCode, ControlError, RemoteProtocolError, RollbusError
from ...schemas.manifest import MANIFEST, MAX_MANIFEST_BYTES, ChainRecord, decode_manifest
from ..auth.credentials import Role
from ..logs import warning_of
from ..nats.connection import Connection, connected
from ..nats.jetstream import NO_MESSAGE, ApiError, ask, find
from ..nats.library import NUID
from ..nats.server import Server
from ..protocol.weights.chain import YOUNG_S, folder_of, is_weights, kept, needed_bytes
from ..subjects import Subjects, encode_token, published_bucket, upload_bucket
from .catalog import FoundObject, bucket_state, delete_prefix, find_object, list_objects, list_subjects
from .layout import info_subjects, name_of, parts_subject, stream_of
from .reader import open_reader
from .writer import put_folder

logger = logging.getLogger(__name__)

TAG: Final = "rb"
"""Prefix of the ids of a publication's object parts. The tag of the folder follows."""
TAGGED_CHARS: Final = 32
"""Characters of an id with a tag. The ids of other programs have 22."""
OWN_UPLOAD: Final = re.compile(r"(weights|loras/[^/]+)/\d+-[0-9a-f]{8}(?=/)")
"""Folder of an upload by this library, below the model. Other uploads are never deleted."""
ABANDONED_S: Final = 24 * 3600.0
"""Age in seconds above which an upload that is not recorded belongs to a dead controller. Checks take minutes."""


def new_part_id(tag: str, nuids: NUID) -> str:
    """Return an id for object parts of the folder with this tag."""
    return f"{TAG}{tag}{nuids.next().decode()[: TAGGED_CHARS - len(TAG) - 8]}"


def part_tag(nuid: str) -> str | None:
    """Return the tag of the folder that an id belongs to; None: the id is not of a publication."""
    return nuid[len(TAG) : len(TAG) + 8] if len(nuid) == TAGGED_CHARS and nuid.startswith(TAG) else None


@dataclass(slots=True)
class Cleaning:
    """One cleaning of the bucket: list it, decide, delete. Methods raise `ApiError`, `ControlError` and `BusBroken`."""

    nats: Connection
    """Connection of a user that may delete in the bucket."""
    bucket: str
    now: datetime
    """Time of the server's clock."""
    open_tags: AbstractSet[str] = frozenset()
    """Tags of this process's publications in progress. No object names their object parts yet."""
    young_s: float = YOUNG_S
    """Age in seconds below which folders and object parts always stay."""
    _ages: dict[str, float] = field(default_factory=dict)
    """Age in seconds, by folder."""
    _tags: set[str] = field(default_factory=set)
    """Tags of the folders that exist or will exist."""
    _others: list[str] = field(default_factory=list)
    """Names of objects that belong to no published version."""

    async def list_folders(self) -> None:
        """Find the folders and their ages."""
        self._tags |= self.open_tags
        one_of: dict[str, str] = {}
        for subject in await list_subjects(self.nats, self.bucket, info_subjects(self.bucket)):
            if (name := name_of(subject)) is None:
                continue
            if (found := folder_of(name)) is None:
                self._others.append(name)
            else:
                folder, tag = found
                self._tags.add(tag)
                if tag not in self.open_tags:  # the lists of its ranks would show a wrong age
                    one_of[folder] = name
        for folder, name in one_of.items():
            described = await self._find(name)
            if described is not None:
                self._ages[f"{self.bucket}/{folder}"] = (self.now - described.stored_at).total_seconds()

    async def kept(self, record: ChainRecord, recorded: AbstractSet[str]) -> set[str]:
        """Return the folders to keep."""
        roots = recorded | set(record.noted)
        # Folders of a chain that the record has lost.
        unlinked = roots & self._ages.keys() - {link.objects for link in record.links}
        needed = {other for objects in unlinked if is_weights(objects) for other in await self._directories_of(objects)}
        return kept(record.links, roots | needed, self._ages, young_s=self.young_s)

    async def _directories_of(self, objects: str) -> set[str]:
        """Return the folders that a version's manifest names. Return none if no worker can load the version."""
        try:
            async with open_reader(self.nats, objects) as reader:
                manifest = decode_manifest(await reader.read(MANIFEST, MAX_MANIFEST_BYTES))
        except (ControlError, RemoteProtocolError) as error:
            if isinstance(error, ControlError) and error.code is not ControlCode.BAD_SOURCE:
                raise
            logger.warning("versions.read_failed objects=%s error=%s", objects, error)
            return set()
        return {link.objects for link in manifest.links}

    async def delete_folders(self, kept_folders: AbstractSet[str]) -> None:
        """Delete all folders that are not kept."""
        for objects in sorted(self._ages.keys() - kept_folders):
            if await delete_prefix(self.nats, objects):
                logger.info("versions.deleted objects=%s", objects)

    async def delete_parts(self, *, tagged_young_s: float | None = None) -> int:
        """Delete object parts that no object names, left by killed uploads. Return the number of their objects.

        Args:
            tagged_young_s: age in seconds below which object parts of publications stay; None: as those of other
                uploads.
        """
        tagged_young_s = self.young_s if tagged_young_s is None else tagged_young_s
        prefix = parts_subject(self.bucket, "")
        nuids = {subject.removeprefix(prefix) for subject in await list_subjects(self.nats, self.bucket, f"{prefix}>")}
        unnamed = {nuid for nuid in nuids if part_tag(nuid) not in self._tags}
        if any(part_tag(nuid) is None for nuid in unnamed):
            unnamed -= await self._parts_of_others(unnamed)
        deleted = 0
        for nuid in sorted(unnamed):
            young_s = self.young_s if part_tag(nuid) is None else tagged_young_s
            if await self._is_old(subject := f"{prefix}{nuid}", young_s):
                await ask(self.nats, f"STREAM.PURGE.{stream_of(self.bucket)}", {"filter": subject})
                deleted += 1
        if deleted:
            logger.info("versions.leftovers_deleted bucket=%s objects=%s", self.bucket, deleted)
        return deleted

    async def _parts_of_others(self, nuids: AbstractSet[str]) -> set[str]:
        """Return which of these ids of object parts objects of other uploads name, also in an invalid description."""
        named = set[str]()
        for name in self._others:
            if (found := await self._find(name)) is not None:
                own = found.info.nuid.encode() if found.info is not None else found.invalid
                named |= {nuid for nuid in nuids if nuid.encode() in own}
        return named

    async def _find(self, name: str) -> FoundObject | None:
        return await find_object(self.nats, self.bucket, name, is_signed=False, is_lenient=True)

    async def _is_old(self, subject: str, young_s: float) -> bool:
        """Return True if the last object part is older than `young_s`. An upload in progress has a younger one."""
        operation = f"STREAM.MSG.GET.{stream_of(self.bucket)}"
        answer = await find(self.nats, operation, {"last_by_subj": subject}, absent={NO_MESSAGE})
        if answer is None:
            return False
        age_s = (self.now - datetime.fromisoformat(answer["message"]["time"])).total_seconds()
        return age_s >= young_s


async def begin_cleaning(
    nats: Connection, bucket: str, *, open_tags: AbstractSet[str] = frozenset(), young_s: float = YOUNG_S
) -> Cleaning:
    """Return a cleaning that has listed the bucket. Raises the errors of its methods."""
    cleaning = Cleaning(nats, bucket, (await bucket_state(nats, bucket)).now, open_tags, young_s)
    await cleaning.list_folders()
    return cleaning


class Uploads:
    """The uploads for a fleet's models: folders in the fleet's bucket, or, for a publisher, in the model's bucket.

    Each upload has its own prefix, so the files that workers read never change.

    Args:
        server: server of the uploads. They use their own connections, so that they do not delay other messages.
    """

    def __init__(self, server: str | Server, subjects: Subjects) -> None:
        self._server = server
        self._fleet = subjects.fleet
        credentials = server.credentials if isinstance(server, Server) else None
        self._is_publisher = credentials is not None and credentials.role is Role.PUBLISHER

    def _bucket(self, model: str) -> str:
        return published_bucket(self._fleet, model) if self._is_publisher else upload_bucket(self._fleet)

    async def put(self, model: str, command: UpdateWeights | LoadLora, folder: Path) -> str:
        """Store `folder` for `command`. Return its source, `<bucket>/<prefix>`.

        Cancellation: nothing stays stored.

        Raises:
            ControlError: the folder or the bucket is unsuitable.
            BusBroken: JetStream or the connection failed.
        """
        prefix = f"{_home(model, command)}/{command.version}-{uuid.uuid4().hex[:8]}"
        async with self._connect() as nats:
            # A publisher's bucket also has the chain record, for which room must remain.
            needed = needed_bytes if self._is_publisher else None
            return await put_folder(nats, self._bucket(model), prefix, folder, needed_bytes=needed)

    async def delete(self, objects: str) -> None:
        """Delete one upload. Log failures."""
        with warning_of(RollbusError, logger, "upload.delete_failed objects=%s error=%s", objects):
            async with self._connect() as nats:
                await delete_prefix(nats, objects)

    async def sweep(self, model: str, keep: AbstractSet[str]) -> None:
        """Delete what killed controllers left in the bucket: old uploads of the model, and unnamed object parts.

        An upload is old if nobody has recorded it for `ABANDONED_S`. Failures are logged.

        Args:
            keep: recorded uploads of the model.
        """
        bucket = self._bucket(model)
        try:
            async with self._connect() as nats:
                stored = await _list_own(nats, bucket, model, encode_token(model))
                now = (await bucket_state(nats, bucket)).now
                for folder, at in sorted(stored.items()):
                    if folder not in keep and (now - at).total_seconds() > ABANDONED_S:
                        logger.info("upload.abandoned_deleted objects=%s", folder)
                        await delete_prefix(nats, folder)
                if not self._is_publisher:  # `WeightPublisher` cleans the bucket of a publisher
                    await (await begin_cleaning(nats, bucket)).delete_parts()
        except (RollbusError, ApiError, ValueError, TypeError) as exc:
            logger.warning("upload.sweep_failed bucket=%s error=%s", bucket, exc)

    async def prune(self, model: str, command: UpdateWeights | LoadLora, keep: AbstractSet[str]) -> None:
        """Delete older uploads than the source of `command`, for the same model or adapter, except for `keep`.

        An upload is deleted only if it was stored earlier and has an older version. Another controller may be about to
        record a newer upload. Failures are logged.
        """
        bucket, home = self._bucket(model), _home(model, command)
        try:
            async with self._connect() as nats:
                stored = await _list_own(nats, bucket, model, home)
                own = stored.get(command.source.objects or "")
                for folder, at in sorted(stored.items()):
                    version = int(folder.rpartition("/")[2].partition("-")[0])  # the name is `<version>-<random>`
                    is_older = own is not None and at < own and version < command.version
                    if is_older and folder not in keep:
                        await delete_prefix(nats, folder)
        except (RollbusError, ValueError, TypeError) as exc:
            logger.warning("upload.prune_failed bucket=%s home=%s error=%s", bucket, f"{home}/", exc)

    async def delete_source(self, model: str, command: UpdateWeights | LoadLora, keep: AbstractSet[str]) -> None:
        """Delete older uploads and the source of `command`, if it was uploaded here, except for `keep`."""
        objects = command.source.objects or ""
        if objects.startswith(f"{self._bucket(model)}/{_home(model, command)}/"):
            await self.prune(model, command, keep)
            if objects not in keep:
                await self.delete(objects)

    def _connect(self) -> AbstractAsyncContextManager[Connection]:
        return connected(self._server, name=f"rollbus uploads {self._fleet}")


def sources_in(*states: DesiredState) -> set[str]:
    """Return all folders of the object store that a register of these states names."""
    found = set()
    for state in states:
        for registers in state.everywhere:
            for recorded in registers.values():
                command = recorded.command
                if isinstance(command, UpdateWeights | LoadLora) and command.source.objects is not None:
                    found.add(command.source.objects)
    return found


def _home(model: str, command: UpdateWeights | LoadLora) -> str:
    """Return the common prefix of all uploads for the same model or adapter."""
    if isinstance(command, LoadLora):
        return f"{encode_token(model)}/loras/{encode_token(command.name)}"
    return f"{encode_token(model)}/weights"


async def _list_own(nats: Connection, bucket: str, model: str, prefix: str) -> dict[str, datetime]:
    """Return the folders of the uploads by this library below a prefix, with the time of the last file.

    Raises:
        ControlError: as in `list_objects`.
        ValueError, TypeError: an object has no valid time.
    """
    home, youngest = f"{encode_token(model)}/", dict[str, datetime]()
    for info in await list_objects(nats, bucket, prefix, is_lenient=True):
        if (own := OWN_UPLOAD.match(info.name.removeprefix(home))) is not None:
            folder, stored = f"{bucket}/{home}{own[0]}", datetime.fromisoformat(info.mtime)
            youngest[folder] = max(stored, youngest.get(folder, stored))
    return youngest
