"""Brings a worker to what is desired of it: one register at a time, in the order in which commands were recorded.

A command is only a hint to read the desired state. What became of each register is remembered, so that a command gets
its answer whenever it asks.

Invariant: a worker serves only once the desired state was read in its present life and nothing of it is due.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from bus.protocol.desired import WEIGHTS
from bus.protocol.states import SPEAKING, WorkerEvent
from schemas.control import LORA_REGISTER, AckError, AckStatus, Canary, Drain, Pause, PauseMode, Resume, Sleep
from schemas.errors import ControlCode, ControlError, EngineDead
from schemas.limits import MAX_ERROR_CHARS
from schemas.presence import WorkerState
from workers.control.desire import PAUSE, SLEEP, Dealt, Due, Outcome, failure, next_due, standing
from workers.control.parts import Parts
from workers.control.reading import DesiredReader
from workers.control.registers import Registers

__all__ = ["Reconciler"]

logger = logging.getLogger(__name__)

CUT_S = 1.0
"""For frames with what was sampled before a cut to leave, before the cut is called done: clients without credit, and a
slow network, must not hold it up."""
MARGIN_S = 5.0
"""Beyond a command's own `timeout_s`, which its parts keep by themselves: nothing here may hang for ever."""
FETCH_RETRY_S = 30.0
"""Before weights are tried again that could not be fetched: the object store, or the disk, may be there again."""
RESET_S = 600.0
"""For undoing what is no longer desired; weights may have to be loaded for that."""


