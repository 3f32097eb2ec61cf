"""Receives commands and publishes their acks: `accepted` immediately, perhaps `progress`, then exactly one final ack.

A command that sets a register is answered with the outcome of that register. If no controller has recorded the command,
the first worker that can record it does so. A worker executes each other command once. A read command is answered
immediately from memory, at a limited rate, with its final ack. It is not stored.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from ...bus.auth.credentials import Signed
from ...bus.logs import RejectionCount
from ...bus.nats.connection import Connection, subscribe
from ...bus.nats.library import Msg
from ...bus.protocol.fleet.authority import check_age, check_authority
from ...bus.protocol.fleet.leases import FloodMeter
from ...bus.subjects import Subjects
from ...schemas import limits
from ...schemas.acks import AckStatus
from ...schemas.checks import check_subject_token
from ...schemas.control import (
    Abort,
    AnyCommand,
    CancelWeightUpdate,
    CheckWeights,
    Fence,
    InitWeightTransfer,
    ReadExperts,
    ReadRequest,
    Restart,
    StartWeightUpdate,
    State,
    UpdateWeightChunk,
)
from ...schemas.errors import (
    BusBroken,
    BusClosed,
    ControlCode,
    ControlError,
    InvalidRequest,
    PermissionDenied,
    RemoteProtocolError,
    storage_failure,
)
from ...schemas.limits import MAX_SEEN_COMMANDS
from ...schemas.messages import command_id_of, decode_command
from ...schemas.weights import UpdateTiming
from ..config import WorkerConfig
from ..inbox import WorkerInbox
from ..lifecycle import WorkerLifecycle
from ..requests.in_flight import InFlightRequests
from ..requests.steps import ExpertCounter
from ..requests.table import WorkerRequestTable
from .acks import AckPublisher, ReceivedCommand
from .desired import RegisterOutcome, failure
from .reconciler import Reconciler
from .staging import StageKey, command_boundary

logger = logging.getLogger(__name__)


Read = ReadExperts | ReadRequest
"""The read commands. They change nothing, so the worker answers a repeated command again."""
_LANES: Final = {Abort: "quick", State: "quick", CancelWeightUpdate: "quick", CheckWeights: "check"}
"""Lanes of one-off commands; `event` for all others."""
READS_PER_S: Final = 20
"""Maximum answers of one worker per second to controllers, and to all other clients. An HTTP service with open pages
sends three reads in 5 s."""
OWN_READS_PER_S: Final = 5
"""Maximum answers per second to a client that reads its own requests."""
RECORD_RETRY_S: Final = 1.0
"""Seconds between attempts to record a command while JetStream is not available."""
LATE_S: Final = 1.0
"""Seconds after its `timeout_s` at which a recorded command is answered even if its register still waits."""
MAX_READ_BYTES: Final = 4096
"""Maximum size of a read, before it is decoded. Names are its largest fields."""


class TelemetryReads:
    """Answers the read commands of a worker.

    Args:
        experts: counts the chosen experts.
        requests: requests of the worker, with their timelines.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, experts: ExpertCounter, requests: WorkerRequestTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experts = experts
        self._requests = requests
        self._clock = clock
        self._second_ends = clock()
        self._answered: Counter[str | None] = Counter()

    def answer(self, command: Read, client: str | None = None) -> dict[str, Any]:
        """Return the additional fields of the `Ack` of `command`.

        Args:
            client: client that may read only its own requests; None: a controller, which may read all.

        Raises:
            ControlError: the worker has no answer, or the limit per second is reached.
        """
        self._check_rate(client)
        match command:
            case ReadExperts():
                return {"experts": self._experts.load(command.since, command.window, self._clock())}
            case ReadRequest():
                command = command if client is None else replace(command, client=client)
                found, num_left_out = self._requests.read_timelines(command, self._clock())
                return {"timelines": tuple(found), "timelines_left_out": num_left_out}

    def _check_rate(self, client: str | None) -> None:
        now = self._clock()
        if now >= self._second_ends:
            self._second_ends = now + 1
            self._answered.clear()
        allowed = READS_PER_S if client is None else OWN_READS_PER_S
        of_clients = self._answered.total() - self._answered[None]
        if self._answered[client] >= allowed or (client is not None and of_clients >= READS_PER_S):
            problem = f"this worker has answered {allowed} reads within a second; allowed: {allowed} per second"
            if client is not None:
                problem += f" for each client, and {READS_PER_S} for all clients"
            raise ControlError(ControlCode.NOT_SERVING, problem)
        self._answered[client] += 1


