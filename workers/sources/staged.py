"""What a worker has staged: which folder each of its sources is, so that the network need not be asked again."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from .folder_store import FolderStore, Hold

__all__ = ["StagedFolders"]

MAX_KNOWN: Final = 1024
"""Sources that are remembered: more than are loaded at a time, of adapters."""
UPLOAD_GOOD_S: Final = 60.0
"""An upload was compared with the store less than so long ago, or it is compared again: other content may lie under its
name by now. A published version never changes."""


class _StagedFolder(NamedTuple):
    digest: str
    expires_at: float
    """On the monotonic clock."""


class StagedFolders:
    """Staged folders of one kind, by the source as commands name it.

    Args:
        store: has the folders.
        max_held: those staged or asked for last, which are held: nobody deletes them before the engine reads them.
        clock: monotonic seconds.
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

    def add(self, objects: str, hold: Hold, *, is_published: bool) -> Path:
        """Note which folder a source is, and hold it; return the folder."""
        expires_at = math.inf if is_published else self._clock() + UPLOAD_GOOD_S
        self._known.pop(objects, None)
        self._known[objects] = _StagedFolder(hold.digest, expires_at)
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._hold(hold)
        return hold.folder

    def find(self, objects: str, *, is_any_age: bool = False) -> Hold | None:
        """Return the folder of a source, which is held from now on; None: it is not at hand.

        Args:
            is_any_age: also an upload that was compared with the store long ago, or used since.
        """
        known = self._known.get(objects)
        if known is None or not (is_any_age or self._clock() < known.expires_at):
            return None
        if (hold := self.store.hold(known.digest)) is not None:
            self._hold(hold)
        return hold

    def expire_upload(self, folder: Path) -> None:
        """Have an upload compared with the store before it is used again: a folder was got for this use of it."""
        for name, known in self._known.items():
            if known.digest == folder.name and known.expires_at != math.inf:
                self._known[name] = known._replace(expires_at=-math.inf)

    def release(self) -> None:
        """Hold nothing."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()

    def _hold(self, hold: Hold) -> None:
        if (before := self._holds.pop(hold.digest, None)) is not None:
            before.release()
        self._holds[hold.digest] = hold
        while len(self._holds) > self._max_held:
            self._holds.pop(next(iter(self._holds))).release()
