"""The state, incarnation and lease of a worker, and the detection of another worker with the same id.

Without its lease a worker publishes only presence. The worker first listens for another worker with its id, and then
publishes presence every second. Presence renews the lease when the server has confirmed it. If no presence is confirmed
for the lease minus a margin, the worker fences itself, before others treat it as lost: it fails all its requests and
continues as a new incarnation.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from ..bus.logs import LOG_VARIABLE, RejectionCount
from ..bus.nats.connection import Connection, check_permitted, connected, publish, subscribe
from ..bus.nats.library import Msg
from ..bus.protocol.fleet.leases import LEASE_MARGIN_S, MAX_LEASE_S, DuplicateWatch, OwnIncarnation, WorkerLease
from ..bus.protocol.states import SPEAKING, WORKER, WorkerEvent
from ..bus.subjects import WORKER_CONNECTION, Subjects
from ..bus.thread_calls import wait_at_most
from ..schemas.errors import BusBroken, DuplicateWorker, RemoteProtocolError
from ..schemas.limits import MAX_NAME_CHARS
from ..schemas.messages import decode_presence, encode_json
from ..schemas.presence import WorkerPresence, WorkerState
from .config import WorkerConfig

logger = logging.getLogger(__name__)


HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a link, and between two presence messages. A short lease makes presence more
frequent."""
CONFIRM_S = 1.0
"""Seconds for which a fenced worker waits for the confirmation of one presence before it publishes another."""
MAX_INCARNATIONS = 16
"""Number of its last incarnations that this process recognises in presence. Its own presence arrives earlier than after
this many fences."""
HOST: Final = socket.gethostname()[:MAX_NAME_CHARS]
"""Name of this machine in presence."""