class Reconciler:
    """Does what is due, in one task.

    Args:
        parts: the worker.
        registers: what is brought.
    """

    def __init__(self, parts: Parts, registers: Registers) -> None:
        self._life = parts.life
        self._links = parts.links
        self._sending = parts.sending
        self._flow = parts.flow
        self._engine_timeout_s = parts.config.engine_timeout_s
        self._registers = registers
        self._reader: DesiredReader
        self._on_change: Callable[[], None]
        # As many as the desired state has, and those of which it has none any more for as long as that takes.
        self._dealt: dict[str, Dealt] = {}
        self._epoch_read = 0
        self._ids_read: dict[tuple[str, int], str] = {}
        self._missed_at = 0.0
        self._has_started = asyncio.Event()
        self._is_due = asyncio.Event()
        # Registers are brought one at a time, and some events must not come in between.
        self._lock = asyncio.Lock()
        # What may still be broken off because a later command takes its place: its register, its epoch, and how.
        self._waiting: tuple[str, int, asyncio.Timeout] | None = None
        # What is being done: for which register, of which epoch, and what.
        self._stage: tuple[str, int, str] | None = None
        self.epoch = 0
        """Of the desired state that was dealt with last."""
        self.problem: str | None = None
        """Why this worker serves nothing; None where that is as desired."""

    def __repr__(self) -> str:
        """One line with what was dealt with."""
        dealt = {register: dealt.epoch for register, dealt in self._dealt.items()}
        return f"<Reconciler epoch={self.epoch} dealt={dealt} {self._registers!r}>"

    def connect(self, reader: DesiredReader, on_change: Callable[[], None]) -> None:
        """Say where to look, and whom to tell of stages and outcomes; once, before `run`."""
        self._reader = reader
        self._on_change = on_change

    def start(self) -> None:
        """The engine runs."""
        self._has_started.set()

    def look(self) -> None:
        """There may be something to do, or it may be possible now."""
        self._is_due.set()

    def on_read(self) -> None:
        """Look at what was read."""
        if self._is_lost():
            # Epochs never begin anew, unless the bucket was lost: nothing that was done says anything about this one.
            logger.warning("desired.lost epoch=%s was=%s", self._reader.epoch, self._epoch_read)
            self._dealt = {register: Dealt(-1, dealt.outcome) for register, dealt in self._dealt.items()}
        self._epoch_read, self._ids_read = self._reader.epoch, self._ids()
        self._retry_weights()
        versions = self._links.versions
        wanted = self._reader.target_version
        versions.target_version = versions.weight_version if wanted is None else wanted
        versions.wanted_loras = self._reader.wanted_loras
        self._break_off()
        self._is_due.set()
        self._on_change()

    def _ids(self) -> dict[tuple[str, int], str]:
        """Of the commands that count, by register and epoch."""
        effective = self._reader.effective
        return {(register, recorded.epoch): recorded.command.id for register, recorded in effective.items()}

    def _is_lost(self) -> bool:
        """The desired state is another one than before: its epochs went back, or bear other commands."""
        before = self._ids_read
        return self._reader.epoch < self._epoch_read or any(
            before.get(key, id_) != id_ for key, id_ in self._ids().items()
        )

    def _break_off(self) -> None:
        """End what waits, if a later command has taken its place."""
        if self._waiting is None:
            return
        (register, epoch, limit), now = self._waiting, asyncio.get_running_loop().time()
        ends_at = limit.when()
        # Once: a limit that is over cannot be moved.
        if self._epoch_of(register) != epoch and ends_at is not None and ends_at > now:
            limit.reschedule(now)

    def _retry_weights(self) -> None:
        """Make weights due again that failed for a reason which passes by itself."""
        dealt = self._dealt.get(WEIGHTS)
        error = None if dealt is None or dealt.outcome is None else dealt.outcome.error
        is_passing = error is not None and error.code is ControlCode.STORAGE
        if dealt is not None and is_passing and time.monotonic() > self._missed_at + FETCH_RETRY_S:
            self._dealt[WEIGHTS] = Dealt(-1, dealt.outcome)

    def _epoch_of(self, register: str) -> int | None:
        recorded = self._reader.effective.get(register)
        return None if recorded is None else recorded.epoch

    def outcome_of(self, register: str, epoch: int) -> Outcome | None:
        """What became of the command that was recorded in `epoch`; None: it is not known yet."""
        if self._epoch_read < epoch:
            return None
        if self._epoch_of(register) == epoch:
            dealt = self._dealt.get(register)
            return dealt.outcome if dealt is not None and dealt.epoch == epoch else None
        message = f"a later command has set {register}"
        return Outcome(status=AckStatus.STALE, error=AckError(code=ControlCode.STALE, message=message))

    def stage_of(self, register: str, epoch: int) -> str | None:
        """What is being done about the command that was recorded in `epoch`; None: nothing now."""
        return self._stage[2] if self._stage is not None and self._stage[:2] == (register, epoch) else None

    def has_newer_weights(self, epoch: int | None) -> bool:
        """Other weights were recorded after `epoch`; None: since nobody knows when."""
        return epoch is not None and (self._epoch_of(WEIGHTS) or 0) > epoch

    @property
    def lacking(self) -> str | None:
        """Which adapters are not as desired, and why, for people; None: all are."""
        errors = {
            register.removeprefix(LORA_REGISTER): dealt.outcome.error
            for register, dealt in sorted(self._dealt.items())
            if register.startswith(LORA_REGISTER) and dealt.outcome is not None
        }
        lines = [f"adapter {name} is not as desired: {error.message}" for name, error in errors.items() if error]
        return "; ".join(lines)[:MAX_ERROR_CHARS] or None

    @property
    def pause_mode(self) -> PauseMode | None:
        """How this worker is to be paused; None where it is not."""
        recorded = self._reader.effective.get(PAUSE)
        return recorded.command.mode if recorded is not None and isinstance(recorded.command, Pause) else None

    async def run(self) -> None:
        """Once started, prove the engine; then do what is due, until cancelled.

        Raises:
            EngineDead: the engine is gone, or failed its proof.
        """
        await self._has_started.wait()
        await self._registers.weights.prove()
        # Proving may have held up this process for longer than the lease.
        await self._life.publish()
        self._life.advance(WorkerEvent.READY)
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while (due := self._next()) is not None:
                async with self._lock:
                    await self._bring(due)
            async with self._lock:
                self._registers.transfer.expire(time.monotonic())
                await self._settle()

    def _may_act(self) -> bool:
        return self._reader.is_fresh and self._life.may_speak()

    def _next(self) -> Due | None:
        return next_due(self._reader.effective, self._dealt) if self._may_act() else None

    def _begin(self) -> None:
        """Take no more requests until the worker has settled."""
        if self._life.state in SPEAKING and self._life.state is not WorkerState.UPDATING:
            self._life.advance(WorkerEvent.CHANGED)
        self._flow.close()

    async def _bring(self, due: Due) -> None:
        self._begin()
        if due.recorded is None:
            await self._attempt(due, self._registers.reset(due.register, lambda _stage: None, RESET_S), RESET_S)
            self._dealt.pop(due.register)
            return
        command, epoch = due.recorded.command, due.recorded.epoch
        logger.info("command.begun command=%s epoch=%s", command.command, epoch)

        def report(stage: str) -> None:
            if stage == "loading" and self._waiting is not None:
                # From here on what is broken off would leave weights half written.
                left_s = command.timeout_s + MARGIN_S
                self._waiting[2].reschedule(asyncio.get_running_loop().time() + left_s)
                self._waiting = None
            self._stage = due.register, epoch, stage
            self._on_change()

        work = self._registers.bring(command, report)
        outcome = await self._attempt(due, work, command.timeout_s)
        self._stage = None
        logger.info("command.ended command=%s epoch=%s status=%s", command.command, epoch, outcome.status)
        # While a transfer is open, the worker does not settle; what it said no to stands.
        is_shown_later = isinstance(command, Resume | Drain) and outcome.is_applied and not self._is_transferring
        self._dealt[due.register] = Dealt(epoch, None if is_shown_later else outcome)
        self._keep_asleep()
        self._on_change()

    def _keep_asleep(self) -> None:
        """What woke the engine up for a while lets it sleep again."""
        recorded, dealt = self._reader.effective.get(SLEEP), self._dealt.get(SLEEP)
        wants_sleep = recorded is not None and isinstance(recorded.command, Sleep)
        was_asleep = dealt is not None and dealt.outcome is not None and dealt.outcome.is_applied
        if wants_sleep and was_asleep and not self._registers.is_asleep:
            self._dealt[SLEEP] = Dealt(-1, Outcome())

    async def _attempt(self, due: Due, work: Awaitable[Canary | None], timeout_s: float) -> Outcome:
        """Carry `work` out; whatever it trips over, the worker goes on."""
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S) as limit:
                if due.register in (PAUSE, WEIGHTS) and due.recorded is not None:
                    self._waiting = due.register, due.recorded.epoch, limit
                canary = await work
                # There is nothing left to break off, nor may a limit be moved that is over.
                self._waiting = None
            # The answer cannot leave before either; so nothing that was sampled so far comes after it.
            await self._sending.wait_connected()
            await self._cut()
        except ControlError as exc:
            return self._failed(due, exc)
        except TimeoutError:
            if due.recorded is not None and self._epoch_of(due.register) != due.recorded.epoch:
                return self.outcome_of(due.register, due.recorded.epoch) or Outcome(status=AckStatus.STALE)
            return self._failed(due, ControlError(ControlCode.TIMEOUT, f"not done within {timeout_s:g} s"))
        except EngineDead:
            raise
        except Exception as exc:
            # The boundary of one command: an engine or a source may stumble over anything.
            logger.exception("command.failed register=%s", due.register)
            if due.register == WEIGHTS:
                self._registers.weights.distrust(f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS])
            return self._failed(due, ControlError(ControlCode.ENGINE_ERROR, f"{type(exc).__name__}: {exc}"))
        finally:
            self._waiting = None
        return Outcome(canary=canary, frames=self._links.routes.frame_counts())

    def _failed(self, due: Due, error: ControlError) -> Outcome:
        logger.error("command.not_applied register=%s error=%s", due.register, error)
        if due.register == WEIGHTS:
            self._missed_at = time.monotonic()
        return failure(error)

    async def _cut(self) -> None:
        """See off what was sampled so far."""
        try:
            async with asyncio.timeout(CUT_S):
                self._flow.hand_over()
                await self._sending.wait_sent()
        except TimeoutError:
            logger.warning("command.frames_wait links=%r", self._links)

    async def exclusive(self, work: Callable[[], Awaitable[None]], *, halts: bool) -> None:
        """Do something between two registers.

        Args:
            halts: no requests are taken meanwhile, nor afterwards where the worker's standing has changed.

        Raises:
            Exception: what `work` raises.
        """
        async with self._lock:
            if halts:
                self._begin()
            # Also where `work` fails or is cancelled, the worker settles; then later, in its own task.
            self._is_due.set()
            await work()
            await self._settle()

    @property
    def _is_transferring(self) -> bool:
        return self._registers.transfer.is_open

    async def _settle(self) -> None:
        """Become what nothing is due for; does nothing while something is, or the worker may not act."""
        is_unsettled = self._life.state is WorkerState.UPDATING and not self._is_transferring
        if not is_unsettled or not self._may_act() or self._next() is not None:
            return
        effective, epoch = self._reader.effective, self._reader.epoch
        event = standing(effective, self._dealt, is_poisoned=self._registers.weights.is_poisoned)
        self.problem = self._problem_of(event)
        try:
            async with asyncio.timeout(self._engine_timeout_s):
                await self._arrange(event)
        except TimeoutError:
            raise EngineDead(f"it neither froze nor went on for {self._engine_timeout_s:g} s") from None
        except ControlError as exc:
            raise EngineDead(f"it neither froze nor went on: {exc.message}") from exc
        if not self._may_act():
            return  # fenced meanwhile
        self.epoch = epoch
        self._life.advance(event)
        for register, dealt in self._dealt.items():
            if dealt.outcome is None:
                self._dealt[register] = Dealt(dealt.epoch, Outcome())
        self._on_change()

    async def _arrange(self, event: WorkerEvent) -> None:
        match event:
            case WorkerEvent.CAUGHT_UP:
                await self._flow.go()
            case WorkerEvent.PAUSED if self.pause_mode == "keep":
                await self._flow.freeze()
            case WorkerEvent.PAUSED:
                self._flow.release_steps()
                await self._flow.thaw()
            case WorkerEvent.SLEPT:
                self._waiting = None
            case _:
                self._flow.give_up(self.problem or "this worker is drained")
                await self._flow.thaw()
                await self._cut()

    def _problem_of(self, event: WorkerEvent) -> str | None:
        if event is WorkerEvent.SPOILT:
            return self._registers.weights.problem or "its weights are not to be trusted"
        if event in (WorkerEvent.MISSED, WorkerEvent.STRANDED):
            outcome = self._dealt[WEIGHTS].outcome
            return None if outcome is None or outcome.error is None else outcome.error.message
        return None
