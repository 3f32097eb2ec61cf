"""The staged folder of each source, so that a worker need not contact the object store again."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from .folder_store import FolderStore, Hold

__all__ = ["StagedFolders"]

MAX_KNOWN: Final = 1024
"""Maximum number of remembered sources: more than the number of adapters that are loaded at a time."""
UPLOAD_GOOD_S: Final = 60.0
"""Seconds after which an upload is compared with the object store again, because its name may have new content. A
published version never changes."""


class _StagedFolder(NamedTuple):
    digest: str
    content: str
    """Digest of the weights in the folder, which does not depend on its files."""
    expires_at: float
    """Time on the monotonic clock after which the source is compared with the object store again."""


class StagedFolders:
    """Staged folders of one kind (checkpoints or adapters), by the name of the source in commands.

    Args:
        store: contains the folders.
        max_held: number of the last staged or found folders that are held, so that no process deletes them before the
            engine reads them.
        clock: returns monotonic seconds.
    """

    def __init__(self, store: FolderStore, max_held: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._max_held = max_held
        self._clock = clock
        self._known: dict[str, _StagedFolder] = {}
        self._holds: dict[str, Hold] = {}

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<StagedFolders known={len(self._known)} held={len(self._holds)}>"

    def add(self, objects: str, hold: Hold, content: str, *, is_published: bool) -> Path:
        """Record the folder of a source and the digest of its weights, hold the folder and return its path."""
        expires_at = math.inf if is_published else self._clock() + UPLOAD_GOOD_S
        self._known.pop(objects, None)
        self._known[objects] = _StagedFolder(hold.digest, content, expires_at)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._hold(hold)
        return hold.folder

    def find(self, objects: str, *, is_any_age: bool = False) -> Hold | None:
        """Return the folder of a source, and hold it. Return None if no valid folder is on this machine.

        Args:
            is_any_age: also return an upload that has expired.
        """
        known = self._known.get(objects)
        if known is None or not (is_any_age or self._clock() < known.expires_at):
            return None
        if (hold := self.store.hold(known.digest)) is not None:
            self._hold(hold)
        return hold

    def content_of(self, folder: Path) -> str | None:
        """Return the digest of the weights in a folder that was added, or None."""
        known = (known.content for known in self._known.values() if known.digest == folder.name)
        return next(known, None) if folder.parent == self.store.root else None

    def expire_upload(self, folder: Path) -> None:
        """Expire an upload that is being used, so that it is compared with the object store before its next use."""
        for name, known in self._known.items():
            if known.digest == folder.name and known.expires_at != math.inf:
                self._known[name] = known._replace(expires_at=-math.inf)

    def release(self) -> None:
        """Release all holds."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()

    def _hold(self, hold: Hold) -> None:
        if (before := self._holds.pop(hold.digest, None)) is not None:
            before.release()
        self._holds[hold.digest] = hold
        while len(self._holds) > self._max_held:
            self._holds.pop(next(iter(self._holds))).release()
