"""Everything of a client that lives on the bus thread: its connection, its view of the fleet, its calls, its links."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Final

from nats.aio.msg import Msg
from nats.errors import SlowConsumerError

from ...schemas.errors import BusBroken, ErrorCode, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_client_presence, encode_json
from ...schemas.presence import ClientPresence, ClientState, WorkerPresence
from ..control.controller import Controller
from ..control.updates import Updates
from ..control.uploads import Uploads
from ..nats.connection import CLOSE_TIMEOUT_S, Connection, open_connection, publish, subscribe
from ..nats.permitted import check_permitted
from ..protocol.fleet.lease import DEFAULT_LEASE_S
from ..protocol.fleet.presence_table import LEASE_MARGIN_S, LostWorker
from ..tracing.spans import TracingStats
from .config import ClientConfig
from .dispatch import RequestDispatcher
from .durations import Durations
from .exchange import AttemptCoordinator
from .links import ClientLinks
from .losses import Losses
from .pauses import PauseWarnings
from .presence_watcher import PresenceWatcher

__all__ = ["ClientRuntime", "ClientStats", "open_client_runtime"]

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
"""Between announcements, and between two words on a link where nothing else is to be said."""
LEASE_S: Final = 5.0
"""Five heartbeats: a busy machine may delay a few, and a dead client is still noticed soon."""
UNHEARD_S: Final = DEFAULT_LEASE_S + LEASE_MARGIN_S
"""A worker that lives announces itself several times between its offer to run a request and that much later."""
LEASE_CHECK_S: Final = 0.5
"""How often the leases of workers are looked at: a tenth of a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """Counters since the client was connected: what was done, and everything that was dropped or repeated."""

    requests: int
    """Published: one for each attempt of each child of each request."""
    direct: int
    """Those of them that went straight to the worker at which they were placed."""
    placed: Mapping[str, int]
    """By reason (`PlacementReason`): where requests went when it was decided, the queue among them."""
    placements_refused: int
    """Placed requests that their worker did not take; they went to the queue."""
    expected_cached_tokens: int
    """Of placed requests that have ended: prompt tokens that were expected in the caches of their workers."""
    placed_cached_tokens: int
    """Of the same requests: prompt tokens that their workers found there."""
    republished: int
    """Publishes repeated for want of the queue's answer."""
    prefill_legs: int
    """Those of them that went straight to a prefill worker, to be gone on with by a decode worker."""
    prefill_fallbacks: Mapping[str, int]
    """By reason (`PrefillFallback`): attempts that a decode worker served alone beside prefill workers."""
    orphans: int
    """Requests that had left the queue without a worker's offer, and were published again."""
    attempts_lost: int
    """Attempts given up because of their worker or of what was under way; another attempt or an error followed."""
    frames: int
    """Frames that decoded, heartbeats included."""
    duplicate_frames: int
    """Frames taken before."""
    missing_frames: int
    """Frames dropped because one before them was missing; all of them were asked for again."""
    stale_frames: int
    """Frames of a link, or of a life of either side, that was over."""
    resends_asked: int
    """How often missing frames were asked for."""
    late_chunks: int
    """Chunks of calls and attempts that had ended; their workers were told to stop."""
    bad_messages: int
    """Frames that did not decode."""
    dropped_msgs: int
    """Messages that nats-py dropped unread; frames among them were asked for again."""
    spans_exported: int
    """Spans that the collector has taken; of a provider that was passed in, those that it was given."""
    spans_failed: int
    """Spans that were sent, and that the collector did not take."""
    spans_dropped: int
    """Spans that were not sent: too many in a second, or no room in the exporter's queue."""
    unread_bytes: int
    """Bytes of results that callers have not taken: of now, not since the start."""
    retries: Mapping[str, int]
    """By model: attempts that followed one that was given up."""
    queue_waits: Mapping[str, Durations]
    """By model: from the publishing of a request to a worker's offer to run it, again for each attempt."""


