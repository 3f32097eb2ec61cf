"""Checkpoints and adapters that a controller sends to the workers through NATS's object store."""

import logging
import re
import uuid
from collections.abc import Set
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from pathlib import Path
from typing import Final

from ...schemas.control import LoadLora, UpdateWeights
from ...schemas.desired import DesiredState
from ...schemas.errors import RollbusError
from ..auth.credentials import Role
from ..nats.connection import Connection, connected
from ..nats.jetstream import ApiError
from ..nats.server import Server
from ..objects.catalog import bucket_state, delete_prefix, list_objects
from ..objects.writer import put_folder
from ..protocol.weights.chain import needed_bytes
from ..subjects import Subjects, encode_token, published_bucket, upload_bucket
from .version_cleaning import Cleaning

__all__ = ["Uploads", "sources_in"]

logger = logging.getLogger(__name__)

OWN_UPLOAD: Final = re.compile(r"(weights|loras/[^/]+)/\d+-[0-9a-f]{8}(?=/)")
"""Folder of an upload by this library, below the model. Other uploads are never deleted."""
ABANDONED_S: Final = 24 * 3600.0
"""Age in seconds above which an upload that is not recorded belongs to a dead controller. Checks take minutes."""


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

    def __repr__(self) -> str:
        """Return one line with the fleet."""
        return f"<Uploads {self._fleet}>"

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
        async with self._connected() as nats:
            # A publisher's bucket also has the chain record, for which room must remain.
            needed = needed_bytes if self._is_publisher else None
            return await put_folder(nats, self._bucket(model), prefix, folder, needed_bytes=needed)

    async def delete(self, objects: str) -> None:
        """Delete one upload. Log failures."""
        try:
            async with self._connected() as nats:
                await delete_prefix(nats, objects)
        except RollbusError as exc:
            logger.warning("upload.delete_failed objects=%s error=%s", objects, exc)

    async def sweep(self, model: str, keep: Set[str]) -> None:
        """Delete what killed controllers left in the bucket: old uploads of the model, and unnamed object chunks.

        An upload is old if nobody has recorded it for `ABANDONED_S`. Failures are logged.

        Args:
            keep: recorded uploads of the model.
        """
        bucket, home = self._bucket(model), f"{encode_token(model)}/"
        youngest: dict[str, datetime] = {}
        try:
            async with self._connected() as nats:
                for info in await list_objects(nats, bucket, home.removesuffix("/")):
                    own = OWN_UPLOAD.match(info.name.removeprefix(home))
                    if own is not None:
                        folder, stored = f"{bucket}/{home}{own[0]}", datetime.fromisoformat(info.mtime)
                        youngest[folder] = max(stored, youngest.get(folder, stored))
                now = (await bucket_state(nats, bucket)).now
                for folder, stored in sorted(youngest.items()):
                    if folder not in keep and (now - stored).total_seconds() > ABANDONED_S:
                        logger.info("upload.abandoned_deleted objects=%s", folder)
                        await delete_prefix(nats, folder)
                if not self._is_publisher:  # `WeightPublisher` cleans the bucket of a publisher
                    cleaning = Cleaning(nats, bucket, now)
                    await cleaning.list_folders()
                    await cleaning.delete_parts()
        except (RollbusError, ApiError, ValueError, TypeError) as exc:
            logger.warning("upload.sweep_failed bucket=%s error=%s", bucket, exc)

    async def prune(self, model: str, command: UpdateWeights | LoadLora, keep: Set[str]) -> None:
        """Delete older uploads than the source of `command`, for the same model or adapter, except for `keep`.

        An upload is deleted only if it was stored earlier and has an older version. Another controller may be about to
        record a newer upload. Failures are logged.
        """
        home = f"{_home(model, command)}/"
        bucket, times = self._bucket(model), dict[str, str]()
        try:
            async with self._connected() as nats:
                for info in await list_objects(nats, bucket, home.removesuffix("/")):
                    name = info.name.removeprefix(home).partition("/")[0]
                    times[name] = max(info.mtime, times.get(name, ""))
                own = (command.source.objects or "").rpartition("/")[2]
                for name, time in sorted(times.items()):
                    objects = f"{bucket}/{home}{name}"
                    is_older = _is_older(name, command.version) and time < times.get(own, "")
                    if is_older and objects not in keep:
                        await delete_prefix(nats, objects)
        except RollbusError as exc:
            logger.warning("upload.prune_failed bucket=%s home=%s error=%s", bucket, home, exc)

    async def delete_source(self, model: str, command: UpdateWeights | LoadLora, keep: Set[str]) -> None:
        """Delete older uploads and the source of `command`, if it was uploaded here, except for `keep`."""
        objects = command.source.objects or ""
        if objects.startswith(f"{self._bucket(model)}/{_home(model, command)}/"):
            await self.prune(model, command, keep)
            if objects not in keep:
                await self.delete(objects)

    def _connected(self) -> AbstractAsyncContextManager[Connection]:
        return connected(self._server, name=f"rollbus uploads {self._fleet}")


def sources_in(*states: DesiredState) -> set[str]:
    """Return all folders of the object store that a register of these states names."""
    found = set()
    for state in states:
        for registers in (state.registers, *state.workers.values()):
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


def _is_older(name: str, version: int) -> bool:
    """Return True if an upload, named `<version>-<random>`, is of an older version."""
    digits, _, _ = name.partition("-")
    return digits.isascii() and digits.isdigit() and int(digits) < version
