"""The parts of a client on the bus thread: connection, presence of the fleet, open calls and links."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Final

from nats.aio.msg import Msg
from nats.errors import SlowConsumerError

from ...schemas.errors import BusBroken, ErrorCode, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_client_presence, encode_json
from ...schemas.presence import ClientPresence, ClientState, WorkerPresence
from ..control.controller import Controller
from ..control.updates import Updates
from ..logs import RejectionCount
from ..nats.connection import CLOSE_TIMEOUT_S, Connection, check_permitted, open_connection, publish, subscribe
from ..objects.uploads import Uploads
from ..protocol.fleet.leases import DEFAULT_LEASE_S
from ..protocol.fleet.presence import LEASE_MARGIN_S, LostWorker
from ..tracing.spans import TracingStats
from .config import ClientConfig
from .coordinator import AttemptCoordinator
from .dispatch import RequestDispatcher
from .links import ClientLinks, ResultCheck
from .models import ModelNames
from .presence import PauseWarnings, PresenceWatcher, SilenceChecks
from .times import ClientStats

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
"""Seconds between two presence messages, and between two link messages if there is nothing else to send."""
LEASE_S: Final = 5.0
"""Seconds, five heartbeats. A busy machine may delay some heartbeats, and workers still notice a dead client soon."""
UNHEARD_S: Final = DEFAULT_LEASE_S + LEASE_MARGIN_S
"""Seconds. A live worker publishes presence several times within this time after an offer."""
LEASE_CHECK_S: Final = 0.5
"""Seconds between two checks of the workers' leases, a tenth of a lease."""


class ClientRuntime:
    """The connected parts of a client. Created by `open_client_runtime`; runs on the bus thread."""

    def __init__(self, config: ClientConfig, nats: Connection) -> None:
        identity = config.client, config.incarnation
        self._config = config
        self._started_at = time.monotonic()
        self._outage_s = 0.0
        self._rejected = RejectionCount()
        self.nats = nats
        self.coordinator = AttemptCoordinator()
        self.watcher = PresenceWatcher(
            nats,
            config.subjects,
            self._on_worker_lost,
            self._on_fleet_change,
            self.coordinator.on_worker_survival,
            self._on_worker_heard,
        )
        self.watcher.client = config.client
        self.controller = Controller(nats, config.subjects, config.client, self.watcher)
        self.models = ModelNames(nats, config, self.watcher, self.controller.store)
        self.updates = Updates(self.controller, Uploads(config.server, config.subjects))
        table = self.watcher.table
        self.links = ClientLinks(nats, config.subjects, identity, self.coordinator, table.incarnations_of)
        self.links.check = ResultCheck(table, self.controller.store, self.coordinator)
        self.dispatcher = RequestDispatcher(nats, config, self.watcher, self.coordinator)
        self.pauses = PauseWarnings(self.watcher, self.coordinator, self.controller.store)
        self.silence = SilenceChecks(nats, self.watcher, self.coordinator)
        self.dispatcher.placement.silent = self.silence.watch.avoided
        self.coordinator.connect(self.dispatcher, self.links.abort)

    def debug_state(self) -> dict[str, int]:
        """Return counts of what the client holds, for tests. The names are not stable."""
        return self.coordinator.debug_state() | self.dispatcher.debug_state()

    @property
    def client(self) -> str:
        """Name of this client."""
        return self._config.client

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def _on_worker_lost(self, gone: LostWorker) -> None:
        self.dispatcher.placement.remove_worker(gone)
        self.coordinator.mark_worker_lost(gone)
        self.controller.collector.mark_lost(gone)

    def _on_worker_heard(self, presence: WorkerPresence) -> None:
        self.dispatcher.placement.update(presence)
        self.dispatcher.wake()

    def _on_fleet_change(self) -> None:
        self.dispatcher.wake()
        self.pauses.update_paused()

    async def start(self) -> None:
        """Subscribe to all subjects of this client, and publish its presence.

        Raises:
            BusBroken: the connection is permanently lost.
        """
        await subscribe(self.nats, self._config.subjects.presences, self.watcher.receive)
        await subscribe(self.nats, self._config.subjects.frames_to(self._config.client), self.links.receive)
        await subscribe(self.nats, self._config.subjects.client(self._config.client), self._on_newer_client)
        await self.controller.collector.start()
        await self.dispatcher.publisher.start()
        await check_permitted(self.nats)
        # One connection keeps the order: the server has the subscriptions before any request can cause an answer.
        await self._publish_presence(ClientState.LIVE)
        await self.watcher.restart_watch()

    async def _on_newer_client(self, message: Msg) -> None:
        """Fail all calls if a client that connected later uses this name. For workers, this incarnation has ended."""
        try:
            presence = decode_client_presence(message.data)
        except RemoteProtocolError as exc:
            if so_far := self._rejected.add():
                logger.warning("presence.rejected subject=%s so_far=%s error=%s", message.subject, so_far, exc)
            return
        is_other = presence.incarnation != self._config.incarnation and presence.state is not ClientState.CLOSED
        if is_other and presence.uptime_s < self._uptime_s:
            logger.error("client.superseded client=%s by=%s", self._config.client, presence.incarnation)
            reason = f"another client with the name {self._config.client} connected; client names must be unique"
            self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, reason)

    async def check_leases(self) -> None:
        """Renew this client's lease, check the workers' leases and repeat link acks, until cancelled."""
        is_beat = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(LEASE_CHECK_S)
            waited_s = time.monotonic() - before
            if not self.nats.is_connected:
                # Pause the lease timers: the client receives no presence.
                self._handle_outage(waited_s)
                continue
            if waited_s > 2 * LEASE_CHECK_S:
                # The process was frozen. Presence that arrived meanwhile is not processed yet.
                await self.restart_leases()
                continue
            self.watcher.expire()
            self.coordinator.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic() - UNHEARD_S)
            self.coordinator.check_suspects()
            is_beat = not is_beat
            if is_beat:
                await self._send_heartbeat()

    def _handle_outage(self, waited_s: float) -> None:
        """Mark all workers lost after an outage of lease plus margin plus `worker_grace_s`.

        A worker that dies while the server is reachable is marked lost after the same time. Time in which this process
        was frozen does not count, because the process may not have tried to reconnect.
        """
        if waited_s > 2 * LEASE_CHECK_S:
            self.dispatcher.restart_timers()
            return
        self._outage_s += waited_s
        if self._outage_s >= UNHEARD_S + self._config.worker_grace_s:
            self.watcher.remove_all(f"NATS has not answered for {self._outage_s:.0f} s")
            self.coordinator.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic())
            self.dispatcher.fail_unserved(has_grace=False)

    @property
    def _is_observer(self) -> bool:
        """True if the client has credentials and has sent no request, so that no worker has anything of it.

        In that case the client publishes no presence, because presence would take the name away from a running client
        with the same credentials.
        """
        return self._config.server.credentials is not None and not self.coordinator.stats.requests

    async def _send_heartbeat(self) -> None:
        if self._is_observer:
            return
        await self._publish_presence(ClientState.LIVE)
        self.links.prune(self.watcher.table.get)
        self.links.repeat_acks()

    async def restart_leases(self) -> None:
        """Continue after an outage of the connection or this process. Restart all leases: no presence was received."""
        logger.info("client.resumed client=%s", self._config.client)
        self._outage_s = 0.0
        self.dispatcher.restart_timers()
        try:
            await self._send_heartbeat()
            await self.watcher.restart_watch()
        except BusBroken as exc:
            # The connection is down again. The next reconnect restarts the leases.
            logger.warning("client.resume_failed client=%s error=%s", self._config.client, exc)

    def handle_error(self, error: Exception) -> None:
        """Handle an error that the connection reports."""
        if isinstance(error, PermissionDenied):
            self.coordinator.fail_all(ErrorCode.PERMISSION_DENIED, str(error))
        elif isinstance(error, BusBroken):
            self.coordinator.fail_all(ErrorCode.FRAMES_LOST, str(error))
        elif not isinstance(error, SlowConsumerError):
            # Dropped frames are requested again. A message that a handler failed on would fail again.
            self.coordinator.mark_all_lost(f"a message could not be handled: {error!r}")

    async def close(self) -> None:
        """Fail all open calls, and publish the final presence."""
        self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, "the client was closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # This replaces all aborts: workers abort all requests of this incarnation of the client.
                await self._publish_presence(ClientState.CLOSED)
        except TimeoutError:
            logger.warning("client.final_presence_failed client=%s", self._config.client)

    async def _publish_presence(self, state: ClientState) -> None:
        if self._is_observer:
            return
        presence = ClientPresence(
            client=self._config.client,
            incarnation=self._config.incarnation,
            state=state,
            lease_s=LEASE_S,
            uptime_s=round(self._uptime_s, 3),
        )
        try:
            await publish(self.nats, self._config.subjects.client(self._config.client), encode_json(presence))
        except BusBroken as exc:
            logger.warning("presence.publish_failed error=%s", exc)

    def stats(self, unread_bytes: int, spans: TracingStats) -> ClientStats:
        """Return the counters of all parts. Any thread may call this."""
        sent = self.dispatcher
        counted = self.coordinator.stats
        return replace(
            counted,
            placed=dict(counted.placed),
            prefill_fallbacks=dict(counted.prefill_fallbacks),
            retries=dict(counted.retries),
            republished=sent.publisher.stats.repeats,
            dropped_msgs=self.nats.counters().dropped_msgs,
            unread_bytes=unread_bytes,
            queue_waits=sent.queue_waits.copy(),
            **asdict(spans),
        )


