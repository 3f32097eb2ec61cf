"""Reads the state of a fleet: workers, queues, desired states, commands of all controllers, and loads of experts."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

import msgspec
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ...schemas.checks import check_float
from ...schemas.control import DesiredState, ReadExperts, ReadRequest, State
from ...schemas.errors import BusBroken, ControlError, InvalidRequest, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_ack, decode_command
from ...schemas.presence import WorkerPresence
from ...schemas.telemetry import ExpertLoad
from ..auth.credentials import Signed
from ..control.controller import Controller, check_command
from ..logs import RejectionCount
from ..nats.connection import Connection, subscribe_permitted
from ..protocol.fleet.authority import check_age
from ..protocol.fleet.desired import stale_workers
from ..protocol.fleet.presence import PresenceTable
from ..protocol.html import as_html
from ..protocol.telemetry.command_book import CommandBook, CommandLine
from ..protocol.telemetry.experts import INTERVAL_S, ExpertAnswers, choose_workers, loads_of, merge_answers
from ..queue.streams import QueueDepth
from ..subjects import Subjects
from .runtime import Runtime

logger = logging.getLogger(__name__)

MAX_ACK_BYTES: Final = 256 << 10
"""Maximum size of an ack that is decoded. Acks of reads have up to several megabytes. The ack of new weights has the
routed experts of a canary: 46 KB with 61 layers."""
MAX_PENDING: Final = 8192
"""Maximum number of waiting messages, about one or two seconds of acks. Further messages are dropped. The command
result of the controller is not affected."""
MAX_PENDING_BYTES: Final = 64 << 20
READS: Final = (ReadExperts, ReadRequest, State)
STATE: Final = State(id="x").command
READ_ACK: Final = b'"command":"read_'
"""Part of the first bytes of a read's ack."""
KEPT_S: Final = 120.0
"""Seconds for which workers keep their counts."""
MAX_CLOCK_S: Final = 20.0
"""Tolerated clock difference in seconds. With it, a request for one minute still returns two thirds of the minute."""


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    fleet: str
    """Name of the fleet."""
    workers: tuple[WorkerPresence, ...]
    """Live workers, sorted by id. Empty if there are none."""
    queues: tuple[QueueDepth, ...] = ()
    """Waiting requests by model and lane. Empty if the server has no queue for the workers' models."""
    queue_problems: dict[str, str] = {}
    """Why a queue does not answer, by model. For example, a queue without a leader delivers no requests."""
    desired: dict[str, DesiredState] = {}
    """Desired state of the workers by model. Models without a recorded command are left out."""

    def __repr__(self) -> str:
        """Return one line with each worker and its state, and the number of waiting requests."""
        workers = ", ".join(f"{worker.worker} {worker.state}" for worker in self.workers) or "no workers"
        return f"<FleetState {self.fleet}: {workers}; {self._num_waiting} requests wait>"

    def _repr_html_(self) -> str:
        rows = [(w.worker, w.model, w.state, w.weight_version, w.in_flight) for w in self.workers]
        columns = ("worker", "model", "state", "weights", "in flight")
        return as_html(f"Fleet {self.fleet}: {self._num_waiting} requests wait", rows, columns)

    @property
    def _num_waiting(self) -> int:
        return sum(queue.waiting for queue in self.queues)

    @property
    def stale(self) -> tuple[str, ...]:
        """Ids of the workers whose presence does not show yet that they handled their commands in `desired`."""
        return stale_workers(self.workers, self.desired)


async def read_fleet_state(runtime: Runtime, settle_s: float) -> FleetState:
    """Ask all workers for their state, and wait up to `settle_s` more seconds for stale workers. See `Fleet.state`.

    Raises:
        BusBroken: the connection to NATS is gone.
    """
    watcher = runtime.watcher
    workers, queues, problems = await watcher.workers_and_queues()
    try:
        desired = await runtime.controller.store.read_all()
    except BusBroken as exc:
        # The presence of the workers is valid without the desired states.
        logger.warning("fleet.desired_states_read_failed error=%s", exc)
        desired = {}
    if stale_workers(workers, desired):
        await watcher.wait_until(lambda: not stale_workers(watcher.table.workers(), desired), settle_s)
        workers = watcher.table.workers()
    return FleetState(
        fleet=watcher.subjects.fleet,
        workers=runtime.silence.named(workers),
        queues=queues,
        queue_problems=problems,
        desired=desired,
    )


