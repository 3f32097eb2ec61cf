"""The desired state of a worker's model: reads it, and decides which register is applied next and which state follows.

The decisions are pure functions. The state is read every few seconds, and after each message about a change. A worker
receives these messages from its first read on. If a fleet starts at once, many workers write the first state, and the
server delivers each of these writes to all receivers.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...bus.control.store import DesiredStore
from ...bus.protocol.fleet.desired import (
    WEIGHTS,
    ReadOrder,
    ReadVerdict,
    base_adapter,
    desired_loras,
    effective,
    target_version,
)
from ...bus.protocol.fleet.leases import ENDED
from ...bus.protocol.states import WorkerEvent
from ...bus.thread_calls import wait_at_most
from ...schemas.acks import AckError, AckStatus
from ...schemas.control import DesiredState, Drain, FinishWeightUpdate, Pause, Recorded, Sleep
from ...schemas.errors import BusBroken, BusClosed, ControlCode, ControlError, RemoteProtocolError
from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.weights import Canary, UpdateTiming, Verified

logger = logging.getLogger(__name__)


PAUSE = "pause"
"""Name of the register for pause, drain and resume."""
SLEEP = "sleep"
"""Name of the register for sleep and wake."""


_STATUSES = {ControlCode.UNSUPPORTED: AckStatus.UNSUPPORTED, ControlCode.STALE: AckStatus.STALE}
"""Ack status of each error code that does not mean `failed`."""
READ_S = 5.0
"""Maximum seconds between two reads, in case messages were missed. There are at least two reads per lease, so that one
late read does not invalidate the state. The cost for a fleet of hundreds is negligible."""
RETRY_S = 1.0
"""Seconds between a read that does not count and the next read: the server may be starting, have no JetStream for a
while, or not have heard from its cluster. Its leader hears from the other servers every second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterOutcome:
    """The outcome of applying a register, as in the final `Ack`."""

    status: AckStatus = AckStatus.APPLIED
    error: AckError | None = None
    canary: Canary | None = None
    verified: Verified | None = None
    frames: dict[str, int] | None = None
    timing: UpdateTiming | None = None

    @property
    def is_applied(self) -> bool:
        """True if the register has its desired value."""
        return self.status is AckStatus.APPLIED


@dataclass(frozen=True, slots=True)
class HandledRegister:
    """A register that was applied, successfully or not."""

    epoch: int
    """Epoch of the applied command, or -1 to apply the register again."""
    outcome: RegisterOutcome
    is_shown: bool = True
    """False until the worker has reached its target state, if the outcome answers commands only then."""


def repeat(handled: dict[str, HandledRegister], register: str) -> None:
    """Make a register due again."""
    outcome = handled[register].outcome if register in handled else RegisterOutcome()
    handled[register] = HandledRegister(-1, outcome)


@dataclass(frozen=True, slots=True)
class PendingRegister:
    """A register that must be applied."""

    register: str
    recorded: Recorded | None
    """The recorded command, or None if the register is no longer desired."""


def failure(error: ControlError) -> RegisterOutcome:
    """Return the outcome of a register whose application raised `error`."""
    status = _STATUSES.get(error.code, AckStatus.FAILED)
    return RegisterOutcome(status=status, error=AckError(code=error.code, message=error.message[:MAX_ERROR_CHARS]))


def pending_registers(
    effective: Mapping[str, Recorded], handled: Mapping[str, HandledRegister]
) -> list[PendingRegister]:
    """Return the registers to apply in order: first registers that are no longer desired, then the others by epoch.

    Of one epoch, the weights come first, because a transfer of weights must end before an adapter can be unloaded.
    """
    gone = sorted(handled.keys() - effective.keys())
    changed = sorted(
        (recorded.epoch, register != WEIGHTS, register)
        for register, recorded in effective.items()
        if register not in handled or handled[register].epoch != recorded.epoch
    )
    return [
        *(PendingRegister(register, None) for register in gone),
        *(PendingRegister(register, effective[register]) for _, _, register in changed),
    ]


def next_due(
    effective: Mapping[str, Recorded], handled: Mapping[str, HandledRegister], staging: Collection[str] = ()
) -> PendingRegister | None:
    """Return the first pending register that is not in `staging`, or None.

    Weights that wait for their source also delay the end of the adapter that they replace. It has the same epoch.

    Args:
        staging: registers that wait for their sources.
    """
    delayed = effective[WEIGHTS].epoch if WEIGHTS in staging and WEIGHTS in effective else None
    for due in pending_registers(effective, handled):
        if due.register not in staging and (due.recorded is None or due.recorded.epoch != delayed):
            return due
    return None


