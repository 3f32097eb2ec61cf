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

from bus.client.config import ClientConfig
from bus.client.dispatch import Dispatch
from bus.client.durations import Durations
from bus.client.exchange import Exchange
from bus.client.fleet_watch import FleetWatch
from bus.client.links import ClientLinks
from bus.connection import CLOSE_TIMEOUT_S, Connection, close_connection, open_connection, publish, subscribe
from bus.control.commander import Commander
from bus.control.updates import Updates
from bus.control.uploads import Uploads
from bus.permitted import check_permitted
from bus.protocol.fleet_view import LEASE_MARGIN_S, Gone
from bus.protocol.lease import DEFAULT_LEASE_S
from schemas.errors import BusBroken, ErrorCode, PermissionDenied, RemoteProtocolError
from schemas.messages import decode_client_presence, encode_json
from schemas.presence import ClientPresence, ClientState

__all__ = ["ClientStats", "Traffic", "open_traffic"]

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
    """Messages published: one for each attempt of each child of each request."""
    direct: int
    """Those of them that went straight to the worker of their session."""
    republished: int
    """Publishes repeated for want of the queue's answer."""
    prefill_legs: int
    """Those of them that went straight to a prefill worker, to be gone on with by a decode worker."""
    prefill_fallbacks: Mapping[str, int]
    """By reason (`bus.protocol.prefill.Alone`): attempts that a decode worker served alone, in a fleet with such."""
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
    unread_bytes: int
    """Bytes of results that callers have not taken: of now, not since the start."""
    retries: Mapping[str, int]
    """By model: attempts that followed one that was given up."""
    queue_waits: Mapping[str, Durations]
    """By model: from the publishing of a request to a worker's offer to run it, again for each attempt."""