@asynccontextmanager
async def open_client_runtime(config: ClientConfig) -> AsyncIterator[ClientRuntime]:
    """Connect, run all parts until the block ends, and publish the final presence.

    Cancellation: the final presence is still published, in bounded time. The same holds if a task fails.

    Raises:
        BusBroken: no server answers, or the server does not permit this user to be a client.
    """
    runtime: ClientRuntime | None = None

    async def on_reconnect() -> None:
        if runtime is not None:
            await runtime.restart_leases()

    def on_error(error: Exception) -> None:
        if runtime is not None:
            runtime.handle_error(error)

    name = f"rollbus client {config.client}"
    nats = await open_connection(config.server, name=name, on_reconnect=on_reconnect, on_error=on_error)
    try:
        runtime = ClientRuntime(config, nats)
        await runtime.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(runtime.links.run(), name="client.links"),
                    tasks.create_task(runtime.dispatcher.run(), name="client.dispatch"),
                    tasks.create_task(runtime.dispatcher.publisher.run(), name="client.publish_again"),
                    tasks.create_task(runtime.dispatcher.check_deadlines(), name="client.check_deadlines"),
                    tasks.create_task(runtime.check_leases(), name="client.leases"),
                    tasks.create_task(runtime.pauses.run(), name="client.pauses"),
                    tasks.create_task(runtime.silence.run(), name="client.silence"),
                ]
                yield runtime
                for task in background:
                    task.cancel()
        except Exception as exc:
            # Boundary of the client: also after a defect in a task, the calls that wait in the owner's thread must end.
            runtime.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, f"the client has failed: {exc!r}")
            raise
        finally:
            await runtime.close()
    finally:
        await nats.shut()