def target_event(
    effective: Mapping[str, Recorded],
    handled: Mapping[str, HandledRegister],
    *,
    is_poisoned: bool,
    has_conflict: bool = False,
    stop: WorkerEvent | None = None,
    staging: Collection[str] = (),
) -> WorkerEvent | None:
    """Return the event that leads to the target state. Call this only if no register is due.

    Invalid weights take precedence over a desired pause. If the desired weights do not exist any more, that is
    the state, whether or not the present weights are invalid.

    Args:
        has_conflict: True if the source of the present weights holds other content now.
        stop: `DRAINED` if the worker hands over its requests without a recorded drain, `SLEPT` if the engine sleeps,
            also if it should be awake and could not wake; None: it serves if the record lets it.

    Returns:
        The event, or None if the worker would serve but waits for the sources of the registers in `staging`.
    """
    if WEIGHTS not in staging:
        error = weights_error(handled) if WEIGHTS in effective else None
        if has_conflict or (error is not None and error.code is ControlCode.OTHER_CONTENT):
            return WorkerEvent.MISSED
        is_missed = WEIGHTS in effective and not is_applied(handled, WEIGHTS)
        is_lost = is_missed and isinstance(effective[WEIGHTS].command, FinishWeightUpdate)
        # True if a finish failed because this worker has not received the weights of the transfer.
        has_not_received = is_lost and error is not None and error.code in ENDED
        if is_poisoned and not has_not_received:
            return WorkerEvent.SPOILT
        if is_missed:
            return WorkerEvent.STRANDED if is_lost else WorkerEvent.MISSED
    pause = effective[PAUSE].command if PAUSE in effective else None
    if stop is WorkerEvent.DRAINED or isinstance(pause, Drain):
        return WorkerEvent.DRAINED
    has_slept = SLEEP in effective and isinstance(effective[SLEEP].command, Sleep) and is_applied(handled, SLEEP)
    if stop is WorkerEvent.SLEPT or has_slept:
        return WorkerEvent.SLEPT
    if isinstance(pause, Pause):
        return WorkerEvent.PAUSED
    return None if staging else WorkerEvent.CAUGHT_UP


def weights_error(handled: Mapping[str, HandledRegister]) -> AckError | None:
    """Return the error of the weights that were applied last, or None."""
    return handled[WEIGHTS].outcome.error if WEIGHTS in handled else None


def is_applied(handled: Mapping[str, HandledRegister], register: str) -> bool:
    """Return True if a register was applied successfully."""
    return register in handled and handled[register].outcome.is_applied


class _ReadCommand(NamedTuple):
    """A recorded command."""

    register: str
    epoch: int
    id: str


