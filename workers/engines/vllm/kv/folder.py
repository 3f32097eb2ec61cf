"""Files with KV, in a folder that prefill and decode workers share. Each prefill phase has its own subfolder."""

import logging
import re
import shutil
import threading
import time
import uuid
from pathlib import Path

__all__ = ["KvFolder", "Sweeper", "new_kv_id"]

logger = logging.getLogger(__name__)

KV_ID = re.compile(r"[0-9a-f]{32}")
"""Name of a subfolder. Files and folders with other names are never read, written or deleted."""
SWEEP_INTERVAL_S = 10.0
"""Maximum seconds between two searches for abandoned KV; a search lists the folder once."""
SWEEPS_PER_LIFE = 10
"""Minimum number of searches within `ttl_s` seconds."""


def new_kv_id() -> str:
    """Return a new id that no other prefill phase has."""
    return uuid.uuid4().hex


class KvFolder:
    """The shared folder. A program with access to the folder can read and change all KV in it.

    Share the folder only among the workers of one fleet.

    Args:
        root: absolute path; `make` creates it.
        ttl_s: age in seconds after which KV counts as abandoned.
    """

    def __init__(self, root: Path, *, ttl_s: float) -> None:
        self._root = root
        self.ttl_s = ttl_s

    def __repr__(self) -> str:
        return f"<KvFolder {self._root} ttl_s={self.ttl_s:g}>"

    def make(self) -> None:
        """Create the folder if it does not exist."""
        self._root.mkdir(parents=True, exist_ok=True)

    def file(self, kv_id: str, shard: str) -> Path:
        """Return the path of the KV of one process of the engine.

        Raises:
            ValueError: `kv_id`, which another worker may have sent, is not an id of KV.
        """
        return self._path(kv_id) / f"{shard}.safetensors"

    def drop_file(self, kv_id: str, shard: str) -> None:
        """Delete the file of one process, and after the last file the folder of the phase; ignore missing files."""
        self.file(kv_id, shard).unlink(missing_ok=True)
        try:
            self._path(kv_id).rmdir()
        except OSError:
            # Other processes of the engine have not read their files yet.
            return

    def drop(self, kv_id: str) -> None:
        """Delete the KV of a prefill phase that no worker will request; ignore missing KV."""
        shutil.rmtree(self._path(kv_id), ignore_errors=True)

    def sweep(self) -> int:
        """Delete abandoned KV, and return the number of its prefill phases."""
        oldest = time.time() - self.ttl_s
        num_swept = 0
        for path in self._root.iterdir():
            try:
                is_abandoned = KV_ID.fullmatch(path.name) is not None and path.stat().st_mtime < oldest
            except FileNotFoundError:
                # Another worker has read or deleted it meanwhile.
                continue
            if is_abandoned:
                shutil.rmtree(path, ignore_errors=True)
                num_swept += 1
        return num_swept

    def _path(self, kv_id: str) -> Path:
        if KV_ID.fullmatch(kv_id) is None:
            raise ValueError("invalid KV id; expected 32 hexadecimal digits")
        return self._root / kv_id


class Sweeper:
    """A thread that deletes abandoned KV, even while the engine is idle. It ends with `close` or with the process."""

    def __init__(self, folder: KvFolder) -> None:
        self._folder = folder
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="kv-sweeper", daemon=True).start()

    def close(self) -> None:
        """Stop the thread after a running search."""
        self._closed.set()

    def _run(self) -> None:
        interval_s = min(SWEEP_INTERVAL_S, self._folder.ttl_s / SWEEPS_PER_LIFE)
        while not self._closed.wait(interval_s):
            try:
                num_swept = self._folder.sweep()
            except OSError:
                logger.exception("kv.sweep_failed folder=%r", self._folder)
                continue
            if num_swept:
                logger.warning("kv.swept legs=%d older_than_s=%g", num_swept, self._folder.ttl_s)
