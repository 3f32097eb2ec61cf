"""Deletes old versions, and leftovers of killed uploads, in the bucket of a model's published weights."""

import logging
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Final

from ...schemas.chain import ChainRecord
from ...schemas.errors import ControlCode, ControlError, RemoteProtocolError
from ...schemas.manifest import MANIFEST, MAX_MANIFEST_BYTES, decode_manifest
from ..nats.connection import Connection
from ..nats.jetstream import NO_MESSAGE, ApiError, ask
from ..objects.catalog import delete_prefix, find_object, list_subjects
from ..objects.folder_reader import open_reader
from ..objects.layout import info_subjects, name_of, parts_subject, stream_of
from ..protocol.weights.chain import YOUNG_S, folder_of, is_weights, kept
from .part_ids import part_tag

__all__ = ["Cleaning"]

logger = logging.getLogger(__name__)


class Cleaning:
    """One cleaning of the bucket: list it, decide, delete. Methods raise `ApiError`, `ControlError` and `BusBroken`.

    Args:
        nats: connection of a user that may delete in the bucket.
        bucket: bucket of the model.
        now: time of the server's clock.
        open_tags: tags of this process's publications in progress. No object names their object chunks yet.
        young_s: age in seconds below which folders and object chunks always stay.
    """

    def __init__(
        self,
        nats: Connection,
        bucket: str,
        now: datetime,
        *,
        open_tags: AbstractSet[str] = frozenset(),
        young_s: float = YOUNG_S,
    ) -> None:
        self._nats = nats
        self._bucket: Final = bucket
        self._now = now
        self._young_s = young_s
        self._ages: dict[str, float] = {}
        """Age in seconds, by folder."""
        self._open_tags = open_tags
        self._tags = set(open_tags)
        """Tags of the folders that exist or will exist."""
        self._others: list[str] = []
        """Names of objects that belong to no published version."""

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<Cleaning {self._bucket} folders={len(self._ages)} others={len(self._others)}>"

    async def list_folders(self) -> None:
        """Find the folders and their ages."""
        one_of: dict[str, str] = {}
        for subject in await list_subjects(self._nats, self._bucket, info_subjects(self._bucket)):
            name = name_of(subject)
            found = None if name is None else folder_of(name)
            if name is None:
                continue
            if found is None:
                self._others.append(name)
            else:
                folder, tag = found
                self._tags.add(tag)
                if tag not in self._open_tags:  # the lists of its ranks would show a wrong age
                    one_of[folder] = name
        for folder, name in one_of.items():
            described = await find_object(self._nats, self._bucket, name, is_signed=False)
            if described is not None:
                self._ages[f"{self._bucket}/{folder}"] = (self._now - described.stored_at).total_seconds()

    async def kept(self, record: ChainRecord, recorded: AbstractSet[str]) -> set[str]:
        """Return the folders to keep."""
        roots = recorded | set(record.noted)
        # Folders of a chain that the record has lost.
        unlinked = roots & self._ages.keys() - {link.objects for link in record.links}
        needed = {other for objects in unlinked if is_weights(objects) for other in await self._named_by(objects)}
        return kept(record.links, roots | needed, self._ages, young_s=self._young_s)

    async def _named_by(self, objects: str) -> set[str]:
        """Return the folders that a version's manifest names. Return none if no worker can load the version."""
        try:
            async with open_reader(self._nats, objects, None) as reader:
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
            await delete_prefix(self._nats, objects)
            logger.info("versions.deleted objects=%s", objects)

    async def delete_parts(self, *, tagged_young_s: float | None = None) -> int:
        """Delete object chunks that no object names, left by killed uploads. Return the number of their objects.

        Args:
            tagged_young_s: age in seconds below which object chunks of publications stay; None: as those of other
                uploads.
        """
        tagged_young_s = self._young_s if tagged_young_s is None else tagged_young_s
        prefix = parts_subject(self._bucket, "")
        nuids = {
            subject.removeprefix(prefix) for subject in await list_subjects(self._nats, self._bucket, f"{prefix}>")
        }
        unnamed = {nuid for nuid in nuids if part_tag(nuid) not in self._tags}
        if any(part_tag(nuid) is None for nuid in unnamed):
            unnamed -= await self._named_by_others()
        deleted = 0
        for nuid in sorted(unnamed):
            young_s = self._young_s if part_tag(nuid) is None else tagged_young_s
            if await self._is_old(parts_subject(self._bucket, nuid), young_s):
                await ask(
                    self._nats,
                    f"STREAM.PURGE.{stream_of(self._bucket)}",
                    {"filter": parts_subject(self._bucket, nuid)},
                )
                deleted += 1
        if deleted:
            logger.info("versions.leftovers_deleted bucket=%s objects=%s", self._bucket, deleted)
        return deleted

    async def _named_by_others(self) -> set[str]:
        """Return the ids of object chunks that objects of other uploads name."""
        named = set()
        for name in self._others:
            found = await find_object(self._nats, self._bucket, name, is_signed=False)
            if found is not None and found.info is not None:
                named.add(found.info.nuid)
        return named

    async def _is_old(self, subject: str, young_s: float) -> bool:
        """Return True if the last object chunk is older than `young_s`. An upload in progress has a younger one."""
        try:
            answer = await ask(self._nats, f"STREAM.MSG.GET.{stream_of(self._bucket)}", {"last_by_subj": subject})
        except ApiError as error:
            if error.code == NO_MESSAGE:
                return False
            raise
        age_s = (self._now - datetime.fromisoformat(answer["message"]["time"])).total_seconds()
        return age_s >= young_s
