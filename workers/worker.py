"""One worker: takes requests from the bus, feeds an engine, sends what it makes back to who asked.

Its parts, each in a module of its own: `life` (state, incarnation, lease), `intake` (what comes in), `engine_runner`
(the engine), `links` (all that is open, and what clients have not taken), `sending` (what goes out). They decide; this
one puts them together, hears what comes from outside and ends them in order.

Every request that was taken ends with one terminal chunk to its client, unless the process is killed or its lease runs
out: of that, clients learn by the lease or by the new incarnation.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial

from nats.aio.msg import Msg

from bus.connection import Connection, close_connection, open_connection, subscribe
from bus.permitted import check_permitted
from bus.protocol.states import WorkerEvent
from bus.queue.puller import QueuePuller
from bus.queue.streams import ensure_queue
from bus.subjects import Subjects
from schemas.errors import BusBroken, BusClosed, EngineDead, ErrorCode, RemoteProtocolError, RollbusError
from schemas.limits import MAX_ERROR_CHARS
from schemas.messages import decode_client_presence, decode_link_message
from schemas.presence import LoraInfo, WorkerPresence, WorkerState
from workers.config import WorkerConfig
from workers.control.assembly import make_control, make_sources
from workers.control.control import Control
from workers.control.flow import Flow
from workers.control.parts import Parts
from workers.engine import Engine
from workers.engine_runner import EngineRunner
from workers.held import Instructions
from workers.intake import Intake
from workers.life import HEARTBEAT_S, Life
from workers.links import Links
from workers.routes import ClientLink, Route
from workers.sending import Sending
from workers.worker_stats import WorkerStats

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

KEEP_S = 2.0
"""Between two words to the queue about a request in hand: at less than half of its `ack_wait_s`, one may be lost."""
QUEUE_RETRY_S = 1.0
"""Between attempts to make the queue, for a server that starts, or has no JetStream yet."""
WIND_DOWN_S = 2.0
"""For clients to acknowledge the last frames of a worker that stops."""


class Worker:
    """Serves one engine on the bus.

    Args:
        config: names, addresses and bounds.
        engine: not started; `run` starts and closes it.
    """

    def __init__(self, config: WorkerConfig, engine: Engine) -> None:
        self._config = config
        self._engine = engine
        self._subjects = Subjects(config.fleet)
        self._started_at = time.monotonic()
        self._last_error: str | None = None
        self._death: EngineDead | None = None
        self._stopping = asyncio.Event()
        self._sources = make_sources(config)
        # Made by `run`, once there is a connection.
        self._nats: Connection
        self._runner: EngineRunner
        self._life: Life
        self._links: Links
        self._intake: Intake
        self._sending: Sending
        self._flow: Flow
        self._control: Control
        self._puller: QueuePuller
        self._max_payload = 0
        self._num_free = 0
        self._bad_messages = 0

    def __repr__(self) -> str:
        """One line with the parts."""
        parts = [self.__dict__.get(f"_{name}") for name in ("life", "intake", "links", "sending", "runner", "control")]
        return f"<Worker {self._config.worker_id} model={self._config.model} {' '.join(map(repr, parts))}>"

    def stop(self) -> None:
        """Ask `run` to end: open requests fail with `worker_stopped`, then the engine is closed."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            BusBroken: no NATS server answers, or it does not let this user be a worker.
            EngineDead: the engine could not be started or died; every open request was told.
        """
        self._nats = await open_connection(
            self._config.server,
            name=f"rollbus worker {self._config.worker_id}",
            on_reconnect=self._on_reconnect,
            on_error=self._on_error,
        )
        try:
            self._assemble()
            await self._sources.clear()
            await subscribe(self._nats, self._subjects.ping, self._on_ping)
            await subscribe(self._nats, self._subjects.clients, self._on_client_presence)
            await self._control.listen()
            await check_permitted(self._nats)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work, name=f"worker.{name}") for name, work in self._work().items()]
                await self._stopping.wait()
                await self._wind_down()
                for task in background:
                    task.cancel()
            self._life.advance(WorkerEvent.STOPPED if self._death is None else WorkerEvent.DIED)
            await self._life.publish()
            logger.info("worker.ended worker=%s stats=%s", self._config.worker_id, self.stats())
        finally:
            try:
                await self._engine.close()
                await self._sources.clear()
            finally:
                await close_connection(self._nats)
        if self._death is not None:
            raise self._death
        if (broken := self._nats.lost or self._nats.denials.first) is not None:
            raise broken

    def _assemble(self) -> None:
        config, nats = self._config, self._nats
        self._runner = EngineRunner(self._engine, timeout_s=config.engine_timeout_s)
        self._life = Life(config, nats, describe=self.presence, on_fenced=self._on_fenced, on_changed=self._on_changed)
        self._max_payload = nats.max_payload
        self._links = Links(config, self._life.incarnation, max_payload=self._max_payload)
        self._sending = Sending(nats, self._life, self._links, on_broken=self._on_broken)
        self._intake = Intake(config, self._life, self._links, self._runner, self._carry_out, self._on_room)
        self._puller = QueuePuller(
            nats, self._subjects, config.model, room=self._intake.queue_room, on_request=self._intake.take
        )
        self._flow = Flow(self._runner, self._links, self._intake, self._puller, carry_out=self._carry_out)
        parts = Parts(
            config=config,
            nats=nats,
            life=self._life,
            links=self._links,
            sending=self._sending,
            flow=self._flow,
            runner=self._runner,
            describe=self.presence,
            on_dead=self._die,
        )
        self._control = make_control(parts, self._sources)

    def _work(self) -> dict[str, Coroutine[None, None, None]]:
        """What runs side by side until the worker stops."""
        return {
            "life": self._life.run(),
            "engine": self._run_engine(),
            "abort": self._runner.run_aborts(),
            "pull": self._pull(),
            "admit": self._intake.run(),
            "frames": self._sending.run_frames(),
            "words": self._sending.run_words(),
            "keep": self._keep_house(),
            **self._control.work(),
        }

    async def _run_engine(self) -> None:
        """Start the engine and hand on what it makes, until it dies."""
        try:
            await self._runner.start()
            worker = self._config.worker_id
            await subscribe(self._nats, self._subjects.links_to(worker), self._on_link_message)
            await subscribe(self._nats, self._subjects.directs_to(worker), self._on_direct)
            await self._ensure_queue()
            # What announces this worker follows the subscriptions on the same connection: who reads it is heard here.
            self._control.start()
            await self._runner.run(self._flow.take)
        except EngineDead as exc:
            self._die(exc)

    async def _ensure_queue(self) -> None:
        """Wait until there is a queue: who hears that this worker serves publishes to it."""
        # Mostly made by the pulling task, while the engine was starting.
        while not self._puller.stats.ensured:
            try:
                await ensure_queue(self._nats, self._subjects, self._config.model)
                return
            except BusBroken as exc:
                logger.warning("worker.waits_for_queue worker=%s error=%s", self._config.worker_id, exc)
            await asyncio.sleep(QUEUE_RETRY_S)

    async def _pull(self) -> None:
        try:
            await self._puller.run()
        except (BusBroken, BusClosed) as exc:
            self._give_up(exc)

    async def _keep_house(self) -> None:
        """Every second: who is late, who needs to hear that this worker is there, does the engine move?"""
        beats = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            beats += 1
            try:
                self._runner.watch(HEARTBEAT_S)
            except EngineDead as exc:
                self._die(exc)
            if self._nats.is_connected and self._life.may_speak():
                self._carry_out(self._links.expire(time.monotonic()))
                self._links.routes.beat()
                if beats % round(KEEP_S / HEARTBEAT_S) == 0:
                    await self._sending.keep([*self._links.messages, *self._intake.messages])
            self._control.look()
            self._sending.wake()
            self._puller.wake()

    # What is heard

    async def _on_direct(self, message: Msg) -> None:
        self._intake.take_direct(message.subject.split(".")[-2], message.data)

    async def _on_link_message(self, message: Msg) -> None:
        try:
            link_message = decode_link_message(message.data)
        except RemoteProtocolError as exc:
            self._count_bad(message, exc)
            return
        client = message.subject.split(".")[-2]
        self._carry_out(self._links.on_link_message(client, link_message, time.monotonic()))

    async def _on_client_presence(self, message: Msg) -> None:
        try:
            presence = decode_client_presence(message.data)
            client = message.subject.rpartition(".")[2]
            if presence.client != client:
                raise RemoteProtocolError(f"client {client} signed as {presence.client}")
        except RemoteProtocolError as exc:
            self._count_bad(message, exc)
            return
        self._carry_out(self._links.on_presence(presence, time.monotonic()))

    async def _on_ping(self, _message: Msg) -> None:
        self._life.announce()

    def _count_bad(self, message: Msg, error: RemoteProtocolError) -> None:
        self._bad_messages += 1
        logger.warning("message.bad subject=%s error=%s", message.subject, error)

    async def _on_reconnect(self) -> None:
        """Links go on: heartbeats tell what was lost, and it is sent again."""
        self._links.renew_leases(time.monotonic())
        if self._nats.max_payload < self._max_payload:
            self._life.fence("frames are too large for what the server takes now")
        self._life.announce()
        self._control.reader.look()
        self._sending.wake()
        self._puller.wake()

    def _on_error(self, error: Exception) -> None:
        """Stop when the server has ended the connection for good; the rest is counted by the connection."""
        if isinstance(error, BusBroken):
            self._give_up(error)

    def _on_broken(self, route: Route) -> None:
        if isinstance(route, ClientLink):
            todo = Instructions()
            self._links.break_link(route, todo)
            self._carry_out(todo)

    # What follows

    def _carry_out(self, todo: Instructions) -> None:
        self._runner.abort(todo.abort)
        naks = (partial(message.nak, delay_s) for message, delay_s in todo.nak)
        self._sending.settle([*(message.ack for message in todo.ack), *naks])
        self._flow.look()
        if self._runner.num_free != self._num_free:
            self._num_free = self._runner.num_free
            self._puller.wake()

    def _on_room(self) -> None:
        self._puller.wake()

    def _on_changed(self) -> None:
        self._control.look_again()
        self._sending.wake()
        self._puller.wake()

    def _on_fenced(self) -> None:
        """Give up all that is open, without a word to anyone."""
        self._intake.drop()
        self._sending.clear()
        self._control.fence()
        self._max_payload = self._nats.max_payload
        todo = self._links.fence(self._life.incarnation, time.monotonic(), max_payload=self._max_payload)
        self._runner.abort(todo.abort)

    def _die(self, death: EngineDead) -> None:
        if self._death is None:
            logger.error("engine.dead worker=%s error=%s", self._config.worker_id, death)
            self._death = death
            self._give_up(death)

    def _give_up(self, error: RollbusError) -> None:
        self._last_error = self._last_error or str(error)[:MAX_ERROR_CHARS]
        self._stopping.set()

    async def _wind_down(self) -> None:
        """End what is open and see the last frames off, until all clients that live have them."""
        code, reason = ErrorCode.WORKER_STOPPED, "the worker was stopped"
        if self._death is not None:
            code, reason = ErrorCode.ENGINE_DEAD, f"the engine died: {self._death}"
        # What its engine never saw did not kill it: that goes back to the queue.
        self._puller.pause()
        self._intake.stop()
        self._carry_out(self._links.fail_all(code, reason))
        self._life.announce()
        try:
            async with asyncio.timeout(WIND_DOWN_S if self._nats.lost is None else 0):
                await self._sending.wait_settled()
        except TimeoutError:
            logger.warning("worker.unsettled worker=%s links=%r", self._config.worker_id, self._links)
            # What nobody confirmed by now the next worker may answer.
            await self._sending.give_back(self._links.messages)

    def stats(self) -> WorkerStats:
        """The counters; once `run` has connected."""
        return WorkerStats(
            intake=replace(self._intake.stats),
            links=replace(self._links.stats),
            puller=replace(self._puller.stats),
            frames=self._sending.frames,
            frames_lost=self._sending.frames_lost,
            bad_messages=self._bad_messages,
            bad_commands=self._control.bad_messages,
            times_fenced=self._life.times_fenced,
            connection=self._nats.counters(),
            credit_stalls=self._links.routes.credit_stalls,
        )

    def presence(self) -> WorkerPresence:
        """What this worker says of itself now."""
        # First, as it looks at the lease, which may have run out just now.
        free_slots = max(self._intake.room(), 0)
        versions, reconciler, state = self._links.versions, self._control.reconciler, self._life.state
        return WorkerPresence(
            worker=self._config.worker_id,
            incarnation=self._life.incarnation,
            model=self._config.model,
            state=state,
            weight_version=versions.weight_version,
            in_flight=len(self._links),
            free_slots=free_slots,
            uptime_s=round(time.monotonic() - self._started_at, 3),
            lease_s=self._config.lease_s,
            capabilities=None if state is WorkerState.STARTING else self._runner.capabilities,
            held_bytes=self._links.routes.held_bytes,
            last_error=self._last_error or self._control.problem,
            model_path=self._config.model_path,
            pause_mode=reconciler.pause_mode if state is WorkerState.PAUSED else None,
            queued=self._intake.num_waiting,
            target_version=versions.target_version if self._control.reader.is_fresh else None,
            epoch=reconciler.epoch,
            loras=tuple(LoraInfo(name=name, version=version) for name, version in versions.loras.items()),
            lease_age_s=round(self._life.lease_age_s, 3),
            counters=self.stats().counters(),
        )
