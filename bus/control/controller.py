"""Sends commands to a fleet: selects the workers that must ack, records the desired state, and collects the results.

The controller first records a command that sets a register. From then on, the workers reconcile themselves with it,
including workers that start later. The published message only makes them read the state sooner. A controller that dies
leaves no partial decision.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, cast

from msgspec.structs import replace

from ...schemas.acks import Ack
from ...schemas.checks import describe
from ...schemas.control import (
    Abort,
    AnyCommand,
    CancelWeightUpdate,
    Command,
    DesiredState,
    FinishWeightUpdate,
    ReadExperts,
    ReadRequest,
    UpdateWeightChunk,
)
from ...schemas.errors import (
    BusBroken,
    ControlCode,
    ControlError,
    InvalidRequest,
    NoWorkers,
    PermissionDenied,
    RemoteProtocolError,
    RollbusError,
)
from ...schemas.messages import decode_ack, decode_command, encode_json
from ...schemas.presence import WorkerPresence
from ..auth.credentials import Role
from ..auth.permissions import OWN_READERS
from ..logs import RejectionCount
from ..nats.connection import Connection, publish_permitted, subscribe
from ..nats.library import Msg
from ..protocol.fleet import desired
from ..protocol.fleet.authority import check_authority, without
from ..protocol.fleet.command_result import (
    RESULTS,
    AckTracker,
    CommandIncomplete,
    CommandResult,
    Quorum,
    Roster,
    needs_known_models,
    workers_that_must_ack,
)
from ..protocol.fleet.presence import LostWorker
from ..subjects import Subjects
from ..thread_calls import wait_at_most
from .store import DesiredStore

logger = logging.getLogger(__name__)

REPEAT_S: Final = 1.0
"""Seconds without a new ack before a command is repeated. The first ack of a busy worker takes less. A large fleet
sends new acks all the time, and a repeat would only delay it."""
MAX_REPEAT_S: Final = 10.0
"""Seconds before a command is repeated even if new acks arrive, as they do during a load of several minutes."""
MARGIN_S: Final = 5.0
"""Seconds beyond the command's timeout, for transport, for a worker's timeout ack, and for the steps before
execution."""
MAX_NEWS: Final = 4096
"""Maximum number of acks that wait for the caller's `OnAck`: two of each worker of a large fleet. Above it, `OnAck`
misses the oldest acks; the command result has all."""
OnAck = Callable[[Ack], None]
"""Called on the bus thread with each new ack to show progress. It must return immediately. An exception ends the wait
for acks."""
HELD: Final = frozenset({"pause", "flush"})
"""Registers that are not restored. A failed pause holds until a resume, and a flush has no lasting state."""
READS: Final = (ReadExperts, ReadRequest)
"""Commands that change nothing."""
TELLS_NOTHING: Final = "the worker runs an earlier release, which does not answer this command"
SHOWN_S: Final = 1.0
"""Seconds to wait after the acks for presence that shows their outcome, because the caller's next call reads presence.
It usually arrives within milliseconds."""
Kind = TypeVar("Kind", bound=Command)
Revise = Callable[[DesiredState, AnyCommand], AnyCommand]
"""Completes a command from the recorded state. An exception rejects the command."""


@dataclass(frozen=True, slots=True)
class CommandMessage:
    """A command as published, and the workers that must ack it."""

    command: AnyCommand
    workers: frozenset[str]
    is_own_read: bool = False
    """True: publish a read to each worker on the subject for reads of own requests."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """A published command and the state of the wait for its acks."""

    tracker: AckTracker
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    news: deque[Ack] = field(default_factory=lambda: deque(maxlen=MAX_NEWS))
    published_at: float = -math.inf
    """Time of the last publication, on `time.monotonic()`."""
    news_at: float = -math.inf
    """Time of the last new ack."""

    @property
    def repeat_at(self) -> float:
        """Time of the next repeat."""
        return min(max(self.published_at, self.news_at) + REPEAT_S, self.published_at + MAX_REPEAT_S)


class AckCollector:
    """The open commands of one controller. Lives on the bus thread; call `start` before use.

    A command or an ack may be lost. The collector therefore repeats a command to the workers that owe an ack if no new
    ack arrives. Workers execute a repeated command only once and send the same ack.

    Attributes:
        rejected: acks that did not decode or named another worker.
    """

    def __init__(self, nats: Connection, subjects: Subjects, controller: str) -> None:
        self._nats = nats
        self._subjects = subjects
        self._controller = controller
        self._acks_to = subjects.acks_to(controller)
        self._under_way: dict[str, _UnderWay] = {}
        self.rejected = RejectionCount()

    async def start(self) -> None:
        """Subscribe to acks."""
        await subscribe(self._nats, self._acks_to, self.receive)

    def receive(self, message: Msg) -> None:
        """Handle an ack of a worker."""
        try:
            ack = decode_ack(message.data)
            # An ack names its worker by a valid token.
            if message.subject != self._acks_to.removesuffix("*") + ack.worker:
                raise RemoteProtocolError(f"worker {ack.worker} answered on {message.subject}")
        except RemoteProtocolError as exc:
            self.rejected.warn(logger, "ack.rejected subject=%s so_far=%s error=%s", message.subject, exc)
            return
        under_way = self._under_way.get(ack.id)
        if under_way is None:
            logger.debug("ack.received_late id=%s worker=%s status=%s", ack.id, ack.worker, ack.status)
            return
        if under_way.tracker.add_ack(ack, time.monotonic()):
            under_way.news.append(ack)
            under_way.news_at = time.monotonic()
        under_way.changed.set()

    def mark_lost(self, lost: LostWorker) -> None:
        """Stop the wait for acks of a lost worker or incarnation."""
        for under_way in self._under_way.values():
            if under_way.tracker.mark_lost(lost):
                under_way.changed.set()

    @contextmanager
    def expecting(self, tracker: AckTracker) -> Iterator[None]:
        """During the block, add incoming acks to `tracker` and mark lost workers in it.

        Raises:
            InvalidRequest: another open command has this id.
        """
        if tracker.id in self._under_way:
            raise InvalidRequest("id", f"is {tracker.id}, the id of an open command", "a new id")
        self._under_way[tracker.id] = _UnderWay(tracker)
        try:
            yield
        finally:
            del self._under_way[tracker.id]

    async def collect(
        self, tracker: AckTracker, messages: Sequence[CommandMessage], wait_s: float, on_ack: OnAck | None
    ) -> None:
        """Publish the commands and wait up to `wait_s` seconds for their acks. Call this inside `expecting`.

        Raises:
            PermissionDenied: this user may not publish commands.
            BusBroken: the connection was lost permanently.
            LocalProtocolError: the command is over the server's `max_payload`.
        """
        under_way = self._under_way[tracker.id]
        deadline = time.monotonic() + wait_s
        await self._publish(messages)
        under_way.published_at = time.monotonic()
        while not tracker.is_settled and time.monotonic() < deadline:
            await wait_at_most(under_way.changed, min(under_way.repeat_at, deadline) - time.monotonic())
            under_way.changed.clear()
            _report_acks(under_way.news, on_ack)
            if time.monotonic() >= under_way.repeat_at:
                await self._repeat(tracker, messages)
                under_way.published_at = time.monotonic()
        _report_acks(under_way.news, on_ack)

    async def _repeat(self, tracker: AckTracker, messages: Sequence[CommandMessage]) -> None:
        if not self._nats.is_connected:
            # The client would buffer the repeat and each later one until the reconnect.
            return
        owing = set(tracker.owing)
        owed = ((message, message.workers & owing) for message in messages if message.workers & owing)
        await self._publish(
            dataclasses.replace(message, command=replace(message.command, workers=tuple(sorted(rest))), workers=rest)
            for message, rest in owed
        )

    def _list_messages(self, messages: Iterable[CommandMessage]) -> Iterator[tuple[str, AnyCommand]]:
        """Yield the subject and the command of each publication."""
        for message in messages:
            if not message.is_own_read:
                yield self._subjects.control(self._controller), message.command
                continue
            for worker in sorted(message.workers):
                yield self._subjects.read(self._controller, worker), replace(message.command, workers=(worker,))

    async def _publish(self, messages: Iterable[CommandMessage]) -> None:
        for subject, command in self._list_messages(messages):
            try:
                data = encode_json(command)
                await publish_permitted(self._nats, subject, data, self._nats.signatures.headers(subject, data) or None)
            except PermissionDenied:
                raise
            except BusBroken as exc:
                if self._nats.lost is not None:
                    raise
                # `collect` repeats the command after the reconnect.
                logger.warning("command.publish_failed id=%s error=%s", command.id, exc)


def _report_acks(news: deque[Ack], on_ack: OnAck | None) -> None:
    while news:
        ack = news.popleft()
        if on_ack is not None:
            on_ack(ack)


class Watch(Protocol):
    """The source of worker presence."""

    async def known_workers(self) -> tuple[WorkerPresence, ...]:
        """Return the last presence of each live worker."""

    async def ping_workers(self) -> tuple[WorkerPresence, ...]:
        """Return the same after a ping of all workers."""

    def live_incarnations(self) -> frozenset[tuple[str, str]]:
        """Return worker and incarnation of all live workers that have not fenced themselves."""

    async def wait_for_acked(self, acks: Collection[Ack], timeout_s: float) -> None:
        """Wait until presence shows what these acks of recorded commands say, for at most `timeout_s` seconds."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A command recorded in the desired state of one model."""

    model: str
    command: AnyCommand
    """Command as recorded, with its epoch."""
    epoch: int
    before: DesiredState
    """Desired state before the command."""
    workers: frozenset[str]
    """Workers that must ack."""


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The outcome of a command."""

    result: CommandResult
    recordings: tuple[Recording, ...]
    """Recordings, one for each model; empty for a one-off command."""
    lost: dict[str, str]
    """Reasons why workers ended while they owed an ack, by worker."""


class Controller:
    """One controller of a fleet. Lives on the bus thread; start its collector before use.

    Attributes:
        name: name of this controller.
        collector: the collector of command acks.
    """

    def __init__(self, nats: Connection, subjects: Subjects, controller: str, watch: Watch) -> None:
        self.store = DesiredStore(nats, subjects)
        self.name = controller
        self._own = nats.signatures.own
        self._role = None if nats.user is None else nats.user.role
        self._watcher = watch
        self.collector = AckCollector(nats, subjects, controller)

    async def send(
        self, command: AnyCommand, on_ack: OnAck | None = None, *, revise: Revise | None = None
    ) -> CommandResult:
        """Execute `command`. Return the command result if all workers that must ack have applied it.

        Cancellation: a recorded command stays, and the workers apply it.

        Raises:
            CommandIncomplete: not all workers applied it. If every worker failed, the recording is undone, except for
                `pause`, which holds, and `flush_cache`, which has no lasting state.
            NoWorkers: no worker can execute the command. Nothing is recorded.
            InvalidRequest: a field is wrong, or a named worker is absent. Nothing is recorded.
            ControlError: the desired state rejects it. Nothing is recorded.
            RemoteProtocolError: the desired state cannot be decoded; a reset clears it.
            BusBroken: JetStream or the connection failed; earlier recordings stay.
        """
        command = check_command(command)
        roster = await self.roster(command)
        return await self.conclude(await self.execute(command, roster, on_ack, revise=revise))

    async def read(self, command: ReadExperts | ReadRequest) -> CommandResult:
        """Ask workers for data that they keep in memory, and return all their answers.

        Workers that do not answer within `timeout_s` are `late` or `missing`. Workers of earlier releases do not know
        these commands: they receive none and are `missing`.

        Admins and frontends read the requests of all clients. Trainers and publishers read their own, and viewers none.

        Raises:
            NoWorkers, InvalidRequest, BusBroken: as in `send`.
            ControlError: `not_allowed`: this user may not send the command.
        """
        command = check_command(command)
        self._check_may_read(command)
        everyone = [worker for workers in (await self.roster(command)).values() for worker in workers]
        is_list = isinstance(command, ReadRequest) and command.show is not None
        needed = "request_lists" if is_list or self._role in OWN_READERS else "telemetry_reads"
        able = [worker for worker in everyone if getattr(worker.capabilities, needed, False)]
        missing = dict.fromkeys((worker.worker for worker in everyone), TELLS_NOTHING)
        for worker in able:
            del missing[worker.worker]
        if not able:
            return CommandResult(command=command.command, id=command.id, missing=missing)
        if missing:
            command = replace(command, workers=tuple(worker.worker for worker in able))
        try:
            outcome = await self.execute(command, workers_that_must_ack(able, command), None)
        except PermissionDenied as exc:
            remedy = "the server has the permissions of an earlier release: renew them with `rollbus auth init`"
            raise ControlError(ControlCode.NOT_ALLOWED, f"{exc}; {remedy}") from exc
        return replace(outcome.result, missing=outcome.result.missing | missing)

    def _check_may_read(self, command: ReadExperts | ReadRequest) -> None:
        if not isinstance(command, ReadRequest) or self._role not in OWN_READERS:
            return
        who = f"user {self.name} (role {self._role})"
        if self._role is Role.VIEWER:
            problem = "may not read requests; roles that may: admin, frontend, and trainer and publisher their own"
            raise ControlError(ControlCode.NOT_ALLOWED, f"{who} {problem}")
        if command.client not in (None, self.name):
            problem = f"may read only its own requests, not those of {command.client}; roles that may: admin, frontend"
            raise ControlError(ControlCode.NOT_ALLOWED, f"{who} {problem}")

    async def roster(self, command: AnyCommand, *, is_fresh: bool = False) -> Roster:
        """Return the workers that must ack `command`. If a worker seems absent, ping all workers first.

        Args:
            is_fresh: ping them in any case.

        Raises:
            NoWorkers, InvalidRequest: as in `workers_that_must_ack`.
            BusBroken: the connection is lost.
        """
        known: tuple[str, ...] = ()
        if needs_known_models(command):
            known = await self.store.known_models(await self._live_models(), await self.store.models())
        with suppress(NoWorkers, InvalidRequest):
            if not is_fresh:
                return workers_that_must_ack(await self._watcher.known_workers(), command, known)
        return workers_that_must_ack(await self._watcher.ping_workers(), command, known)

    async def known_workers(self) -> tuple[WorkerPresence, ...]:
        """Return the last presence of each live worker."""
        return await self._watcher.known_workers()

    async def without(self, capability: str, model: str) -> tuple[str, ...]:
        """Return the present workers of `model` that announce their capabilities and lack this one."""
        return without(capability, await self._watcher.known_workers(), model)

    async def is_known(self, model: str) -> bool:
        """Return True if `model` has live workers or a valid stored state."""
        if model in await self._live_models():
            return True
        return model in await self.store.models() and await self.store.is_valid(model)

    async def _live_models(self) -> set[str]:
        return {worker.model for worker in await self._watcher.known_workers()}

    def check_allowed(self, command: AnyCommand, models: Iterable[str]) -> None:
        """Check that this user may send the command to workers of these models. Each worker checks this again.

        Raises:
            ControlError: `not_allowed`.
        """
        if self._own is not None:
            for model in models:
                check_authority(self._own, command, model)

    async def execute(
        self,
        command: AnyCommand,
        roster: Roster,
        on_ack: OnAck | None,
        *,
        revise: Revise | None = None,
        lost: Mapping[str, str] = {},
        quorum: Quorum | None = None,
    ) -> CommandOutcome:
        """Record `command` if it sets a register, publish it, and wait for the acks and for presence that shows them.

        Args:
            lost: why workers of `roster` have ended since it was made, where that is known.
            quorum: workers to wait for; None: all.
        """
        is_own_read = isinstance(command, READS) and self._role in OWN_READERS
        if not is_own_read:
            self.check_allowed(command, roster)
        everyone = [worker for workers in roster.values() for worker in workers]
        readers = everyone
        if command.register is not None:
            # Each worker of these models reads the desired state, whoever the command names.
            readers = [worker for worker in await self._watcher.known_workers() if worker.model in roster]
        command = _decodable(command, readers)
        tracker = AckTracker(command.command, command.id, everyone, time.monotonic(), quorum)
        live = self._watcher.live_incarnations()
        for worker in everyone:
            # A worker may have acked an earlier step and ended before this one: no further news of its end would come.
            if worker.worker in lost or (worker.worker, worker.incarnation) not in live:
                reason = lost.get(worker.worker, "it has ended")
                tracker.mark_lost(LostWorker(worker.worker, worker.incarnation, worker.model, reason))
        with self.collector.expecting(tracker):
            recordings: tuple[Recording, ...] = ()
            messages = [CommandMessage(command, frozenset(worker.worker for worker in everyone), is_own_read)]
            if command.register is not None:
                recordings = await self._record(command, roster, revise)
                messages = [CommandMessage(recording.command, recording.workers) for recording in recordings]
            # Workers answer a read immediately, so it needs no margin.
            wait_s = command.timeout_s + (0 if isinstance(command, READS) else MARGIN_S)
            await self.collector.collect(tracker, messages, wait_s, on_ack)
        result = tracker.result(time.monotonic(), {one.model: one.epoch for one in recordings})
        await self._watcher.wait_for_acked(result.applied.values(), SHOWN_S)
        if isinstance(command, Abort) and command.request_ids is not None:
            result = result.of_abort(command.request_ids)
        if isinstance(command, CancelWeightUpdate):
            result = result.of_cancel()
        return CommandOutcome(result, recordings, tracker.lost)

    async def conclude(self, outcome: CommandOutcome) -> CommandResult:
        """Return the command result if it is complete. Undo the recording for each model whose workers all failed.

        Raises:
            CommandIncomplete: the command result is incomplete.
        """
        result = outcome.result
        what = (result.command, result.id, result.epochs, result.seconds)
        logger.info(
            "command.ended command=%s id=%s epochs=%s seconds=%.3f"
            " applied=%d failed=%d unsupported=%d stale=%d late=%d missing=%d",
            *(*what, *(len(getattr(result, name)) for name in RESULTS)),
        )
        if result.is_complete:
            return result
        notes = [
            await self._restore(recording)
            for recording in outcome.recordings
            if recording.command.register not in HELD and _is_failed_by_all(outcome, recording.workers)
        ]
        raise CommandIncomplete(result, " ".join(notes))

    async def _record(self, command: AnyCommand, roster: Roster, revise: Revise | None) -> tuple[Recording, ...]:
        own = {model: _for_model(command, workers) for model, workers in roster.items()}
        if len(own) > 1:
            # A command that one model rejects is recorded for no model.
            for model, wanted in own.items():
                desired.record(await self.store.current(model), wanted)
        return tuple([await self._record_one(model, wanted, roster, revise) for model, wanted in own.items()])

    async def _record_one(self, model: str, wanted: AnyCommand, roster: Roster, revise: Revise | None) -> Recording:
        recorded, before, epoch = wanted, DesiredState(model=model), 0

        def change(state: DesiredState) -> DesiredState:
            nonlocal recorded, before, epoch
            before = state
            recorded = wanted if revise is None else revise(state, wanted)
            state, epoch = desired.record(state, recorded, self.name, time.time())
            return state

        await self.store.change(model, change)
        names = frozenset(worker.worker for worker in roster[model])
        sent = desired.without_term(replace(recorded, epoch=epoch, model=model, by=None))[1]
        return Recording(model, sent, epoch, before, names)

    async def _restore(self, recording: Recording) -> str:
        """Undo a recording unless the command was recorded before or a later command replaced it. Return a note."""
        register = recording.command.register
        if register is None or recording.epoch <= recording.before.epoch:
            return ""
        try:
            state = await self.store.change(
                recording.model, lambda state: desired.set_back(state, recording.before, register, recording.epoch)
            )
        except RollbusError as exc:
            logger.error("desired.rollback_failed model=%s epoch=%s error=%s", recording.model, recording.epoch, exc)
            return f"All workers of {recording.model} failed, and the desired state could not be restored: {exc}."
        logger.info("desired.rolled_back model=%s epoch=%s to=%s", recording.model, recording.epoch, state.epoch)
        return f"All workers of {recording.model} failed: their previous desired state was restored."


def check_command(command: Kind) -> Kind:
    """Encode and decode a command, so that an error appears here and not at each worker. Return the decoded command.

    Raises:
        InvalidRequest: a field is wrong.
    """
    if not isinstance(command, Command):
        raise InvalidRequest("command", f"is {describe(command)}", "one of rollbus.schemas.control")
    try:
        return cast(Kind, decode_command(encode_json(command)))
    except InvalidRequest:
        raise
    except (TypeError, ValueError, RecursionError, RemoteProtocolError) as exc:
        raise InvalidRequest(command.command, f"cannot be sent: {exc}", "values of JSON") from exc


def _decodable(command: AnyCommand, workers: Iterable[WorkerPresence]) -> AnyCommand:
    """Return `command` without the fields that one of these workers, of an earlier release, would reject.

    A starting worker has published no capabilities yet, and is left out.
    """
    if all(worker.capabilities is None or worker.capabilities.transfer_leases for worker in workers):
        return command
    if isinstance(command, UpdateWeightChunk | FinishWeightUpdate):
        command = replace(command, transfer=None)
    # A recorded command is sent without its author.
    return command if command.register is not None else replace(command, by=None)


def _for_model(command: AnyCommand, workers: tuple[WorkerPresence, ...]) -> AnyCommand:
    """Return `command` for one model: if it names workers, the result names exactly `workers`."""
    if command.workers is None:
        return command
    return replace(command, workers=tuple(worker.worker for worker in workers))


def _is_failed_by_all(outcome: CommandOutcome, workers: frozenset[str]) -> bool:
    """Return True if at least one of these workers failed, none applied the command, and none still may."""
    failed = (outcome.result.failed.keys() | outcome.result.unsupported.keys()) & workers
    return bool(failed) and workers <= failed | outcome.lost.keys()
