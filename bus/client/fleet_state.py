"""Reads the state of a fleet: workers, queues, desired states, commands of all controllers, and loads of experts."""

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from ...schemas.checks import check_float
from ...schemas.control import DesiredState, ReadExperts, ReadRequest, State
from ...schemas.errors import BusBroken, ControlError, InvalidRequest, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_ack, decode_command
from ...schemas.presence import WorkerPresence
from ...schemas.request import Lane
from ...schemas.telemetry import ExpertLoad
from ..auth.credentials import Signed
from ..control.controller import Controller, check_command
from ..control.revisions import StoredState
from ..logs import RejectionCount
from ..nats.connection import subscribe_permitted
from ..nats.library import Msg, Subscription
from ..protocol.fleet.authority import check_age
from ..protocol.fleet.desired import stale_workers
from ..protocol.html import as_html
from ..protocol.telemetry.command_book import CommandBook, CommandLine
from ..protocol.telemetry.experts import INTERVAL_S, ExpertAnswers, choose_workers, loads_of, merge_answers
from ..queue.streams import QueueDepth, queue_clients
from .runtime import Runtime

logger = logging.getLogger(__name__)

MAX_ACK_BYTES: Final = 256 << 10
"""Maximum size of an ack that is decoded. Acks of reads have up to several megabytes. The ack of new weights has the
routed experts of a canary: 46 KB with 61 layers."""
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
    workers = await watcher.ping_workers()
    queues, problems = await watcher.queues()
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


class HeardWorker(NamedTuple):
    """A live worker with its latest presence."""

    presence: WorkerPresence
    heard_at: float
    """Time of the latest presence on `time.monotonic()`."""


class FleetWatch:
    """Reads the state that a connected client has of its fleet. Create it with `watch_fleet`.

    Use it from the client's event loop. Unlike `Fleet.state`, it sends nothing to workers: workers publish their
    presence every second.

    Between `listen` and `unlisten` it records the commands of all controllers and the acks of workers, except reads,
    which change nothing and have large acks. A user needs the permission to receive acks, which admins and frontends
    have. With credentials, commands go only from controllers to the account of the workers, so a command is known only
    by its acks.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._thread = runtime.thread
        self._nats = runtime.nats
        self._table = runtime.watcher.table
        self._subjects = runtime.config.subjects
        self.fleet = self._subjects.fleet
        # Used on the bus thread.
        self._book = CommandBook()
        self._subscriptions: list[Subscription] = []
        self._may_hear_commands = runtime.nats.signatures.own is None
        self._rejected = RejectionCount()

    @property
    def bad_messages(self) -> int:
        """Number of received commands and acks that could not be decoded or did not come from their author."""
        return self._rejected.so_far

    @property
    def problem(self) -> str | None:
        """Why the client receives no presence at the moment. None if it does."""
        if self._nats.lost is not None:
            return str(self._nats.lost)
        return None if self._nats.is_connected else "the connection to NATS is down"

    async def workers(self) -> tuple[HeardWorker, ...]:
        """Return the live workers by id, each with its latest presence.

        Raises:
            BusClosed: the client was closed.
        """
        heard = await self._thread.call(self._table.heard)
        return tuple(HeardWorker(*each) for each in heard)

    async def queues(self) -> tuple[tuple[QueueDepth, ...], dict[str, str]]:
        """Return the waiting requests by queue, and by model the reason why a queue does not answer.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.watcher.queues())

    async def clients(self, models: Iterable[str]) -> dict[tuple[str, Lane, str], int]:
        """Count the requests of each client in the queues of these models. The keys are (model, lane, client).

        Raises:
            PermissionDenied: this user may not list them.
            BusBroken: JetStream does not answer.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._clients(tuple(models)))

    async def _clients(self, models: tuple[str, ...]) -> dict[tuple[str, Lane, str], int]:
        return {
            (model, *lane_and_client): count
            for model in models
            for lane_and_client, count in (await queue_clients(self._nats, self._subjects, model)).items()
        }

    async def listen(self) -> None:
        """Receive the commands and acks of all controllers until `unlisten`.

        Raises:
            PermissionDenied: this user may not receive them.
            BusBroken: the connection to NATS is permanently lost.
            BusClosed: the client was closed.
        """
        await self._thread.run(self._listen())

    async def unlisten(self) -> None:
        """Stop receiving commands and acks.

        Raises:
            BusClosed: the client was closed.
        """
        await self._thread.run(self._unlisten())

    async def commands(self) -> tuple[CommandLine, ...]:
        """Return the last commands received between `listen` and `unlisten`, newest first.

        Raises:
            BusClosed: the client was closed.
        """
        return await self._thread.call(self._book.lines, time.time())

    async def desired(self) -> dict[str, DesiredState]:
        """Return the desired state of the workers of each model.

        Raises:
            BusBroken: JetStream or the connection failed.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.controller.store.read_all())

    async def history(self, model: str, after: int = 0) -> tuple[StoredState, ...]:
        """Return the desired states of `model` that the store still has after a sequence number, oldest first.

        Raises:
            BusBroken: JetStream or the connection failed.
            PermissionDenied: this user may not read the history.
            BusClosed: the client was closed.
        """
        return await self._thread.run(self._runtime.controller.store.signed_history(model, after))

    # On the bus thread.

    async def _listen(self) -> None:
        if self._subscriptions:
            return
        async with AsyncExitStack() as undo:
            # With commands but without acks, it would look as if workers never answered.
            undo.push_async_callback(self._unlisten)
            if self._may_hear_commands:
                try:
                    self._subscriptions += [
                        await subscribe_permitted(self._nats, self._subjects.controls, self._on_command)
                    ]
                except PermissionDenied:
                    self._may_hear_commands = False
            self._subscriptions += [await subscribe_permitted(self._nats, self._subjects.acks, self._on_ack)]
            undo.pop_all()

    async def _unlisten(self) -> None:
        while self._subscriptions:
            subscription = self._subscriptions.pop()
            if not self._nats.is_closed:
                await subscription.unsubscribe()

    def _on_command(self, message: Msg) -> None:
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

    def _on_ack(self, message: Msg) -> None:
        if READ_ACK in message.data[:256]:
            return
        controller, _, worker = message.subject.rpartition(".")
        try:
            if len(message.data) > MAX_ACK_BYTES:
                raise RemoteProtocolError(f"an ack has {len(message.data)} bytes, allowed: {MAX_ACK_BYTES}")
            ack = decode_ack(message.data)
            if worker != ack.worker:
                raise RemoteProtocolError(f"worker {ack.worker} sent an ack on {message.subject}")
        except RemoteProtocolError as exc:
            self._note_bad(message, exc)
            return
        if ack.command != STATE and self._table.get(worker) is not None:
            self._book.add_ack(ack, controller.rpartition(".")[2], time.time())

    def _note_bad(self, message: Msg, error: Exception) -> None:
        self._rejected.warn(logger, "command.rejected subject=%s so_far=%s error=%s", message.subject, error)


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
        raise InvalidRequest("model", "is missing", f"one of {', '.join(roster)}")
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