class WorkerLifecycle:
    """The state and incarnation of this worker, and whether it may publish.

    Args:
        nats: the open connection.
        describe: returns the current presence.
        on_fenced: called when the lease has expired, after the incarnation has changed. It must remove the requests of
            the old incarnation.
        on_changed: called when the state has changed.
        on_duplicate: called once with the error that ends this worker, if another worker has its id.
    """

    def __init__(
        self,
        config: WorkerConfig,
        nats: Connection,
        *,
        describe: Callable[[], WorkerPresence],
        on_fenced: Callable[[], None],
        on_changed: Callable[[], None],
        on_duplicate: Callable[[DuplicateWorker], None],
    ) -> None:
        self._worker_id = config.worker_id
        self._nats = nats
        self._subject = Subjects(config.fleet).presence(config.worker_id)
        self.describe = describe
        self._on_fenced = on_fenced
        self._on_changed = on_changed
        self._on_duplicate = on_duplicate
        self._confirmed_at = time.monotonic()
        self._lease = WorkerLease(config.lease_s, LEASE_MARGIN_S, self._confirmed_at)
        # A lease has time for several presence messages, and one confirmation is enough.
        self._heartbeat_s = min(HEARTBEAT_S, (config.lease_s - LEASE_MARGIN_S) / 4)
        self._is_requested = asyncio.Event()
        listen_s = config.lease_s if config.listen_s is None else config.listen_s
        self._duplicates = DuplicateWatch(config.lease_s, listen_s, self._confirmed_at)
        self._incarnations = deque([config.incarnation or new_incarnation()], maxlen=MAX_INCARNATIONS)
        self._held_since: float | None = None
        self.knows_target: Callable[[], bool] = lambda: True
        """Returns False while the desired state may have changed without this worker. It then accepts no requests."""
        # The last presence, as it was published; empty: none was.
        self._published = b""
        self.duplicate: DuplicateWorker | None = None
        """The error passed to `on_duplicate`, or None while this worker keeps its id."""
        self.rejected = RejectionCount()
        """Presence messages that could not be decoded."""
        self.state = WORKER.initial
        self.times_fenced = 0

    @property
    def incarnation(self) -> str:
        """The current incarnation, since the start or the last fence."""
        return self._incarnations[-1]

    @property
    def held_s(self) -> float:
        """Seconds since presence of this incarnation was first confirmed, or 0 before that and while fenced."""
        return 0.0 if self._held_since is None else max(time.monotonic() - self._held_since, 0.0)

    def receive_presence(self, message: Msg) -> None:
        """Handle presence of this worker, or of another worker with its id, which may have to end this worker.

        This worker then publishes no presence except the final one.
        """
        if message.data == self._published:
            return  # its own
        try:
            presence = decode_presence(message.data)
        except RemoteProtocolError as exc:
            self.rejected.warn(logger, "presence.rejected subject=%s so_far=%s error=%s", message.subject, exc)
            return
        if presence.worker != self._worker_id or self.duplicate is not None or not self.on_presence(presence):
            return
        self.duplicate = DuplicateWorker(_describe_duplicate(presence))
        logger.error("worker.superseded worker=%s error=%s", self._worker_id, self.duplicate)
        self._on_duplicate(self.duplicate)

    def on_presence(self, presence: WorkerPresence) -> bool:
        """Handle presence under this worker's id. Return True if this worker must end because of another worker."""
        # If this process was frozen for longer than its lease, fence it first, because it no longer holds the id.
        self.may_publish()
        is_new = presence.incarnation not in self._incarnations and not self._duplicates.is_known(presence)
        gives_way = self._duplicates.receive(
            presence, OwnIncarnation(self._incarnations, self.held_s), time.monotonic()
        )
        if is_new and self._duplicates.is_known(presence):
            logger.warning(
                "worker.duplicate_detected worker=%s host=%s pid=%s incarnation=%s uptime_s=%s",
                self._worker_id,
                presence.host,
                presence.pid,
                presence.incarnation,
                presence.uptime_s,
            )
        return gives_way

    async def wait_alone(self) -> None:
        """Wait until this worker has listened long enough without presence of another worker that keeps its id."""
        await _wait_while(lambda: self._duplicates.serves_in_s(time.monotonic()))

    def _may_publish_presence(self) -> bool:
        """Return True if this worker may publish presence. Of two workers with one id, only the serving worker may."""
        if self.state in WORKER.final:
            # Clients that have received presence of this worker would otherwise use it until its lease expires.
            return bool(self._published)
        if self.duplicate is not None:
            return False
        return self.state in SPEAKING or self._publishes_in_s() <= 0

    def _publishes_in_s(self) -> float:
        return self._duplicates.announces_in_s(time.monotonic())

    def transition(self, event: WorkerEvent) -> None:
        """Change the state and publish it."""
        self.state = WORKER.next(self.state, event)
        logger.info("worker.%s worker=%s incarnation=%s", self.state, self._worker_id, self.incarnation)
        self.request_presence()
        self._on_changed()

    def request_presence(self) -> None:
        """Request that presence is published now instead of at the next heartbeat."""
        self._is_requested.set()

    def may_publish(self) -> bool:
        """Return True if the worker may publish: it is ready and holds its lease. If the lease has expired, fence it.

        Call this before each message that a peer acts on, because this process may have been frozen since the last
        call.
        """
        if self.state not in SPEAKING:
            return False
        if self._lease.is_held(time.monotonic()):
            return True
        self.fence("its lease expired without confirmation")
        return False

    def may_accept(self) -> bool:
        """Return True if the worker may accept requests: it may publish, serves, and knows the desired state."""
        return self.state is WorkerState.SERVING and self.knows_target() and self.may_publish()

    def fence(self, reason: str) -> None:
        """End this incarnation. The next incarnation may publish after its presence is confirmed."""
        self.times_fenced += 1
        logger.warning(
            "worker.incarnation_ended worker=%s incarnation=%s reason=%s", self._worker_id, self.incarnation, reason
        )
        self._incarnations.append(new_incarnation())
        self._held_since = None
        if self.state in SPEAKING:
            self.transition(WorkerEvent.FENCED)
        self._on_fenced()

    async def run(self) -> None:
        """Publish presence regularly, and fence the worker when its lease expires, until cancelled."""
        await _wait_while(lambda: self._publishes_in_s() if self.state is WorkerState.STARTING else 0.0)
        while True:
            await self.publish_presence()
            self.may_publish()
            await wait_at_most(self._is_requested, min(self._heartbeat_s, self._lease_left_s()))
            self._is_requested.clear()

    async def publish_presence(self) -> None:
        """Publish presence, and wait for the confirmation at most until the lease expires.

        A process that was frozen for longer than its lease is fenced first. Otherwise presence would renew a lease that
        has expired for its peers, and perhaps for another worker with this id.
        """
        self.may_publish()
        # Do not let the connection buffer presence while it is down: it would arrive when it is outdated.
        if not self._nats.is_connected or not self._may_publish_presence():
            return
        published_at = time.monotonic()
        presence = self.describe()
        self._published = encode_json(presence)
        try:
            await publish(self._nats, self._subject, self._published)
        except BusBroken as exc:
            logger.warning("presence.publish_failed error=%s", exc)
            return
        if not await self._nats.confirm(timeout_s=self._lease_left_s()):
            return
        self._lease.confirm(published_at)
        self._confirmed_at = max(self._confirmed_at, published_at)
        now = time.monotonic()
        if presence.incarnation != self.incarnation:
            return
        if presence.state is not WorkerState.FENCED:
            self._held_since = published_at if self._held_since is None else self._held_since
        elif self.state is WorkerState.FENCED and self._lease.is_held(now) and self._duplicates.serves_in_s(now) <= 0:
            self.transition(WorkerEvent.CONFIRMED)

    @property
    def lease_age_s(self) -> float:
        """Seconds since presence was last confirmed."""
        return max(time.monotonic() - self._confirmed_at, 0.0)

    def _lease_left_s(self) -> float:
        """Return the seconds until the lease expires, or `CONFIRM_S` between two attempts to renew an expired lease."""
        left_s = self._lease.expires_at - time.monotonic()
        return left_s if left_s > 0 else CONFIRM_S


