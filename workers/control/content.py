"""Compares the content of weights with what was recorded, and the checkpoint of the start with other workers."""

import asyncio
import contextlib
import logging
import time
from typing import Final

from ...bus.nats.connection import Connection, subscribe_permitted
from ...bus.nats.library import Error, Msg, Subscription
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


class StartCheck:
    """Compares the checkpoint of the start with its files, and with what other workers hold under its version."""

    def __init__(self, config: WorkerConfig, sources: WeightSources) -> None:
        self._config = config
        self._sources = sources
        self._is_known = asyncio.Event()
        self._has_changed = False
        self.digest: str | None = None
        """Digest of the checkpoint, or None if it is unknown."""
        # The last presence of each worker, with the time of its arrival. Decoded only once, at the end.
        self._presences: dict[str, tuple[float, bytes]] = {}
        self._subscription: Subscription | None = None
        self._listens_since = 0.0

    async def run(self, nats: Connection | None) -> None:
        """Listen to other workers, and compute the digest. Run this while the engine loads the checkpoint.

        Args:
            nats: None: compare nothing with other workers.
        """
        try:
            if nats is not None and self._sources.has_own:
                await self._listen(nats)
            self.digest = await self._sources.start_digest()
        except (ControlError, OSError) as exc:
            logger.warning("weights.start_digest_failed error=%s", exc)
            self._has_changed = isinstance(exc, ControlError) and exc.code is ControlCode.STORAGE
        finally:
            self._is_known.set()

    async def _listen(self, nats: Connection) -> None:
        """Subscribe to the presence of all workers.

        Only with a checkpoint: a fleet that starts at once costs the square of its workers.
        Users that an earlier release created may not subscribe. The worker then compares nothing.
        """
        self._listens_since = time.monotonic()
        subject = Subjects(self._config.fleet).presences
        try:
            self._subscription = await subscribe_permitted(nats, subject, self._receive)
        except PermissionDenied as exc:
            logger.warning("peers.subscription_denied error=%s remedy=%s", exc, "rollbus auth init")
        except (BusBroken, BusClosed) as exc:
            logger.warning("peers.subscription_failed error=%s", exc)

    def _receive(self, message: Msg) -> None:
        if message.subject in self._presences or len(self._presences) < MAX_PEERS:
            self._presences[message.subject] = time.monotonic(), message.data

    async def wait(self) -> str | None:
        """Wait until `run` has computed the digest, and return it."""
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
        """Return which live worker of this model holds other content under this version, or None; stop listening.

        Args:
            digest: the content of this worker, or None if it is unknown and cannot be compared.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None:
            return None
        if digest is not None:
            await asyncio.sleep(max(self._listens_since + LISTEN_S - time.monotonic(), 0.0))
        with contextlib.suppress(Error):  # a lost connection has no subscriptions
            await subscription.unsubscribe()
        presences, self._presences = self._presences, {}
        if digest is None:
            return None
        for received_at, data in presences.values():
            try:
                peer = decode_presence(data)
            except RemoteProtocolError:
                continue  # clients report it
            is_other = peer.model == self._config.model and peer.worker != self._config.worker_id
            if not is_other or peer.state not in HOLDING or received_at + peer.lease_s < time.monotonic():
                continue
            if peer.weight_version == version and peer.weight_digest not in {None, digest}:
                return (
                    f"version {version} is {peer.weight_digest} on {peer.worker}; the start checkpoint of this worker "
                    f"is {digest}. Restart the worker with that checkpoint, or send the next update"
                )
        return None