class CommandHandler:
    """Receives, executes and answers the commands of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        nats: Connection,
        lifecycle: WorkerLifecycle,
        in_flight: InFlightRequests,
        acks: AckPublisher,
        reconciler: Reconciler,
    ) -> None:
        self._config = config
        self._nats = nats
        self._subjects = Subjects(config.fleet)
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._acks = acks
        self._log = acks.log
        self._reads = TelemetryReads(in_flight.links.dispatcher.experts, in_flight.links.requests)
        self.reconciler = reconciler
        self.reader = reconciler.reader
        reconciler.on_change = self.publish_due_acks
        # Each lane runs one command at a time, so slow commands do not delay quick ones. Bounded by the command log.
        self._lanes: dict[str, asyncio.Queue[ReceivedCommand]] = {
            name: asyncio.Queue(MAX_SEEN_COMMANDS) for name in ("record", "quick", "check", "event")
        }
        self.on_restart: Callable[[], None] = lambda: None
        """Called when a command ends this process; it must begin to stop the worker."""
        self.rejected = RejectionCount()
        """Commands without a usable id or controller to answer."""

    async def subscribe(self, inbox: WorkerInbox) -> None:
        """Subscribe to commands and to reads. Call this once.

        Raises:
            BusClosed: the connection is closed.
        """
        await subscribe(self._nats, self._subjects.controls, self._on_command)
        await inbox.subscribe(self._subjects.reads_to(self._config.worker_id), self._on_read, FloodMeter())

    def work(self) -> dict[str, Callable[[], Coroutine[None, None, None]]]:
        """Return the coroutines that run until the worker stops, by name. They may raise `EngineDead`."""
        return {
            "digest": partial(self.reconciler.registers.weights.start.run, self._nats),
            "read": self.reader.run,
            "reconcile": self.reconciler.run,
            "stage": self.reconciler.stager.run,
            "record": partial(self._serve, "record", self._record),
            **{f"commands.{name}": partial(self._serve, name, self._execute) for name in ("quick", "check", "event")},
        }

    @property
    def problem(self) -> str | None:
        """Reason why this worker does not serve, or lacks the desired state or an adapter. None without a problem."""
        reconciler = self.reconciler
        return (
            reconciler.problem or self.reader.problem or reconciler.registers.loras.problem or reconciler.lora_problem
        )

    # Received

    def _on_command(self, message: Msg) -> None:
        # A worker that may not publish cannot answer. It reads the recorded commands later.
        if not self._lifecycle.may_publish():
            return
        try:
            controller = message.subject.rpartition(".")[2]
            check_subject_token("controller", controller)
            signed = self._nats.signatures.check(message.subject, message.data, message.headers)
            if signed is not None and signed.by.name != controller:
                raise RemoteProtocolError(f"the command is signed by the {signed.by.role} {signed.by.name}")
            self._receive(controller, message.data, signed)
        except (InvalidRequest, RemoteProtocolError) as exc:
            self.rejected.warn(logger, "command.rejected subject=%s so_far=%s error=%s", message.subject, exc)

    def _on_read(self, message: Msg) -> None:
        """Answer a read of the client that the subject names, which NATS permits only to that client. It is not signed.

        Raises:
            RemoteProtocolError: the message is no read.
        """
        if not self._lifecycle.may_publish():
            return
        client, data = message.subject.split(".")[-2], message.data
        try:
            check_subject_token("controller", client)
            command = decode_command(data) if len(data) <= MAX_READ_BYTES else None
        except InvalidRequest as exc:
            raise RemoteProtocolError(f"read: {exc.message}") from None
        if not isinstance(command, ReadExperts | ReadRequest):
            raise RemoteProtocolError(f"read: {len(data)} bytes that are no read; allowed: a read of {MAX_READ_BYTES}")
        if command.model in (None, self._config.model):
            self._answer(client, command, client)

    def _receive(self, controller: str, data: bytes, signed: Signed | None) -> None:
        try:
            command = decode_command(data)
        except InvalidRequest as exc:
            command_id = command_id_of(data)
            if command_id is None:
                raise
            self._acks.reject(controller, command_id, ControlError(ControlCode.INVALID_COMMAND, exc.message))
            return
        config = self._config
        if command.model not in (None, config.model):
            return
        if command.workers is not None and config.worker_id not in command.workers:
            return
        received = self._log.find(command.id)
        try:
            if signed is not None:
                check_authority(signed.by, command, config.model)
                if received is None:
                    check_age(signed.age_s)
        except ControlError as exc:
            self._acks.reject(controller, command.id, exc)
            return
        if received is not None:
            received.controller = controller
            self._acks.repeat(received)
            return
        if isinstance(command, ReadExperts | ReadRequest):
            self._answer(controller, command)
            return
        received = self._log.add(command, controller, time.monotonic())
        if received is None:
            problem = f"this worker already has {MAX_SEEN_COMMANDS} open commands"
            self._acks.reject(controller, command.id, ControlError(ControlCode.NOT_SERVING, problem))
            return
        logger.info("command.received command=%s id=%s epoch=%s", command.command, command.id, command.epoch)
        self._acks.publish_ack(received, AckStatus.ACCEPTED)
        self._enqueue(received)

    def _answer(self, controller: str, command: Read, client: str | None = None) -> None:
        outcome, answer = RegisterOutcome(), dict[str, Any]()
        try:
            answer = self._reads.answer(command, client)
        except ControlError as exc:
            outcome = failure(exc)
        self._acks.publish_answer(controller, command, outcome, **answer)

    def _enqueue(self, received: ReceivedCommand) -> None:
        command = received.command
        if command.register is not None and command.epoch is not None:
            received.needs_read = self.reader.request_command(command.register, command.epoch, command.id)
            if self.reader.num_read >= received.needs_read:
                # The desired state arrived before the command: the register may be applied already, and no later event
                # would publish the ack.
                self.publish_due_acks()
        elif isinstance(command, Restart):
            self._restart(received, command)
        else:
            if isinstance(command, CheckWeights):
                self._end_older_checks(command)
            lane = self._lanes["record" if command.register is not None else _LANES.get(type(command), "event")]
            if lane.full():
                # A fence or a newer check has ended some that still wait: the log has room for this one.
                for waiting in [lane.get_nowait() for _ in range(lane.qsize())]:
                    if self._log.is_under_way(waiting):
                        lane.put_nowait(waiting)
            lane.put_nowait(received)

    def _restart(self, received: ReceivedCommand, command: Restart) -> None:
        incarnation = self._lifecycle.incarnation
        if command.incarnation != incarnation:
            problem = f"the command ends incarnation {command.incarnation}; this worker is incarnation {incarnation}"
            self._acks.publish_final(received, failure(ControlError(ControlCode.STALE, problem)))
            return
        logger.info("worker.restart_requested id=%s by=%s", command.id, received.author)
        # A worker that stops publishes its acks before its last presence.
        self._acks.publish_final(received, RegisterOutcome())
        self.on_restart()

    def _end_older_checks(self, newest: CheckWeights) -> None:
        """End the checks of other uploads, because newer weights must not wait for the staging of older weights.

        Checks of folders continue, because they fetch nothing. Each of them gets its own answer.
        """
        if newest.source.objects is None or newest.adapter:
            return
        stale = failure(ControlError(ControlCode.STALE, f"a later check of {newest.source} has replaced this check"))
        for received in self._log.under_way:
            command = received.command
            if not isinstance(command, CheckWeights) or command.adapter:
                continue
            if command.source.objects in (None, newest.source.objects):
                continue
            self._acks.publish_final(received, stale)
            if received.limit is not None and not received.limit.expired():
                received.limit.reschedule(0.0)

    # Execution

    async def _serve(self, lane: str, work: Callable[[ReceivedCommand], Awaitable[None]]) -> None:
        while True:
            received = await self._lanes[lane].get()
            # A fence may have removed the command while it waited.
            if self._log.is_under_way(received):
                await work(received)

    async def _record(self, received: ReceivedCommand) -> None:
        """Record a command that its controller has not recorded."""
        while self._log.is_under_way(received):
            try:
                command, by = received.command, received.author
                self.reconciler.registers.check_recording(command, by)
                loaded = self.reconciler.registers.loras.names
                _, received.epoch = await self.reader.store.record(self._config.model, command, by, loaded=loaded)
            except PermissionDenied as exc:
                error = ControlError(ControlCode.INVALID_COMMAND, f"{exc}: record the command before you publish it")
            except (BusBroken, BusClosed) as exc:
                logger.warning("command.record_failed id=%s error=%s", received.command.id, exc)
                await asyncio.sleep(RECORD_RETRY_S)
                continue
            except RemoteProtocolError as exc:
                error = storage_failure(str(exc))
            except ControlError as exc:
                error = exc
            else:
                received.needs_read = self.reader.request_read()
                return
            self._acks.publish_final(received, failure(error))

    async def _execute(self, received: ReceivedCommand) -> None:
        """Execute a one-off command. The worker survives all its errors except `EngineDead`."""
        timeout_s = received.command.timeout_s
        answer: dict[str, Any] = {}
        outcome = RegisterOutcome()
        try:
            with command_boundary(received.command.command):
                async with asyncio.timeout(timeout_s) as received.limit:
                    answer = await self._run(received.command, received.author)
        except ControlError as exc:
            outcome = failure(exc)
        except TimeoutError:
            outcome = failure(ControlError(ControlCode.TIMEOUT, f"the command was not done within {timeout_s:g} s"))
        self._acks.publish_final(received, outcome, **answer)

    async def _run(self, command: AnyCommand, by: str) -> dict[str, Any]:
        """Run a one-off command for its author. Return the additional fields of its `Ack`.

        Raises:
            ControlError: the command failed.
        """
        match command:
            case State():
                return {"state": msgspec.to_builtins(self._lifecycle.describe())}
            case Abort():
                return await self._abort(command)
            case CheckWeights():
                return await self._check(command)
            case Fence():
                if self.reconciler.has_newer_weights(command.epoch):
                    raise ControlError(ControlCode.STALE, "later weights were recorded after the command")
                async with self.reconciler.exclusive(halts=True):
                    self.reconciler.registers.weights.mark_invalid(command.reason)
            case InitWeightTransfer() | StartWeightUpdate() | UpdateWeightChunk():
                await self._transfer(command, by)
            case CancelWeightUpdate():
                was_found = self.reconciler.registers.transfer.interrupt(command, by)
                async with self.reconciler.exclusive(halts=False):
                    self.reconciler.registers.transfer.cancel(command, by, was_found=was_found)
            case _:
                raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} is not a one-off command")
        return {}

    async def _check(self, command: CheckWeights) -> dict[str, Any]:
        """Stage the source of a check, so that an update with it can follow."""
        if self.reconciler.registers.is_lent or not self.reconciler.has_engine:
            raise ControlError(
                ControlCode.NOT_SERVING, "this worker is lent; it loads what is recorded when it returns"
            )
        stager, key = self.reconciler.stager, StageKey(command.source, command.adapter)
        content = await stager.stage(key)
        cost = stager.cost_of(key)
        answer: dict[str, Any] = {
            "timing": UpdateTiming(fetched_bytes=cost.fetched_bytes, staged_s=round(cost.staged_s, 3))
        }
        if content is not None and self._in_flight.runner.engine.capabilities.weight_digests:
            answer["digest"] = content.digest
            answer["path"] = None if command.source.path is None else str(content.folder)
        return answer

    async def _abort(self, command: Abort) -> dict[str, Any]:
        ids = None if command.request_ids is None else set(command.request_ids)
        found = self._in_flight.links.requests.names_by_id(ids)
        await self._in_flight.abort_and_wait([name for names in found.values() for name in names])
        return {"request_ids": tuple(sorted(found)[: limits.MAX_CHUNKS_PER_FRAME])}

    async def _transfer(self, command: InitWeightTransfer | StartWeightUpdate | UpdateWeightChunk, by: str) -> None:
        if self.reconciler.registers.is_asleep or not self.reconciler.has_engine:
            raise ControlError(ControlCode.NOT_SERVING, "the engine is asleep, or starts after a loan")
        transfer = self.reconciler.registers.transfer
        async with self.reconciler.exclusive(halts=isinstance(command, StartWeightUpdate)):
            match command:
                case InitWeightTransfer():
                    await transfer.init(command, by)
                case StartWeightUpdate():
                    await transfer.start(command, by)
                case UpdateWeightChunk():
                    await transfer.add_chunk(command, by)
        # A controller decides about the finish by presence.
        self._lifecycle.request_presence()

    # Answers

    def publish_due_acks(self) -> None:
        """Publish stages and outcomes of recorded commands, and timeouts of late commands.

        Call this also every second.
        """
        now = time.monotonic()
        for received in self._log.under_way:
            register, timeout_s = received.command.register, received.command.timeout_s
            if register is None:
                if isinstance(check := received.command, CheckWeights):
                    staging = self.reconciler.stager.progress_of(StageKey(check.source, check.adapter))
                    if staging is not None:
                        self._acks.publish_progress(received, staging.stage, staging)
                continue
            outcome = None
            if received.epoch is not None:
                progress = self.reconciler.progress_of(register, received.epoch)
                if progress is not None:
                    self._acks.publish_progress(received, *progress)
                if self.reader.num_read >= received.needs_read:
                    outcome = self.reconciler.outcome_of(register, received.epoch)
                    if outcome is None and self.reader.has_lost(
                        register, received.epoch, received.command.id, received.needs_read
                    ):
                        problem = "the server has lost the desired state that recorded this command: send it again"
                        outcome = failure(storage_failure(problem))
            if outcome is None and now > received.received_at + timeout_s + LATE_S:
                what = "recorded" if received.epoch is None else "fully applied"
                problem = f"the command was not {what} within {timeout_s:g} s; the worker is {self._lifecycle.state}"
                outcome = failure(ControlError(ControlCode.TIMEOUT, problem))
            if outcome is not None:
                self._acks.publish_final(received, outcome)

    def on_state_changed(self) -> None:
        """Read and reconcile again, because the state of the worker has changed."""
        if not self.reader.is_fresh:
            self.reader.request_read()
        self.reconciler.wake()

    def fence(self) -> None:
        """Remove the open commands, which the next incarnation does not answer."""
        self._log.clear()
        self.reconciler.registers.transfer.mark_lost()
        self.reader.invalidate()