async def wait_until_free(config: WorkerConfig) -> None:
    """Wait until no other worker has published presence under the id of `config` for its lease.

    Raises:
        BusBroken: no NATS server answers, or NATS does not let this user be the worker.
    """
    silent_at = time.monotonic() + config.lease_s

    def receive(message: Msg) -> None:
        nonlocal silent_at
        with contextlib.suppress(RemoteProtocolError):
            presence = decode_presence(message.data)
            if presence.state not in WORKER.final:
                silent_at = time.monotonic() + min(presence.lease_s, MAX_LEASE_S) + LEASE_MARGIN_S

    async with connected(config.server, name=f"{WORKER_CONNECTION}{config.worker_id}") as nats:
        await subscribe(nats, Subjects(config.fleet).presence(config.worker_id), receive)
        await check_permitted(nats)
        while (left_s := silent_at - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, HEARTBEAT_S))
            if nats.lost is not None:
                raise nats.lost
            if not nats.is_connected:
                silent_at = time.monotonic() + config.lease_s


async def _wait_while(left_s: Callable[[], float]) -> None:
    """Sleep until `left_s` returns no positive number of seconds."""
    left = left_s()
    while left > 0:
        await asyncio.sleep(left)
        left = left_s()


def new_incarnation() -> str:
    """Return a unique name for one incarnation of a worker."""
    return uuid.uuid4().hex[:8]


def log_name() -> str | None:
    """Return the log that gets the lines of this process: a file, or `journal`; None if it is unknown."""
    path = Path(os.environ.get(LOG_VARIABLE) or "/proc/self/fd/2").resolve()
    if path.is_file():
        return str(path)[-MAX_NAME_CHARS:]
    return "journal" if "JOURNAL_STREAM" in os.environ else None


def _describe_duplicate(other: WorkerPresence) -> str:
    """Return an error message that describes the worker with the id and the next step."""
    started = datetime.now(UTC) - timedelta(seconds=other.uptime_s)
    return (
        f"worker id {other.worker} is in use by another process: host {other.host or 'unknown'}, "
        f"pid {other.pid or 'unknown'}, started {started.isoformat(timespec='seconds')}; "
        "give each worker an id and credentials of its own"
    )
