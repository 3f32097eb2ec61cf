"""Compares the content of weights with what was recorded, and the checkpoint of the start with other workers."""

import asyncio
import logging

from ...schemas.errors import ControlCode, ControlError
from ..lifecycle.peers import StartPeers
from ..sources.sources import WeightSources

__all__ = ["StartContent", "check_content"]

logger = logging.getLogger(__name__)


def check_content(what: str, recorded: str | None, found: str | None, source: object) -> None:
    """Check that a source holds the recorded content.

    Args:
        what: the version of weights or of an adapter, for the error.
        recorded: recorded digest, or None to accept every content.
        found: digest of the content at the source, or None if it is unknown.

    Raises:
        ControlError: `other_content`, with both digests.
    """
    if recorded not in {None, found}:
        raise ControlError(
            ControlCode.OTHER_CONTENT,
            f"{what} was {recorded}; {source} now holds {found}. Send the next update; `publish-weights` or a "
            "directory for each version prevents this",
        )


class StartContent:
    """The content of the checkpoint that the worker was started with.

    Args:
        sources: hashes the checkpoint.
    """

    def __init__(self, sources: WeightSources) -> None:
        self._sources = sources
        self._is_known = asyncio.Event()
        self._has_changed = False
        self.digest: str | None = None
        """Digest of the checkpoint, or None if it is unknown."""
        self.peers: StartPeers | None = None
        """The other workers, or None if they are unknown."""

    def __repr__(self) -> str:
        """One line with the digest."""
        return f"<StartContent {self.digest}>"

    async def hash(self) -> None:
        """Compute the digest, and listen to other workers. Run this while the engine loads the checkpoint."""
        try:
            if self.peers is not None:
                await self.peers.listen()
            self.digest = await self._sources.start_digest()
        except (ControlError, OSError) as exc:
            logger.warning("weights.start_digest_failed error=%s", exc)
            self._has_changed = isinstance(exc, ControlError) and exc.code is ControlCode.STORAGE
        finally:
            self._is_known.set()

    async def wait(self) -> str | None:
        """Wait for the end of `hash`, and return the digest."""
        await self._is_known.wait()
        return self.digest

    async def is_unchanged(self) -> bool:
        """Return False if the checkpoint changed after the engine began to load it."""
        if self._has_changed:
            return False
        try:
            return self.digest is None or await self._sources.start_digest() == self.digest
        except (ControlError, OSError) as exc:
            logger.warning("weights.start_digest_failed error=%s", exc)
            return False

    async def find_conflict(self, version: int, digest: str | None) -> str | None:
        """Return why the checkpoint must not be served under this version, or None. Call this once."""
        return None if self.peers is None else await self.peers.find_conflict(version, digest)