class DesiredReader:
    """The last read desired state of one worker.

    Args:
        max_age_s: seconds for which a read is valid: one lease. After that, controllers continue without this worker,
            and the desired state may have changed.
        may_begin: True: write an empty first state if none is stored.
    """

    def __init__(
        self, store: DesiredStore, *, model: str, worker: str, max_age_s: float, may_begin: bool = False
    ) -> None:
        self.store = store
        """The stored desired states."""
        self.model = model
        """Name of the model."""
        self._worker = worker
        self._max_age_s = max_age_s
        self._may_begin = may_begin
        self._has_failed_to_begin = False
        self.on_read: Callable[[], None] = lambda: None
        """Called after each successful read that was not stale."""
        self._is_requested = asyncio.Event()
        self._num_requested = 0
        # Commands requested since the last read began. That read may contain them. Bounded by the command log.
        self._awaited_commands: set[_ReadCommand] = set()
        self._is_reading = self._is_watching = False
        self._order = ReadOrder()
        self.is_lost = False
        self._lost_at_read = -1
        """Number of the last read that found `is_lost`, or -1. The state of the read before it was lost."""
        self.effective: Mapping[str, Recorded] = {}
        """The recorded command of each register of this worker."""
        self.epoch = 0
        """Epoch of the last read state."""
        self.target_version: int | None = None
        """Desired weight version, or None if no version is recorded."""
        self.desired_loras: frozenset[str] = frozenset()
        """Names of the desired adapters of the model, on any worker."""
        self.base_adapter_version: int | None = None
        """Desired version of the adapter under the model's name on this worker, or None if none is desired."""
        self.num_read = 0
        """Number of `request_read` calls that a finished read has answered."""
        self._known_at, self._awaited_since = -math.inf, time.monotonic()
        self.problem: str | None = None
        """Reason why the last read failed, or None if it succeeded."""

    @property
    def is_fresh(self) -> bool:
        """True if the state is that of a moment since the last `invalidate` and within `max_age_s`."""
        return self._known_at >= max(self._awaited_since, time.monotonic() - self._max_age_s)

    def request_read(self) -> int:
        """Request a read by `run`. Return the value that `num_read` has after that read."""
        self._num_requested += 1
        self._is_requested.set()
        return self._num_requested

    def request_command(self, register: str, epoch: int, command_id: str) -> int:
        """Request a read for a command recorded in `epoch`, unless that state was read or is being read.

        Each recording reaches a worker twice: through the KV bucket and through the command. This method avoids a
        second read. Its return value is as in `request_read`.
        """
        command = _ReadCommand(register, epoch, command_id)
        if self.is_fresh and self._holds(command):
            return self.num_read
        if not self._is_reading:
            return self.request_read()
        self._num_requested += 1
        self._awaited_commands.add(command)
        return self._num_requested

    def has_lost(self, register: str, epoch: int, command_id: str, needs_read: int) -> bool:
        """Return True if a read after the command arrived found an unrelated state that does not contain the command.

        Args:
            register: register of the command.
            epoch: epoch in which the command was recorded.
            command_id: id of the command.
            needs_read: the value returned by `request_command`.
        """
        return needs_read <= self._lost_at_read and not self._holds(_ReadCommand(register, epoch, command_id))

    def _holds(self, command: _ReadCommand) -> bool:
        recorded = self.effective.get(command.register)
        return recorded is not None and (recorded.epoch, recorded.command.id) == (command.epoch, command.id)

    def invalidate(self) -> None:
        """Discard the read state, and request a read.

        This worker was fenced or has just started: controllers have continued without it. A deposed leader may answer
        with the state before that, so a state counts only if a majority of the servers has confirmed its leader since.
        """
        self._awaited_since = time.monotonic()
        self.request_read()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            self._is_requested.clear()
            self._awaited_commands.clear()
            num_asked = self._num_requested
            self._is_reading = True
            try:
                await self._read()
                if not self._is_watching:
                    await self.store.watch(self.model, self.request_read)
                    self._is_watching = True
                    # The state may have changed since the read.
                    self._is_requested.set()
            except (BusBroken, BusClosed, RemoteProtocolError) as exc:
                if self.problem is None:
                    logger.warning("desired.read_failed model=%s error=%s", self.model, exc)
                self.problem = str(exc)
            else:
                self.problem = None
                if not all(map(self._holds, self._awaited_commands)):
                    self._is_requested.set()
                if not self._is_requested.is_set():
                    # The read state contains everything requested before the read.
                    num_asked = self._num_requested
                self.num_read = num_asked
                if self.is_lost:
                    self._lost_at_read = num_asked
                self.on_read()
            finally:
                self._is_reading = False
            wait_s = min(READ_S, self._max_age_s / 2) if self.is_fresh and not self.problem else RETRY_S
            await wait_at_most(self._is_requested, wait_s)

    async def _read(self) -> None:
        asked_at = time.monotonic()
        confirmed_s = await self.store.confirmed_s()
        if confirmed_s > self._max_age_s:
            raise BusBroken(
                f"the NATS server of the desired state of {self.model!r} reaches too few servers of its cluster: "
                "the others may have a newer state"
            )
        try:
            state = await self.store.read(self.model)
        except RemoteProtocolError:
            # The stored message is no valid desired state, so there is no state that this worker could miss.
            if self.is_fresh:
                self._known_at = max(self._known_at, asked_at - confirmed_s)
            raise
        self._update(state)
        # A state of the same history is no older than the one before it, although the last heartbeat may be long ago.
        self._known_at = max(-math.inf if self.is_lost else self._known_at, asked_at - confirmed_s)
        if state is None and self._may_begin:
            await self._begin()

    async def _begin(self) -> None:
        """Write the first state of the model, so that clients know the model also without workers."""
        try:
            await self.store.begin(self.model)
        except (BusBroken, ControlError) as exc:
            # The next read tries again. The state that was read stays valid.
            if not self._has_failed_to_begin:
                logger.warning("desired.first_write_failed model=%s error=%s", self.model, exc)
            self._has_failed_to_begin = True

    def _update(self, state: DesiredState | None) -> None:
        verdict = self._order.judge(state, time.monotonic())
        if verdict is ReadVerdict.STALE:
            found = "none" if state is None else f"one of epoch {state.epoch}"
            raise BusBroken(
                f"the server has {found} as the desired state of {self.model!r}, but epoch {self.epoch} was read "
                "before: the server is behind its cluster, or its store was lost"
            )
        self.is_lost = verdict is ReadVerdict.LOST
        self.effective = {} if state is None else effective(state, self._worker)
        self.epoch = 0 if state is None else state.epoch
        self.target_version = target_version(state, self._worker)
        self.desired_loras = desired_loras(state)
        adapter = base_adapter(self.effective, self.model)
        self.base_adapter_version = None if adapter is None else adapter.version
