"""KV in files: a folder that prefill and decode workers share, with one folder in it for each prefill phase."""

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
"""What is no such name is neither read nor written nor deleted."""
SWEEP_INTERVAL_S = 10.0
"""At most, between two looks for what was abandoned: one listing of the folder."""
SWEEPS_PER_LIFE = 10


def new_kv_id() -> str:
    """A name that no other prefill phase has."""
    return uuid.uuid4().hex


class KvFolder:
    """Who may read and write in the folder may do so with all KV in it; give it to the workers of one fleet only.

    Args:
        root: absolute; made where it is missing.
        ttl_s: what is older was abandoned.
    """

    def __init__(self, root: Path, *, ttl_s: float) -> None:
        self._root = root
        self.ttl_s = ttl_s

    def __repr__(self) -> str:
        return f"<KvFolder {self._root} ttl_s={self.ttl_s:g}>"

    def make(self) -> None:
        """Make the folder, if it is not there."""
        self._root.mkdir(parents=True, exist_ok=True)

    def file(self, kv_id: str, shard: str) -> Path:
        """Where the KV of one of the engine's processes is.

        Raises:
            ValueError: `kv_id`, which comes from elsewhere, is not the name of any KV.
        """
        return self._path(kv_id) / f"{shard}.safetensors"

    def drop_file(self, kv_id: str, shard: str) -> None:
        """Delete what one process has read, and with the last of it the folder of the phase; gone already is fine."""
        self.file(kv_id, shard).unlink(missing_ok=True)
        try:
            self._path(kv_id).rmdir()
        except OSError:
            # Other processes of the engine have not read theirs yet.
            return

    def drop(self, kv_id: str) -> None:
        """Delete the KV of a prefill phase that no worker will ask for; gone already is fine."""
        shutil.rmtree(self._path(kv_id), ignore_errors=True)

    def sweep(self) -> int:
        """Delete what was abandoned; returns of how many prefill phases."""
        oldest = time.time() - self.ttl_s
        num_swept = 0
        for path in self._root.iterdir():
            try:
                is_abandoned = KV_ID.fullmatch(path.name) is not None and path.stat().st_mtime < oldest
            except FileNotFoundError:
                # Read meanwhile, or swept by another worker.
                continue
            if is_abandoned:
                shutil.rmtree(path, ignore_errors=True)
                num_swept += 1
        return num_swept

    def _path(self, kv_id: str) -> Path:
        if KV_ID.fullmatch(kv_id) is None:
            raise ValueError("no id of KV: 32 hexadecimal digits are expected")
        return self._root / kv_id


class Sweeper:
    """A thread that deletes abandoned KV, also while the engine is idle. Ends with `close`, or with the process."""

    def __init__(self, folder: KvFolder) -> None:
        self._folder = folder
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="kv-sweeper", daemon=True).start()

    def close(self) -> None:
        """Sweep no more."""
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
