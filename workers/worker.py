"""One worker: it receives requests over the bus, runs them on an engine and publishes their chunks to the clients.

The worker creates its parts, subscribes to their messages and ends them in order: `lifecycle` (state, incarnation,
lease), `intake` (incoming requests), `runner` (the engine), `in_flight` (pause, resume and held steps), `links` (open
requests and unacknowledged chunks), `publisher` (outgoing messages) and `control` (commands). A supervisor may start it
before the NATS server, so it waits for the server and for the queue of its model.

Every accepted request ends with one terminal chunk to its client, unless the process is killed or its lease expires. In
these cases, clients detect the end by the expired lease or by the new incarnation.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..bus.control.store import DesiredStore
from ..bus.nats.connection import Connection, ConnectionStats, check_permitted, open_connection, subscribe
from ..bus.nats.library import Msg
from ..bus.objects.reader import ObjectReader
from ..bus.protocol.fleet.leases import FloodMeter
from ..bus.protocol.states import WorkerEvent
from ..bus.queue.puller import PullerStats, QueuedRequest, QueuePuller
from ..bus.subjects import WORKER_CONNECTION, Subjects
from ..schemas.errors import (
    BusBroken,
    BusClosed,
    EngineDead,
    ErrorCode,
    RemoteProtocolError,
    RequestError,
    RollbusError,
)
from ..schemas.limits import MAX_ERROR_CHARS
from ..schemas.messages import decode_client_presence, decode_link_message
from ..schemas.presence import LoraInfo, WorkerCounters, WorkerPresence, WorkerState
from ..schemas.telemetry import RequestTimeline
from .config import WorkerConfig
from .control.acks import AckPublisher
from .control.commands import CommandHandler
from .control.desired import DesiredReader
from .control.loras import Loras
from .control.reconciler import Reconciler
from .control.registers import Registers
from .control.staging import Stager, StagerStats
from .control.transfer import Transfer
from .control.weights import WeightManager
from .engines.engine import Engine, EngineRunner
from .inbox import WorkerInbox
from .lifecycle import HEARTBEAT_S, HOST, WorkerLifecycle, log_name
from .requests.in_flight import InFlightRequests
from .requests.intake import IntakeStats, RequestIntake
from .requests.links import WorkerLinks
from .requests.outbound import Outbound, OutboundLink
from .requests.publisher import OutboundPublisher
from .requests.steps import WorkerLinkStats
from .requests.table import Instructions
from .sources.sources import WeightSources
from .sources.threads import NICE

logger = logging.getLogger(__name__)

KEEP_S = 2.0
"""Seconds between two in-progress acks of a queue message: below half of `ack_wait_s`, so that one ack may be lost."""
WIND_DOWN_S = 2.0
"""Seconds for clients to acknowledge the last frames of a worker that ends by a failure."""
SETTLE_S = 1.0
"""Seconds within which a drained worker without requests shows the state `drained`, unless it loads weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counters since the start. Every message that a worker drops is counted."""

    intake: IntakeStats
    links: WorkerLinkStats
    puller: PullerStats
    frames: int
    """Published frames, including repeated ones."""
    frames_lost: int
    """Frames that could not be published. A link sends them again."""
    bad_messages: int
    """Messages of clients that could not be decoded."""
    bad_commands: int
    """Commands that could not be decoded and had no usable id or controller to answer, and refused desired states."""
    times_fenced: int
    connection: ConnectionStats
    """Messages that were dropped before the worker received them, and messages whose handling failed."""
    credit_stalls: int
    """Number of times that chunks waited for credit of the client."""
    stagings: StagerStats

    def counters(self) -> WorkerCounters:
        """Return the counters that presence contains."""
        counted: dict[str, Any] = dict(zip(_COUNTED, _READ_COUNTED(self), strict=True))
        counted |= self.intake.placed_for
        counted["returned"] = self.intake.returned + self.intake.too_new + self.puller.given_back
        counted["fences"] = self.times_fenced
        for name in _SECONDS:
            counted[name] = round(counted[name], 3 if name.startswith("weights_") else 6)
        return WorkerCounters(**counted)


# Presence has the counters every second, so look up only once which part has each of them.
_PARTS = {"": WorkerStats, "intake.": IntakeStats, "links.": WorkerLinkStats, "stagings.": StagerStats}
_PARTS["connection."] = ConnectionStats
_COUNTED = {
    name: part + name
    for part, stats in _PARTS.items()
    for name in WorkerCounters.__struct_fields__
    if hasattr(stats, name)
}
_READ_COUNTED = attrgetter(*_COUNTED.values())
_SECONDS = [name for name in _COUNTED if name.endswith("_s")]


class Worker:
    """Serves one engine on the bus.

    Args:
        config: names, addresses and limits.
        engine: an engine that is not started. `run` starts and closes it.
        on_request_ended: called with the timeline of each request as soon as the request ends. It must not block.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        on_request_ended: Callable[[RequestTimeline], None] | None = None,
    ) -> None:
        self._on_request_ended = on_request_ended
        self._config = config
        self._engine = engine
        self._subjects = Subjects(config.fleet)
        self._started_at = time.monotonic()
        self._log = log_name()
        self._last_error: str | None = None
        self._death: EngineDead | None = None
        self._stopping = asyncio.Event()
        self._was_told_to_stop = False
        self._drain_reason: str | None = None
        # Seconds to wait for acknowledgements of the last frames.
        self._wind_down_s = config.drain_s
        self._sources = make_sources(config)
        # `run` creates these after it has connected.
        self._nats: Connection
        self._runner: EngineRunner
        self._lifecycle: WorkerLifecycle
        self._inbox: WorkerInbox
        self._links: WorkerLinks
        self._intake: RequestIntake
        self._publisher: OutboundPublisher
        self._in_flight: InFlightRequests
        self._control: CommandHandler
        self._puller: QueuePuller
        self._max_payload = 0

    def __repr__(self) -> str:
        """One line with the state and the open requests."""
        lifecycle = self.__dict__.get("_lifecycle")
        state = "not started" if lifecycle is None else lifecycle.state
        links = self.__dict__.get("_links")
        return f"<Worker {self._config.worker_id} model={self._config.model} state={state} {links!r}>"

    def stop(self) -> None:
        """Stop `run`: the worker drains itself for at most `drain_s`, then the engine closes."""
        self._was_told_to_stop = True
        self._stopping.set()

    def stop_now(self) -> None:
        """Stop `run` without waiting for clients. The open requests have failed, or fail when the lease expires."""
        self._wind_down_s = 0.0
        self.stop()
        if self.is_assembled:
            self._publisher.hurry()

    @property
    def is_stopping(self) -> bool:
        """True after `stop` or `stop_now`."""
        return self._was_told_to_stop

    def drain(self, reason: str) -> None:
        """Hand over all requests and accept no more until the process ends. Nothing is recorded.

        A worker that is not connected yet drains itself as soon as it is.
        """
        self._drain_reason = self._drain_reason or reason
        if self.is_assembled and not self._stopping.is_set():
            self._hand_over(ErrorCode.WORKER_STOPPED, reason)

    async def wait_drained(self, limit_s: float) -> bool:
        """Wait until this worker holds no request after `drain`. Return False if clients did not acknowledge in time.

        The state is then `drained`, except in a worker that starts, is fenced, loads weights or has invalid ones.
        """
        if not self.is_assembled:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self._publisher.wait_acknowledged()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SETTLE_S):
                        await self._publisher.wait_until(lambda: self._lifecycle.state is not WorkerState.UPDATING)
        except TimeoutError:
            pass
        return self._publisher.is_acknowledged

    async def run(self) -> None:
        """Serve until `stop` is called.

        Raises:
            BusBroken: no NATS server answers, or its permissions do not let this user be a worker.
            EngineDead: the engine did not start, or died. Every open request has failed.
            DuplicateWorker: another worker has the same id and keeps it.
        """
        self._nats = await open_connection(
            self._config.server,
            name=f"{WORKER_CONNECTION}{self._config.worker_id}",
            on_reconnect=self._on_reconnect,
            on_error=self._on_error,
        )
        try:
            self._assemble()
            await self._sources.clean_up()
            await self._inbox.subscribe(self._subjects.ping, self._on_ping, FloodMeter())
            await self._inbox.subscribe(self._subjects.pings, self._on_ping, FloodMeter())
            await self._inbox.subscribe(self._subjects.clients, self._on_client_presence, FloodMeter())
            await subscribe(
                self._nats, self._subjects.presence(self._config.worker_id), self._lifecycle.receive_presence
            )
            await self._control.subscribe(self._inbox)
            await check_permitted(self._nats)
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work, name=f"worker.{name}") for name, work in self._work().items()]
                await self._stopping.wait()
                await self._wind_down()
                for task in background:
                    task.cancel()
            self._lifecycle.transition(WorkerEvent.STOPPED if self._death is None else WorkerEvent.DIED)
            await self._lifecycle.publish_presence()
            logger.info("worker.ended worker=%s stats=%s", self._config.worker_id, self.stats())
        finally:
            try:
                await self._engine.close()
                self._sources.close()
            finally:
                await self._nats.shut()
        if (fatal := self._lifecycle.duplicate or self._death) is not None:
            raise fatal
        if (broken := self._nats.lost or self._nats.denials.first) is not None:
            raise broken

    def _assemble(self) -> None:
        config, nats = self._config, self._nats
        self._runner = EngineRunner(self._engine, timeout_s=config.engine_timeout_s)
        self._lifecycle = WorkerLifecycle(
            config,
            nats,
            describe=self.presence,
            on_fenced=self._on_fenced,
            on_changed=self._on_changed,
            on_duplicate=self._give_up,
        )
        self._max_payload = nats.max_payload
        self._links = WorkerLinks(config, self._lifecycle.incarnation, max_payload=self._max_payload)
        self._links.requests.timelines.on_ended = self._on_request_ended
        self._inbox = WorkerInbox(nats, self._on_unread)
        self._publisher = OutboundPublisher(nats, self._lifecycle, self._links, on_broken=self._on_broken)
        self._puller = QueuePuller(
            *(nats, self._subjects, config.model),
            room=lambda: self._intake.queue_room(),  # noqa: PLW0108 (the intake is created below)
            on_request=lambda message: self._intake.accept(message),  # noqa: PLW0108
        )
        self._intake = RequestIntake(config, self._lifecycle, self._links, self._runner, self._execute, self._puller)
        self._in_flight = InFlightRequests(self._runner, self._links, self._intake, self._puller, execute=self._execute)
        self._control = make_control(config, nats, self._lifecycle, self._in_flight, self._publisher, self._sources)
        self._control.on_restart = self.stop
        if self._drain_reason is not None:
            self.drain(self._drain_reason)

    def _work(self) -> dict[str, Coroutine[None, None, None]]:
        """Return the coroutines that run concurrently until the worker stops, by name."""
        return {
            "lifecycle": self._lifecycle.run(),
            "engine": self._guard(self._run_engine),
            "abort": self._runner.run_aborts(),
            "pull": self._until_broken(self._puller.run),
            "admit": self._intake.run(),
            "frames": self._publisher.publish_frames(),
            "acks": self._publisher.publish_acks(),
            "keep": self._keep_house(),
            "floods": self._until_broken(self._inbox.run),
            **{name: self._guard(work) for name, work in self._control.work().items()},
        }

    async def _guard(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run `work`. If the engine dies, stop the worker in order and do not cancel the other tasks at once."""
        try:
            await work()
        except EngineDead as exc:
            self._on_engine_dead(exc)

    async def _run_engine(self) -> None:
        """Start the engine, subscribe to requests, and forward the engine's steps.

        Raises:
            EngineDead: at the end of every run.
        """
        await self._control.reconciler.may_start.wait()
        await self._runner.start()
        self._links.begin(self._engine, time.monotonic())
        await self._lifecycle.wait_alone()
        await self._inbox.subscribe(self._subjects.links_to(self._config.worker_id), self._on_link_message)
        directs, intake = self._subjects.directs_to(self._config.worker_id), self._intake
        await self._inbox.subscribe(
            directs, self._on_direct, FloodMeter(lambda: intake.stats.placed + intake.num_waiting)
        )
        # Clients publish to the queue as soon as they know that a worker serves.
        await self._puller.was_ensured.wait()
        # The presence `serving` follows the subscriptions on the same connection, so messages of its receivers arrive.
        self._control.reconciler.start()
        await self._runner.run(self._in_flight.add_steps)

    async def _until_broken(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        try:
            await work()
        except (BusBroken, BusClosed) as exc:
            self._give_up(exc)

    async def _keep_house(self) -> None:
        """Every second: end overdue requests, send due heartbeats, and check that the engine makes progress."""
        for beats in itertools.count(1):
            await asyncio.sleep(HEARTBEAT_S)
            try:
                self._runner.watch(HEARTBEAT_S)
            except EngineDead as exc:
                self._on_engine_dead(exc)
            if self._nats.is_connected and self._lifecycle.may_publish():
                self._control.reconciler.check_read()
                self._execute(self._links.expire(time.monotonic()))
                self._intake.refuse_stalled()
                self._links.outbound.request_heartbeats()
                if beats % round(KEEP_S / HEARTBEAT_S) == 0:
                    messages = [*self._links.requests.messages, *self._intake.messages]
                    await self._publisher.publish_all([message.in_progress for message in messages])
            self._control.publish_due_acks()
            self._publisher.wake()
            self._puller.wake()

    def _on_direct(self, message: Msg) -> None:
        self._intake.accept_direct(message.subject.split(".")[-2], message.data)

    def _on_link_message(self, message: Msg) -> None:
        client = message.subject.split(".")[-2]
        self._execute(self._links.on_link_message(client, decode_link_message(message.data), time.monotonic()))

    def _on_client_presence(self, message: Msg) -> None:
        client = message.subject.rpartition(".")[2]
        presence = decode_client_presence(message.data)
        if presence.client != client:
            raise RemoteProtocolError(f"client {client} sent presence in the name of {presence.client}")
        self._execute(self._links.on_presence(presence, time.monotonic()))

    def _on_ping(self, _message: Msg) -> None:
        self._lifecycle.request_presence()

    def _on_unread(self) -> None:
        """Answer all pings that are not read, and do not judge clients whose presence is not read."""
        self._lifecycle.request_presence()
        self._links.leases.restart_leases(time.monotonic())

    async def _on_reconnect(self) -> None:
        """Continue the links. Heartbeats show clients which frames were lost, so that the worker can resend them."""
        self._links.leases.restart_leases(time.monotonic())
        if self._nats.max_payload < self._max_payload:
            self._lifecycle.fence("the server's max_payload is now smaller than the frames")
        self._lifecycle.request_presence()
        self._control.reader.request_read()
        self._publisher.wake()
        self._puller.wake()

    def _on_error(self, error: Exception) -> None:
        """Stop if the server ended the connection for good. The connection counts all other errors."""
        if isinstance(error, BusBroken):
            self._give_up(error)

    def _on_broken(self, outbound: Outbound) -> None:
        if isinstance(outbound, OutboundLink):
            instructions = Instructions()
            self._links.break_link(outbound, instructions)
            self._execute(instructions)

    def _execute(self, instructions: Instructions) -> None:
        if instructions.abort:
            self._intake.abort(instructions.abort)
        if instructions.ack or instructions.nak:
            acks = [partial(message.nak, delay_s) for message, delay_s in instructions.nak]
            if instructions.ack:
                acks.insert(0, partial(QueuedRequest.ack_all, instructions.ack))
            self._publisher.enqueue_acks(acks)
        else:
            self._publisher.wake()
        self._in_flight.wake_waiters()
        self._intake.check_slots()

    def _on_changed(self) -> None:
        self._control.on_state_changed()
        self._publisher.wake()
        self._puller.wake()

    def _on_fenced(self) -> None:
        """Remove all open requests and publish nothing about them."""
        self._intake.clear()
        self._publisher.clear()
        self._control.fence()
        self._max_payload = self._nats.max_payload
        instructions = self._links.fence(self._lifecycle.incarnation, time.monotonic(), max_payload=self._max_payload)
        self._runner.abort(instructions.abort)

    def _on_engine_dead(self, death: EngineDead) -> None:
        if self._death is None:
            logger.error("engine.died worker=%s error=%s", self._config.worker_id, death)
            self._death = death
            self._give_up(death)

    def _give_up(self, error: RollbusError) -> None:
        self._last_error = self._last_error or str(error)[:MAX_ERROR_CHARS]
        self._wind_down_s = min(self._wind_down_s, WIND_DOWN_S)
        self._stopping.set()

    def _hand_over(self, code: ErrorCode, reason: str) -> None:
        """Fail the open requests, which other workers resume, and accept no more."""
        # Requests that never reached the engine go back to the queue: they did not cause its death.
        if self._lifecycle.state is not WorkerState.STARTING:  # the start waits until the puller has the queue
            self._puller.pause()
        self._intake.stop()
        self._execute(self._links.fail(self._links.requests.names, RequestError(code=code, message=reason)))
        if self._death is None:
            self._control.reconciler.drain(reason)

    async def _wind_down(self) -> None:
        """End the open requests and publish the last frames until all live clients have acknowledged them."""
        code, reason = ErrorCode.WORKER_STOPPED, "the worker was stopped"
        if self._death is not None:
            code, reason = ErrorCode.ENGINE_DEAD, f"the engine died: {self._death}"
        self._hand_over(code, reason)
        self._lifecycle.request_presence()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wind_down_s if self._nats.lost is None else 0):
                await self._publisher.wait_acknowledged()
        if not self._publisher.is_acknowledged:
            logger.warning("worker.frame_acks_timed_out worker=%s links=%r", self._config.worker_id, self._links)
            # Clients have not acknowledged the offers of these requests, so other workers may run them.
            await self._publisher.publish_all([message.nak for message in self._links.requests.messages])

    def stats(self) -> WorkerStats:
        """Return the counters. Valid after `run` has connected."""
        live = self._live_stats()
        parts = {name: replace(getattr(live, name)) for name in ("intake", "links", "puller", "connection", "stagings")}
        return replace(live, **parts)

    def _live_stats(self) -> WorkerStats:
        return WorkerStats(
            intake=self._intake.stats,
            links=self._links.stats,
            puller=self._puller.stats,
            frames=self._publisher.frames,
            frames_lost=self._publisher.frames_lost,
            bad_messages=self._inbox.rejected.so_far + self._lifecycle.rejected.so_far + self._puller.rejected.so_far,
            bad_commands=self._control.rejected.so_far + self._control.reader.store.refused,
            times_fenced=self._lifecycle.times_fenced,
            connection=self._nats.counters(),
            credit_stalls=self._links.outbound.credit_stalls,
            stagings=self._control.reconciler.stager.stats,
        )

    def debug_state(self) -> dict[str, int | str]:
        """Return counts and states for tests and for reports of bugs. Names and values change without notice."""
        lanes = self._puller.lanes_waiting()
        return {
            "state": self._lifecycle.state.value,
            "epoch": self._control.reader.epoch,
            "requests": len(self._links.requests),
            "unacked_messages": len(self._links.requests.messages),
            "followers": self._intake.num_following,
            "lanes_waiting": "unknown" if lanes is None else ",".join(lanes),
        }

    @property
    def is_assembled(self) -> bool:
        """True after `run` has connected and `presence` can be called."""
        return "_control" in self.__dict__

    def presence(self) -> WorkerPresence:
        """Return the current presence. Check first whether the lease has expired."""
        free_slots, uptime_s = max(self._intake.room(), 0), time.monotonic() - self._started_at
        versions, reconciler, state = self._links.versions, self._control.reconciler, self._lifecycle.state
        return WorkerPresence(
            worker=self._config.worker_id,
            incarnation=self._lifecycle.incarnation,
            model=self._config.model,
            state=state,
            weight_version=versions.weight_version,
            in_flight=len(self._links.requests),
            free_slots=free_slots,
            uptime_s=round(uptime_s, 3),
            lease_s=self._config.lease_s,
            capabilities=None if state is WorkerState.STARTING else self._runner.capabilities,
            held_bytes=self._links.outbound.held_bytes,
            last_error=self._last_error or self._control.problem or self._inbox.problem,
            model_path=self._config.model_path,
            pause_mode=reconciler.pause_mode if state is WorkerState.PAUSED else None,
            queued=self._intake.num_waiting,
            target_version=versions.target_version if self._control.reader.is_fresh else None,
            epoch=reconciler.epoch,
            loras=tuple(LoraInfo(name=name, version=version) for name, version in versions.loras.items()),
            lease_age_s=round(self._lifecycle.lease_age_s, 3),
            counters=self._live_stats().counters(),
            start_left_s=max(self._config.start_timeout_s - uptime_s, 0) if state is WorkerState.STARTING else None,
            host=HOST,
            pid=os.getpid(),
            log=self._log,
            held_s=round(self._lifecycle.held_s, 3),
            engine_stats=None if state is WorkerState.STARTING else self._engine.stats,
            staging=reconciler.stager.progress,
            cache_epoch=self._runner.cache_epoch,
            oldest_prefix_s=None if state is WorkerState.STARTING else self._engine.oldest_prefix_s,
            published=self._sources.published,
            weight_digest=reconciler.registers.weights.valid_digest,
            transfer=reconciler.registers.transfer.open,
            loan_left_s=None if (left := reconciler.loan.left_s) is None else round(left, 3),
        )


def make_sources(config: WorkerConfig) -> WeightSources:
    """Return the sources of weights and adapters that this worker may use."""
    return WeightSources(
        roots=[Path(root) for root in config.weight_roots],
        own=None if config.model_path is None else Path(config.model_path),
        cache=Path(config.cache_dir) / config.fleet,
        model=config.model,
        worker=config.worker_id,
        objects=ObjectReader(
            config.server, name=f"rollbus worker {config.worker_id}", fetch_rate=config.fetch_rate, nice=NICE
        ),
        stage_bytes=config.stage_bytes,
    )


def make_control(
    config: WorkerConfig,
    nats: Connection,
    lifecycle: WorkerLifecycle,
    in_flight: InFlightRequests,
    publisher: OutboundPublisher,
    sources: WeightSources,
) -> CommandHandler:
    """Create the parts that execute commands, without starting them."""
    loras = Loras(in_flight, sources)
    weights = WeightManager(config, in_flight, sources, loras)
    transfer = Transfer(in_flight, weights, config.transfer_idle_s, in_flight.links.leases.heard_at)
    registers = Registers(in_flight, weights, loras, transfer)
    store = DesiredStore(nats, Subjects(config.fleet))
    # A worker with credentials may write no state: an admin creates the first one with the queue.
    reader = DesiredReader(
        store,
        model=config.model,
        worker=config.worker_id,
        max_age_s=config.lease_s,
        may_begin=config.credentials is None,
    )
    lifecycle.knows_target = lambda: reader.is_fresh
    stager = Stager(sources, lambda: in_flight.runner.engine.capabilities)
    reconciler = Reconciler(
        reader, registers, stager, lifecycle, in_flight, publisher, engine_timeout_s=config.engine_timeout_s
    )
    acks = AckPublisher(config, nats, lifecycle, in_flight, publisher)
    return CommandHandler(config, nats, lifecycle, in_flight, acks, reconciler)