class Traffic:
    """The parts, connected to each other. Made by `open_traffic`; lives on the bus thread."""

    def __init__(self, config: ClientConfig, nats: Connection) -> None:
        identity = config.client, config.incarnation
        self._config = config
        self._started_at = time.monotonic()
        self.nats = nats
        self.exchange = Exchange()
        self.watch = FleetWatch(nats, config.subjects, self._worker_gone, self._fleet_changed)
        self.commander = Commander(nats, config.subjects, config.client, self.watch)
        self.updates = Updates(self.commander, Uploads(config.server, config.subjects))
        self.links = ClientLinks(nats, config.subjects, identity, self.exchange)
        self.dispatch = Dispatch(nats, config, self.watch, self.exchange)
        self.exchange.connect(self.dispatch, self.links)

    def __repr__(self) -> str:
        """One line with the parts."""
        return f"<Traffic {self.exchange} {self.dispatch} {self.links} {self.watch} {self.commander}>"

    @property
    def _uptime_s(self) -> float:
        return time.monotonic() - self._started_at

    def _worker_gone(self, gone: Gone) -> None:
        self.exchange.worker_gone(gone)
        self.commander.worker_gone(gone)

    def _fleet_changed(self) -> None:
        self.dispatch.look_again()

    async def start(self) -> None:
        """Listen, and say that this client is there.

        Raises:
            BusBroken: the connection is gone.
        """
        await subscribe(self.nats, self._config.subjects.presences, self.watch.receive)
        await subscribe(self.nats, self._config.subjects.frames_to(self._config.client), self.links.receive)
        await subscribe(self.nats, self._config.subjects.client(self._config.client), self._hear_namesake)
        await self.commander.start()
        await self.dispatch.start()
        await check_permitted(self.nats)
        # In order on one connection: the server knows the subscriptions before any request can cause an answer.
        await self._announce(ClientState.LIVE)
        await self.watch.listen_anew()

    async def _hear_namesake(self, message: Msg) -> None:
        """Give up where a younger client has taken this one's name: to the workers this life is over."""
        try:
            presence = decode_client_presence(message.data)
        except RemoteProtocolError as exc:
            logger.warning("presence.bad subject=%s error=%s", message.subject, exc)
            return
        is_other = presence.incarnation != self._config.incarnation and presence.state is not ClientState.CLOSED
        if is_other and presence.uptime_s < self._uptime_s:
            logger.error("client.superseded client=%s by=%s", self._config.client, presence.incarnation)
            why = f"another client named {self._config.client} was connected; names must differ"
            self.exchange.fail_all(ErrorCode.CLIENT_CLOSED, why)

    async def watch_leases(self) -> None:
        """Renew this client's lease, look at those of the workers, repeat what may be lost; until cancelled."""
        is_beat = False
        while True:
            before = time.monotonic()
            await asyncio.sleep(LEASE_CHECK_S)
            if not self.nats.is_connected:
                # Lease clocks stand still: nobody could be heard.
                continue
            if time.monotonic() - before > 2 * LEASE_CHECK_S:
                # The process stood still: what workers said meanwhile has yet to be read.
                await self.begin_anew()
                continue
            self.watch.expire()
            self.exchange.lose_unheard(self.watch.lives(), time.monotonic() - UNHEARD_S)
            is_beat = not is_beat
            if is_beat:
                await self._beat()

    @property
    def _only_looks(self) -> bool:
        """Workers have nothing of this client, and its name belongs to whoever has the same credentials.

        It says nothing to workers then, or it would take the name from one that works.
        """
        return self._config.server.credentials is not None and not self.dispatch.stats.requests

    async def _beat(self) -> None:
        if self._only_looks:
            return
        await self._announce(ClientState.LIVE)
        self.links.prune(self.watch.get)
        self.links.repeat()

    async def begin_anew(self) -> None:
        """Go on after an outage of the connection or of this process: nobody is missing who could not be heard."""
        logger.info("client.resumed client=%s", self._config.client)
        self.dispatch.begin_anew()
        try:
            await self._beat()
            await self.watch.listen_anew()
        except BusBroken as exc:
            # Gone again; the next reconnect begins anew.
            logger.warning("client.not_resumed client=%s error=%s", self._config.client, exc)

    def take_error(self, error: Exception) -> None:
        """Act on what the connection reports."""
        if isinstance(error, PermissionDenied):
            self.exchange.fail_all(ErrorCode.PERMISSION_DENIED, str(error))
        elif isinstance(error, BusBroken):
            self.exchange.fail_all(ErrorCode.FRAMES_LOST, str(error))
        elif not isinstance(error, SlowConsumerError):
            # Dropped frames are asked for again. One that a handler tripped over would trip it again.
            self.exchange.lose_all(f"a message could not be handled: {error!r}")

    async def close(self) -> None:
        """Fail what is open, and tell the workers that nobody waits any more."""
        self.exchange.fail_all(ErrorCode.CLIENT_CLOSED, "the client was closed")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                # More than any abort: workers stop whatever they have of this life of the client.
                await self._announce(ClientState.CLOSED)
        except TimeoutError:
            logger.warning("client.no_goodbye client=%s", self._config.client)

    async def _announce(self, state: ClientState) -> None:
        if self._only_looks:
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

    def stats(self, unread_bytes: int) -> ClientStats:
        """The counters of all parts; any thread may ask."""
        parts = (self.dispatch.stats, self.dispatch.prefill.stats, self.exchange.stats, self.links.stats)
        counters = {name: value for part in parts for name, value in asdict(part).items()}
        return ClientStats(
            **counters,
            republished=self.dispatch.republished,
            dropped_msgs=self.nats.counters().dropped_msgs,
            unread_bytes=unread_bytes,
            retries=dict(self.exchange.retries),
            queue_waits=self.dispatch.queue_waits.copy(),
        )


@asynccontextmanager
async def open_traffic(config: ClientConfig) -> AsyncIterator[Traffic]:
    """Connect, keep everything going until the block ends, and say goodbye.

    Cancellation, also by a failure of one of the tasks: says goodbye all the same, which is bounded.

    Raises:
        BusBroken: no server answers, or it does not let this user be a client.
    """
    traffic: Traffic | None = None

    async def on_reconnect() -> None:
        if traffic is not None:
            await traffic.begin_anew()

    def on_error(error: Exception) -> None:
        if traffic is not None:
            traffic.take_error(error)

    name = f"rollbus client {config.client}"
    nats = await open_connection(config.server, name=name, on_reconnect=on_reconnect, on_error=on_error)
    try:
        traffic = Traffic(config, nats)
        await traffic.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(traffic.links.run(), name="client.links"),
                    tasks.create_task(traffic.dispatch.run(), name="client.dispatch"),
                    tasks.create_task(traffic.dispatch.publish_again(), name="client.publish_again"),
                    tasks.create_task(traffic.dispatch.look_after(), name="client.look_after"),
                    tasks.create_task(traffic.watch_leases(), name="client.leases"),
                ]
                yield traffic
                for task in background:
                    task.cancel()
        except Exception as exc:
            traffic.exchange.fail_all(ErrorCode.CLIENT_CLOSED, f"the client has failed: {exc!r}")
            raise
        finally:
            await traffic.close()
    finally:
        await close_connection(nats)
