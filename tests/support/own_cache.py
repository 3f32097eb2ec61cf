"""The cache directory of a test run: its programs use it instead of the user's, and the run removes it at its end."""

import os
import shutil
import tempfile
import uuid
from pathlib import Path

RUN = "ROLLBUS_TEST_RUN"
"""Variable with the id of the run. Names of fleets contain it, so that the run recognizes what it has left behind."""
KEPT = {"PIP_CACHE_DIR": "pip", "UV_CACHE_DIR": "uv"}
"""Caches of downloads, which stay those of the user: otherwise each run would load the packages again."""


class OwnCache:
    """Sets `$XDG_CACHE_HOME` for this process and its children.

    Attributes:
        user: the cache directory of the user.
        own: the cache directory of this run.
    """

    def __init__(self) -> None:
        self.user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.own = Path(tempfile.mkdtemp(prefix="rollbus-test-cache-"))
        for variable, name in KEPT.items():
            os.environ.setdefault(variable, str(self.user / name))
        os.environ["XDG_CACHE_HOME"] = str(self.own)
        os.environ[RUN] = uuid.uuid4().hex[:8]

    def left_behind(self) -> list[Path]:
        """Return what programs of this run have made in the user's directory of rollbus, despite `$XDG_CACHE_HOME`."""
        return sorted((self.user / "rollbus").glob(f"*{os.environ[RUN]}*"))

    def remove(self) -> None:
        """Remove the directory of the run."""
        shutil.rmtree(self.own, ignore_errors=True)
