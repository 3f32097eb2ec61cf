"""Compares the content of weights with what was recorded, and the checkpoint of the start with other workers."""

import asyncio
import contextlib
import logging
import time
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from ...bus.nats.connection import MAX_PENDING_BYTES, MAX_PENDING_MSGS, Connection, subscribe_permitted
from ...bus.subjects import Subjects
from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerState
from ..config import WorkerConfig
from ..lifecycle import HEARTBEAT_S
from ..sources.sources import WeightSources

logger = logging.getLogger(__name__)


LISTEN_S: Final = 1.25 * HEARTBEAT_S
"""Seconds in which each live worker publishes presence. An engine usually takes longer to load."""
MAX_PEERS: Final = 10_000
"""Workers whose last presence is kept until the worker serves; further workers are not compared."""
HOLDING: Final = frozenset(
    {WorkerState.SERVING, WorkerState.UPDATING, WorkerState.PAUSED, WorkerState.DRAINED, WorkerState.ASLEEP}
)
"""States of workers that serve their weights now or after a command."""


class StartPeers:
    """The last presence of each other worker, from the start of this worker until it serves."""

    def __init__(self, config: WorkerConfig, nats: Connection) -> None:
        self._config = config
        self._nats = nats
        self._listens_since = time.monotonic()
        # Decoded only once, at the end.
        self._last: dict[str, tuple[float, bytes]] | None = {}
        self._subscription: Subscription | None = None

    async def listen(self) -> None:
        """Subscribe to the presence of all workers. Call this once, while the engine starts.

        Users that an earlier release created may not subscribe. The worker then compares nothing.
        """
        self._listens_since = time.monotonic()
        subject = Subjects(self._config.fleet).presences
        try:
            self._subscription = await subscribe_permitted(
                self._nats,
                subject,
                self._receive,
                max_pending_msgs=MAX_PENDING_MSGS,
                max_pending_bytes=MAX_PENDING_BYTES,
            )
        except PermissionDenied as exc:
            logger.warning("peers.subscription_denied error=%s remedy=%s", exc, "rollbus auth init")
        except (BusBroken, BusClosed) as exc:
            logger.warning("peers.subscription_failed error=%s", exc)

    async def _receive(self, message: Msg) -> None:
        if self._last is not None and (message.subject in self._last or len(self._last) < MAX_PEERS):
            self._last[message.subject] = time.monotonic(), message.data

    async def stop(self) -> None:
        """Stop listening. A second call does nothing."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            with contextlib.suppress(Error):  # a lost connection has no subscriptions
                await subscription.unsubscribe()

    async def find_conflict(self, version: int, digest: str | None) -> str | None:
        """Return which live worker of this model holds other content under this version, or None; stop listening.

        Args:
            digest: the content of this worker, or None if it is unknown and cannot be compared.
        """
        if digest is None or self._subscription is None:
            await self.stop()
            return None
        await asyncio.sleep(max(self._listens_since + LISTEN_S - time.monotonic(), 0.0))
        last, self._last = self._last or {}, None
        await self.stop()
        for heard_at, data in last.values():
            try:
                peer = decode_presence(data)
            except RemoteProtocolError:
                continue  # clients report it
            is_other = peer.model == self._config.model and peer.worker != self._config.worker_id
            if not is_other or peer.state not in HOLDING or heard_at + peer.lease_s < time.monotonic():
                continue
            if peer.weight_version == version and peer.weight_digest not in {None, digest}:
                return (
                    f"version {version} is {peer.weight_digest} on {peer.worker}; the start checkpoint of this worker "
                    f"is {digest}. Restart the worker with that checkpoint, or send the next update"
                )
        return None


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