class CommandListener:
    """Records the commands of all controllers and the acks of workers while a program displays them. On the bus thread.

    A user needs the permission to receive acks, which admins and frontends have. With credentials, commands go only
    from controllers to the account of the workers, so the listener knows a command only by its acks. Reads are left
    out, because they change nothing and their acks are large.

    Attributes:
        rejected: commands and acks that could not be decoded, had another sender's name, or were not
            signed by their author.
        passed_over: number of acks that are too large or answer reads.
    """

    def __init__(self, nats: Connection, subjects: Subjects, table: PresenceTable) -> None:
        self._nats = nats
        self._subjects = subjects
        self._table = table
        self._book = CommandBook()
        self._subscriptions: list[Subscription] = []
        self._may_hear_commands = nats.signatures.own is None
        self.rejected = RejectionCount()
        self.passed_over = 0

    async def start(self) -> None:
        """Subscribe to commands and acks. Calling this twice is allowed.

        Raises:
            PermissionDenied: this user may not receive acks.
            BusBroken, BusClosed: the connection is lost.
        """
        if self._subscriptions:
            return
        async with AsyncExitStack() as undo:
            # With commands but without acks, it would look as if workers never answered.
            undo.push_async_callback(self.stop)
            if self._may_hear_commands:
                try:
                    await self._subscribe(self._subjects.controls, self._on_command)
                except PermissionDenied:
                    self._may_hear_commands = False
            await self._subscribe(self._subjects.acks, self._on_ack)
            undo.pop_all()

    async def _subscribe(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> None:
        subscription = await subscribe_permitted(
            self._nats, subject, handler, max_pending_msgs=MAX_PENDING, max_pending_bytes=MAX_PENDING_BYTES
        )
        self._subscriptions.append(subscription)

    async def stop(self) -> None:
        """Unsubscribe. The recorded commands stay."""
        while self._subscriptions:
            subscription = self._subscriptions.pop()
            if not self._nats.is_closed:
                await subscription.unsubscribe()

    def lines(self) -> tuple[CommandLine, ...]:
        """Return the last recorded commands, newest first."""
        return self._book.lines(time.time())

    async def _on_command(self, message: Msg) -> None:
        controller = message.subject.rpartition(".")[2]
        try:
            signed = self._nats.signatures.check(message.subject, message.data, message.headers)
            if signed is not None and signed.by.name != controller:
                raise RemoteProtocolError(f"the command is signed by {signed.by.role} {signed.by.name}")
            self._receive(controller, message.data, signed)
        except (ControlError, InvalidRequest, RemoteProtocolError) as exc:
            self._note_bad(message, exc)

    def _receive(self, controller: str, data: bytes, signed: Signed | None) -> None:
        command = decode_command(data)
        if isinstance(command, READS):
            return
        if signed is not None:
            check_age(signed.age_s)
            if not signed.by.covers_command(command.command):
                raise RemoteProtocolError(f"{signed.by.role} {signed.by.name} may not give {command.command}")
        live = [
            worker
            for worker in self._table.workers(command.model)
            if signed is None or signed.by.covers_model(worker.model)
        ]
        named = None if command.workers is None else frozenset(command.workers)
        concerned = [worker.worker for worker in live if named is None or worker.worker in named]
        self._book.add_command(command, controller, concerned, time.time())

    async def _on_ack(self, message: Msg) -> None:
        if len(message.data) > MAX_ACK_BYTES or READ_ACK in message.data[:256]:
            self.passed_over += 1
            return
        controller, _, worker = message.subject.rpartition(".")
        try:
            ack = decode_ack(message.data)
            if worker != ack.worker:
                raise RemoteProtocolError(f"worker {ack.worker} sent an ack on {message.subject}")
        except RemoteProtocolError as exc:
            self._note_bad(message, exc)
            return
        if ack.command == STATE:
            self.passed_over += 1
        elif self._table.get(worker) is not None:
            self._book.add_ack(ack, controller.rpartition(".")[2], time.time())

    def _note_bad(self, message: Msg, error: Exception) -> None:
        if so_far := self.rejected.add():
            logger.warning("command.rejected subject=%s so_far=%s error=%s", message.subject, so_far, error)


async def read_experts(
    controller: Controller, model: str | None, workers: tuple[str, ...] | None, last_s: float | None, timeout_s: float
) -> ExpertAnswers:
    """Ask these workers, or at most 64 workers of the model, for the last `last_s` seconds, by this machine's clock.

    Args:
        last_s: None: all counts by version.

    Raises:
        As `Controller.read`. Also `InvalidRequest` if no model is named and the fleet has several models, or if
        `last_s` is not a valid time.
    """
    command = ReadExperts(model=model, workers=workers, window="versions", timeout_s=timeout_s)
    if last_s is not None:
        last_s = check_float("last_s", last_s, 0, KEPT_S)
        command = replace(command, window="recent", since=max(int((time.time() - last_s) / INTERVAL_S) - 1, 0))
    command = check_command(command)
    roster = await controller.roster(command)
    if len(roster) > 1:
        raise InvalidRequest(field="model", problem="is missing", allowed=f"one of {', '.join(roster)}")
    [(model, live)] = roster.items()
    asked, left_out = choose_workers(live, workers)
    loads: dict[str, ExpertLoad] = {}
    if asked:
        loads, silent = loads_of(await controller.read(replace(command, model=model, workers=asked)))
        if last_s is not None:
            silent |= {name: problem for name, load in loads.items() if (problem := _clock_problem(load)) is not None}
            loads = {name: load for name, load in loads.items() if name not in silent}
        left_out |= silent
    # Merging takes about 10 ms for many workers of a large model, so it runs on another thread.
    return await asyncio.to_thread(merge_answers, model, loads, left_out, asked, len(live))


def _clock_problem(load: ExpertLoad) -> str | None:
    """Return the reason if the worker's last seconds differ from this machine's because of its clock, else None."""
    ahead_s = load.number * INTERVAL_S - (time.time() - INTERVAL_S)
    if abs(ahead_s) <= MAX_CLOCK_S:
        return None
    return f"the worker's clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's clock"