class ClientRuntime:
    """The parts, connected to each other. Made by `open_client_runtime`; lives on the bus thread."""

    def __init__(self, config: ClientConfig, nats: Connection) -> None:
        identity = config.client, config.incarnation
        self._config = config
        self._started_at = time.monotonic()
        self._outage_s = 0.0
        self.nats = nats
        self.coordinator = AttemptCoordinator()
        self.losses = Losses(self.coordinator)
        self.watcher = PresenceWatcher(
            nats,
            config.subjects,
            self._on_worker_lost,
            self._on_fleet_change,
            self.coordinator.on_worker_survival,
            self._on_worker_heard,
        )
        self.controller = Controller(nats, config.subjects, config.client, self.watcher)
        self.updates = Updates(self.controller, Uploads(config.server, config.subjects))
        self.links = ClientLinks(
            nats, config.subjects, identity, self.coordinator, self.losses, self.watcher.table.incarnations_of
        )
        self.dispatcher = RequestDispatcher(nats, config, self.watcher, self.coordinator)
        self.pauses = PauseWarnings(self.watcher, self.coordinator, self.controller.store)
        self.coordinator.connect(self.dispatcher, self.links)

    def __repr__(self) -> str:
        """One line with the parts."""
        return f"<ClientRuntime {self.coordinator} {self.dispatcher} {self.links} {self.watcher} {self.controller}>"

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def _on_worker_lost(self, gone: LostWorker) -> None:
        self.dispatcher.placement.remove_worker(gone)
        self.losses.mark_worker_lost(gone)
        self.controller.collector.mark_lost(gone)

    def _on_worker_heard(self, presence: WorkerPresence) -> None:
        self.dispatcher.placement.update(presence)
        self.dispatcher.wake()

    def _on_fleet_change(self) -> None:
        self.dispatcher.wake()
        self.pauses.update_paused()

    async def start(self) -> None:
        """Listen, and say that this client is there.

        Raises:
            BusBroken: the connection is gone.
        """
        await subscribe(self.nats, self._config.subjects.presences, self.watcher.receive)
        await subscribe(self.nats, self._config.subjects.frames_to(self._config.client), self.links.receive)
        await subscribe(self.nats, self._config.subjects.client(self._config.client), self._on_newer_client)
        await self.controller.collector.start()
        await self.dispatcher.publisher.start()
        await check_permitted(self.nats)
        # In order on one connection: the server knows the subscriptions before any request can cause an answer.
        await self._publish_presence(ClientState.LIVE)
        await self.watcher.restart_watch()

    async def _on_newer_client(self, message: Msg) -> None:
        """Give up where a younger client has taken this one's name: to the workers this life is over."""
        try:
            presence = decode_client_presence(message.data)
        except RemoteProtocolError as exc:
            logger.warning("presence.bad subject=%s error=%s", message.subject, exc)
            return
        is_other = presence.incarnation != self._config.incarnation and presence.state is not ClientState.CLOSED
        if is_other and presence.uptime_s < self._uptime_s:
            logger.error("client.superseded client=%s by=%s", self._config.client, presence.incarnation)
            reason = f"another client named {self._config.client} was connected; names must differ"
            self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, reason)

    async def check_leases(self) -> None:
        """Renew this client's lease, look at those of the workers, repeat what may be lost; until cancelled."""
        is_beat = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(LEASE_CHECK_S)
            waited_s = time.monotonic() - before
            if not self.nats.is_connected:
                # Lease clocks stand still: nobody could be heard.
                self._handle_outage(waited_s)
                continue
            if waited_s > 2 * LEASE_CHECK_S:
                # The process stood still: what workers said meanwhile has yet to be read.
                await self.restart_leases()
                continue
            self.watcher.expire()
            self.losses.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic() - UNHEARD_S)
            self.coordinator.check_suspects()
            is_beat = not is_beat
            if is_beat:
                await self._send_heartbeat()

    def _handle_outage(self, waited_s: float) -> None:
        """Give up all workers when the connection has been down for a lease and then for `worker_grace_s`.

        A worker that dies while the server is there is given up after the same time. Time in which this process stood
        still does not count: it may not have tried to reconnect.
        """
        if waited_s > 2 * LEASE_CHECK_S:
            self.dispatcher.restart_timers()
            return
        self._outage_s += waited_s
        if self._outage_s >= UNHEARD_S + self._config.worker_grace_s:
            self.watcher.remove_all(f"NATS has not answered for {self._outage_s:.0f} s")
            self.losses.mark_unheard_lost(self.watcher.table.incarnations(), time.monotonic())
            self.dispatcher.fail_unserved(grace_s=0.0)

    @property
    def _is_observer(self) -> bool:
        """Workers have nothing of this client, and its name belongs to whoever has the same credentials.

        It says nothing to workers then, or it would take the name from one that works.
        """
        return self._config.server.credentials is not None and not self.dispatcher.stats.requests

    async def _send_heartbeat(self) -> None:
        if self._is_observer:
            return
        await self._publish_presence(ClientState.LIVE)
        self.links.prune(self.watcher.table.get)
        self.links.repeat_acks()

    async def restart_leases(self) -> None:
        """Go on after an outage of the connection or of this process: nobody is missing who could not be heard."""
        logger.info("client.resumed client=%s", self._config.client)
        self._outage_s = 0.0
        self.dispatcher.restart_timers()
        try:
            await self._send_heartbeat()
            await self.watcher.restart_watch()
        except BusBroken as exc:
            # Gone again; the next reconnect begins anew.
            logger.warning("client.not_resumed client=%s error=%s", self._config.client, exc)

    def handle_error(self, error: Exception) -> None:
        """Act on what the connection reports."""
        if isinstance(error, PermissionDenied):
            self.coordinator.fail_all(ErrorCode.PERMISSION_DENIED, str(error))
        elif isinstance(error, BusBroken):
            self.coordinator.fail_all(ErrorCode.FRAMES_LOST, str(error))
        elif not isinstance(error, SlowConsumerError):
            # Dropped frames are asked for again. One that a handler tripped over would trip it again.
            self.losses.mark_all_lost(f"a message could not be handled: {error!r}")

    async def close(self) -> None:
        """Fail what is open, and tell the workers that nobody waits any more."""
        self.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, "the client was closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # More than any abort: workers stop whatever they have of this life of the client.
                await self._publish_presence(ClientState.CLOSED)
        except TimeoutError:
            logger.warning("client.no_goodbye client=%s", self._config.client)

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
            logger.warning("presence.lost error=%s", exc)

    def stats(self, unread_bytes: int, spans: TracingStats) -> ClientStats:
        """The counters of all parts; any thread may ask."""
        sent = self.dispatcher
        parts = (sent.stats, sent.prefill.stats, sent.placement.stats, self.coordinator.stats, self.links.stats, spans)
        counters = {name: value for part in parts for name, value in asdict(part).items()}
        return ClientStats(
            **counters,
            republished=sent.publisher.stats.repeats,
            dropped_msgs=self.nats.counters().dropped_msgs,
            unread_bytes=unread_bytes,
            retries=dict(self.coordinator.retries),
            queue_waits=sent.queue_waits.copy(),
        )


@asynccontextmanager
async def open_client_runtime(config: ClientConfig) -> AsyncIterator[ClientRuntime]:
    """Connect, keep everything going until the block ends, and say goodbye.

    Cancellation, also by a failure of one of the tasks: says goodbye all the same, which is bounded.

    Raises:
        BusBroken: no server answers, or it does not let this user be a client.
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
                ]
                yield runtime
                for task in background:
                    task.cancel()
        except Exception as exc:
            # Boundary of the client: calls that wait in the owner's thread end too, also after a defect in a task.
            runtime.coordinator.fail_all(ErrorCode.CLIENT_CLOSED, f"the client has failed: {exc!r}")
            raise
        finally:
            await runtime.close()
    finally:
        await nats.shut()
