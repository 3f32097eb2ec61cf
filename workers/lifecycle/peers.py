"""Finds out, while a worker starts, whether other workers serve other content under the same version of its model."""

import asyncio
import contextlib
import logging
import time
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from ...bus.nats.connection import MAX_PENDING_BYTES, MAX_PENDING_MSGS, Connection
from ...bus.nats.permitted import subscribe_permitted
from ...bus.subjects import Subjects
from ...schemas.errors import BusBroken, BusClosed, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_presence
from ...schemas.presence import WorkerState
from ..config import WorkerConfig
from .lifecycle import HEARTBEAT_S

__all__ = ["StartPeers"]

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

    def __repr__(self) -> str:
        """One line with the number of workers."""
        return f"<StartPeers {len(self._last or ())}>"

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
