"""Deletes what nobody needs of the bucket of a model's published weights."""

import logging
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import Final

from ...schemas.chain import ChainRecord
from ..nats.connection import Connection
from ..nats.jetstream import NO_MESSAGE, ApiError, ask
from ..objects.catalog import delete_prefix, find_object, list_subjects
from ..objects.layout import info_subjects, name_of, parts_subject, stream_of
from ..protocol.weights.chain import YOUNG_S, folder_of, kept
from .publication import part_tag

__all__ = ["Cleaning"]

logger = logging.getLogger(__name__)


class Cleaning:
    """One look at the bucket, and what follows from it. Methods raise `ApiError`, `ControlError` and `BusBroken`.

    Args:
        nats: a connection of a user that may delete there.
        bucket: the model's.
        now: by the server's clock.
        open_tags: of publications that are under way here: no object names their parts yet.
        young_s: up to which what is there stays in any case.
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
        """Seconds, by folder."""
        self._tags = set(open_tags)
        """Of the folders that are there, or will be."""
        self._others: list[str] = []
        """Names of objects that are not those of published versions."""

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Cleaning {self._bucket} folders={len(self._ages)} others={len(self._others)}>"

    async def look(self) -> None:
        """Find the folders and how old they are."""
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
                one_of[folder] = name
        for folder, name in one_of.items():
            described = await find_object(self._nats, self._bucket, name, is_signed=False)
            if described is not None:
                self._ages[f"{self._bucket}/{folder}"] = (self._now - described.stored_at).total_seconds()

    def kept(self, record: ChainRecord, recorded: AbstractSet[str]) -> set[str]:
        """Return the folders that stay."""
        return kept(record.links, recorded | set(record.noted), self._ages, young_s=self._young_s)

    async def delete_folders(self, kept_folders: AbstractSet[str]) -> int:
        """Delete the other folders; return how many."""
        old = sorted(self._ages.keys() - kept_folders)
        for objects in old:
            await delete_prefix(self._nats, objects)
            logger.info("versions.deleted objects=%s", objects)
        return len(old)

    async def delete_parts(self) -> int:
        """Delete parts that no object names, which killed uploads left; return of how many objects."""
        prefix = parts_subject(self._bucket, "")
        nuids = {
            subject.removeprefix(prefix) for subject in await list_subjects(self._nats, self._bucket, f"{prefix}>")
        }
        unnamed = {nuid for nuid in nuids if part_tag(nuid) not in self._tags}
        if any(part_tag(nuid) is None for nuid in unnamed):
            unnamed -= await self._named_by_others()
        deleted = 0
        for nuid in sorted(unnamed):
            if await self._is_old(parts_subject(self._bucket, nuid)):
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
        """Return the ids of parts that objects of other uploads name."""
        named = set()
        for name in self._others:
            found = await find_object(self._nats, self._bucket, name, is_signed=False)
            if found is not None and found.info is not None:
                named.add(found.info.nuid)
        return named

    async def _is_old(self, subject: str) -> bool:
        """True if the last part was stored long ago; an upload that goes on has a young one."""
        try:
            answer = await ask(self._nats, f"STREAM.MSG.GET.{stream_of(self._bucket)}", {"last_by_subj": subject})
        except ApiError as error:
            if error.code == NO_MESSAGE:
                return False
            raise
        age_s = (self._now - datetime.fromisoformat(answer["message"]["time"])).total_seconds()
        return age_s >= self._young_s
