"""The desired state of a model's workers: how commands change it, whom it stops, who is behind, which reads count.

*Commands are recorded in one order, each once, and completely.* The epoch counts the recorded commands. A command that
arrives again with the same id changes nothing. Of two commands on one register of a worker, the later command counts,
whether it was for all workers or for that worker. So a command for all workers removes the commands for single workers.
"""

import enum
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from ....schemas import limits
from ....schemas.acks import Ack
from ....schemas.control import (
    AnyCommand,
    DesiredState,
    Drain,
    FinishWeightUpdate,
    LoadLora,
    Pause,
    Recorded,
    SeenCommand,
    Sleep,
    UnloadLora,
    UpdateWeights,
    lora_register,
)
from ....schemas.errors import ControlCode, ControlError
from ....schemas.presence import WorkerPresence, WorkerState
from ....schemas.weights import WeightSource

WEIGHTS = "weights"
"""The register with the weights that a worker should have."""
Served = UpdateWeights | FinishWeightUpdate | LoadLora
"""The commands whose version may answer under the model's name."""
_UNABLE: Final = frozenset(
    {
        WorkerState.STARTING,
        WorkerState.OUTDATED,
        WorkerState.POISONED,
        WorkerState.WAITING_FOR_WEIGHTS,
        WorkerState.FENCED,
        WorkerState.FAILED,
    }
)
"""States in which a worker serves nothing although no command requires this."""
SILENT: Final = frozenset({WorkerState.STARTING, WorkerState.FENCED, WorkerState.STOPPED, WorkerState.FAILED})
"""States of workers that serve nothing and send no acks. Before they serve, they read and apply what is recorded."""
STALE_S: Final = 30.0
"""Seconds after which an older or missing state counts as the real state: the store was restored from a backup, or it
was lost and not written since. nats-server checks every 10 s if a leader has had contact with its peers within 10 s, so
a deposed leader answers for 20 s at most.
"""


def record(state: DesiredState, command: AnyCommand, by: str = "", at: float = 0.0) -> tuple[DesiredState, int]:
    """Record `command`. Return the new state and the command's epoch.

    A command with a known id changes nothing: the result is `state` itself and the epoch of the first recording.

    Args:
        by: controller that sends the command. The command's own `by` counts first.
        at: Unix time.

    Raises:
        ControlError: INVALID_COMMAND if it sets no register, is for another model, exceeds a limit, or loads an adapter
            under the model's name without `for_base`. OLD_VERSION if its weights, or its adapter with `for_base`, are
            not newer than what is recorded under the model's name for a worker that it applies to.
    """
    for seen in state.seen:
        if seen.id == command.id:
            return state, seen.epoch
    register = command.register
    if register is None:
        raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} sets no register, so it cannot be recorded")
    if command.model not in (None, state.model):
        raise ControlError(
            ControlCode.INVALID_COMMAND, f"model is {command.model!r}; this is the desired state of {state.model!r}"
        )
    if isinstance(command, LoadLora) and command.for_base != (command.name == state.model):
        # Without `for_base`, requests that name the model use its base weights, so no request could use the adapter.
        problem = f"name is {command.name!r}, which is the name of the model itself; allowed: another name"
        if command.for_base:
            problem = f"name is {command.name!r}; allowed: {state.model!r}, because for_base is true"
        raise ControlError(ControlCode.INVALID_COMMAND, problem)
    if isinstance(command, UpdateWeights | FinishWeightUpdate) or (isinstance(command, LoadLora) and command.for_base):
        _check_version(state, command)
    epoch = state.epoch + 1
    # Workers of earlier releases can read the author beside the command, but not inside it.
    by, command = command.by or by, replace(command, epoch=epoch, model=state.model, by=None)
    for_s, command = without_term(command)
    seen_commands = (*state.seen, SeenCommand(command.id, epoch))[-limits.MAX_SEEN_COMMANDS :]
    if register == WEIGHTS and any(base_adapter(own, state.model) for own in state.everywhere):
        # New weights end the adapter under the model's name.
        end = UnloadLora(id=command.id, model=state.model, name=state.model, epoch=epoch, workers=command.workers)
        state = _set_register(state, Recorded(epoch=epoch, command=end, by=by, at=at))
    state = _set_register(state, Recorded(epoch=epoch, command=command, by=by, at=at, for_s=for_s))
    return replace(state, epoch=epoch, seen=seen_commands), epoch


def is_recorded(state: DesiredState, command: AnyCommand) -> bool:
    """Return True if the command is among the last recorded ones: it changes nothing, so nothing is checked for it."""
    return any(seen.id == command.id for seen in state.seen)


def without_term(command: AnyCommand) -> tuple[float, AnyCommand]:
    """Return the term of a loan, 0 for other commands, and the command as workers of earlier releases decode it."""
    if not isinstance(command, Sleep) or command.for_s is None:
        return 0.0, command
    return command.for_s, replace(command, for_s=None)


def _set_register(state: DesiredState, recorded: Recorded) -> DesiredState:
    """Return the state with a command in the register of all workers, or of the workers that the command names."""
    command, register = recorded.command, recorded.command.register or ""
    if command.workers is None:
        registers = _limit_adapters({**state.registers, register: recorded})
        workers = _omit(state.workers, register)
    else:
        registers = state.registers
        workers = dict(state.workers)
        for worker in command.workers:
            # Each worker gets a command that names it alone: the size must not grow with the square of the workers.
            own = replace(recorded, command=replace(command, workers=(worker,)))
            workers[worker] = _limit_adapters({**workers.get(worker, {}), register: own})
        if len(workers) > limits.MAX_WORKER_OVERRIDES:
            raise ControlError(
                ControlCode.INVALID_COMMAND,
                f"{len(workers)} workers would have commands of their own; allowed: {limits.MAX_WORKER_OVERRIDES}. "
                "To clear them, send the same command to all workers of the model, or a reset",
            )
    return replace(state, registers=registers, workers=workers)


def check_recordable(state: DesiredState, command: AnyCommand) -> None:
    """Raise the errors of `record` for weights whose digest is not known yet.

    A path may be a symlink to the recorded path, so it may hold the recorded content.

    Raises:
        ControlError: as `record`.
    """
    if isinstance(command, UpdateWeights) and command.digest is None and command.source.path is not None:
        recorded = (present.digest for present in _find_loads(state, command.version) if present.source.path)
        command = replace(command, digest=next(recorded, None))
    record(state, command)


def other_digests(state: DesiredState, command: UpdateWeights) -> frozenset[str]:
    """Return the digests that `state` records for the version of `command`, except the digest of `command`."""
    digests = {present.digest for present in _find_loads(state, command.version) if present.digest is not None}
    return frozenset(digests - {command.digest})


def _find_loads(state: DesiredState, version: int) -> list[UpdateWeights | LoadLora]:
    """Return the recorded updates to a version, for all or single workers, and adapters under the model's name."""
    recorded = [own[WEIGHTS].command for own in state.everywhere if WEIGHTS in own]
    loads: list[UpdateWeights | LoadLora] = [one for one in recorded if isinstance(one, UpdateWeights)]
    loads += filter(None, (base_adapter(own, state.model) for own in state.everywhere))
    return [command for command in loads if command.version == version]


def contains(state: DesiredState, written: DesiredState, over: DesiredState) -> bool:
    """Return True if `written` was stored before `state` was read.

    Use this if the write of `written` over `over` was not answered. The new command ids in `seen` prove the write,
    because later writes may have changed all other fields.
    """
    own = set(written.seen) - set(over.seen)
    return state == written or (bool(own) and own <= set(state.seen))


def effective(state: DesiredState, worker: str) -> dict[str, Recorded]:
    """Return the registers of one worker: for each register, the later of the common and the worker's own command."""
    found = dict(state.registers)
    for register, own in state.workers.get(worker, {}).items():
        common = found.get(register)
        # The epochs are equal if an undo restored a command in both places.
        if common is None or own.epoch >= common.epoch:
            found[register] = own
    return found


def _find_weights(state: DesiredState | None, worker: str) -> UpdateWeights | FinishWeightUpdate | None:
    recorded = None if state is None else effective(state, worker).get(WEIGHTS)
    command = None if recorded is None else recorded.command
    return command if isinstance(command, UpdateWeights | FinishWeightUpdate) else None


def target_version(state: DesiredState | None, worker: str) -> int | None:
    """Return the version of the weights that a worker should have; None: no version is recorded."""
    command = _find_weights(state, worker)
    return None if command is None else command.version


def version_label(state: DesiredState | None, worker: str, version: int) -> str | None:
    """Return the trainer's label of a worker's version; None: it has no label, or is not the recorded version."""
    command = _find_weights(state, worker)
    return command.label if command is not None and command.version == version else None


def base_adapter(registers: Mapping[str, Recorded], model: str) -> LoadLora | None:
    """Return the adapter that answers under the name of the model, or None."""
    recorded = registers.get(lora_register(model))
    return recorded.command if recorded is not None and isinstance(recorded.command, LoadLora) else None


def served_version(state: DesiredState | None, worker: str) -> int | None:
    """Return the version that should answer under the model's name: of its adapter, or of the weights; None: none."""
    adapter = None if state is None else base_adapter(effective(state, worker), state.model)
    return target_version(state, worker) if adapter is None else adapter.version


def desired_loras(state: DesiredState | None) -> frozenset[str]:
    """Return the names of the adapters that any worker should have."""
    if state is None:
        return frozenset()
    commands = (item.command for own in state.everywhere for item in own.values())
    return frozenset(command.name for command in commands if isinstance(command, LoadLora))


def check_unload(state: DesiredState, command: UnloadLora, loaded: Collection[str]) -> None:
    """Check that some worker of `command` has its adapter, or should have it.

    Args:
        loaded: names of the adapters that these workers have loaded. They may have more than is recorded after a reset.

    Raises:
        ControlError: NOT_FOUND.
    """
    if command.name in loaded or is_recorded(state, command):
        return
    if command.workers is None:
        names = desired_loras(state)
    else:
        recorded = [effective(state, worker).get(command.register) for worker in command.workers]
        names = frozenset(one.command.name for one in recorded if one and isinstance(one.command, LoadLora))
    if command.name not in names:
        known = ", ".join(sorted({*loaded, *names})) or "none"
        raise ControlError(ControlCode.NOT_FOUND, f"adapter {command.name!r} is not loaded; loaded: {known}")


def next_lora_version(state: DesiredState, register: str) -> int:
    """Return the version after those recorded in an adapter's register, for all or single workers; 1 for a new adapter.

    An unload removes the version. The epoch then takes its place, so that earlier versions are not used again.
    Otherwise cached data of the old adapter could count as data of the new one.
    """
    recorded = [registers[register].command for registers in state.everywhere if register in registers]
    versions = [command.version for command in recorded if isinstance(command, LoadLora)]
    if len(versions) < len(recorded):
        versions.append(state.epoch)
    return max(versions, default=0) + 1


def set_back(state: DesiredState, before: DesiredState, register: str, epoch: int) -> DesiredState:
    """Undo the command that was recorded in `epoch` over `before`, in a new epoch so that workers notice.

    Commands that were recorded later stay. If they replaced the whole command, return `state` itself.
    """
    new_epoch = state.epoch + 1
    registers = dict(state.registers)
    workers = {worker: dict(own) for worker, own in state.workers.items()}
    # New weights also ended the adapter under the model's name.
    for one in (register, lora_register(state.model)) if register == WEIGHTS else (register,):
        was_common = one in registers and registers[one].epoch == epoch
        if was_common:
            _restore(registers, before.registers, one, new_epoch)
        for worker in {*workers, *before.workers}:
            own = workers.setdefault(worker, {})
            # A command for all workers had removed it, or a command for this worker had replaced it.
            if own[one].epoch == epoch if one in own else was_common:
                _restore(own, before.workers.get(worker, {}), one, new_epoch)
    workers = {worker: own for worker, own in workers.items() if own}
    if registers == state.registers and workers == state.workers:
        return state
    return replace(state, epoch=new_epoch, registers=registers, workers=workers)


def may_come_back(state: DesiredState, command: AnyCommand) -> bool:
    """Return True if an undo may restore a command that is not in `state`.

    This is the case if the command was recorded and later commands have replaced it, which may be undone. A command
    that an undo has restored does not count as a later command.
    """
    epochs = {seen.id: seen.epoch for seen in state.seen}
    if command.id not in epochs or command.register is None:
        return False
    standing = [registers[command.register].epoch for registers in state.everywhere if command.register in registers]
    recorded = set(epochs.values())
    return any(epoch > epochs[command.id] and epoch in recorded for epoch in standing)


def cleared(state: DesiredState) -> DesiredState:
    """Clear the desired state in a new epoch.

    Epochs never restart: workers would treat later commands as old.
    """
    return DesiredState(model=state.model, epoch=state.epoch + 1, seen=state.seen, bucket=state.bucket)


def _check_version(state: DesiredState, command: Served) -> None:
    """Check that the version does not go back, or name other weights by the same version, without `allow_rollback`."""
    if not isinstance(command, LoadLora) and command.allow_rollback:
        return
    if command.workers is None:
        concerned = list(state.everywhere)
    else:
        concerned = [effective(state, worker) for worker in command.workers]
    for registers in concerned:
        present = base_adapter(registers, state.model) or (registers[WEIGHTS].command if WEIGHTS in registers else None)
        if not isinstance(present, Served):
            continue
        if command.version < present.version:
            problem = f"is older than the recorded {present.version}"
        elif command.version == present.version and not _is_same_content(command, present):
            problem = f"is recorded already, from {_find_source(present) or 'a transfer engine'}"
            if not isinstance(present, FinishWeightUpdate) and present.digest is not None:
                problem += f" with the digest {present.digest}"
        else:
            continue
        remedy = "unload the adapter first" if isinstance(command, LoadLora) else "allow_rollback permits it"
        raise ControlError(ControlCode.OLD_VERSION, f"version {command.version} {problem}; {remedy}")


def _find_source(command: Served) -> WeightSource | None:
    """Return the source of the weights; None: a weight transfer."""
    return None if isinstance(command, FinishWeightUpdate) else command.source


def _is_same_content(one: Served, other: Served) -> bool:
    """Return True if both commands name the same weights: by their digests, or without digests by their sources."""
    digests = {None if isinstance(each, FinishWeightUpdate) else each.digest for each in (one, other)}
    return len(digests) == 1 if None not in digests else _find_source(one) == _find_source(other)


def _restore(registers: dict[str, Recorded], before: dict[str, Recorded], register: str, epoch: int) -> None:
    previous = before.get(register)
    if previous is None:
        registers.pop(register, None)
    else:
        registers[register] = replace(previous, epoch=epoch, command=replace(previous.command, epoch=epoch))


def _omit(workers: dict[str, dict[str, Recorded]], register: str) -> dict[str, dict[str, Recorded]]:
    """Remove `register` from each worker's own registers, and the workers that have none left."""
    rest = {
        worker: {name: recorded for name, recorded in own.items() if name != register}
        for worker, own in workers.items()
    }
    return {worker: own for worker, own in rest.items() if own}


def _limit_adapters(registers: dict[str, Recorded]) -> dict[str, Recorded]:
    """Check the number of adapters, and remove the oldest unloads above the same limit."""
    num_loaded = sum(isinstance(recorded.command, LoadLora) for recorded in registers.values())
    if num_loaded > limits.MAX_LORAS:
        raise ControlError(ControlCode.INVALID_COMMAND, f"{num_loaded} adapters; allowed: {limits.MAX_LORAS}")
    unloaded = [
        (recorded.epoch, name) for name, recorded in registers.items() if isinstance(recorded.command, UnloadLora)
    ]
    excess = max(len(unloaded) - limits.MAX_LORAS, 0)
    dropped = {name for _, name in sorted(unloaded)[:excess]}
    return {name: recorded for name, recorded in registers.items() if name not in dropped}


def why_behind(worker: WorkerPresence, state: DesiredState) -> str | None:
    """Return why a worker does not match the desired state of its model, phrased to follow its id; None: it matches."""
    if worker.state in _UNABLE:
        return f"is {worker.state}" + (f": {worker.last_error}" if worker.last_error else "")
    if worker.loan_left_s is not None:
        # It loads the recorded weights when it returns. Another sleep may have replaced the loan.
        asleep = effective(state, worker.worker).get("sleep")
        is_desired = asleep is not None and isinstance(asleep.command, Sleep) and not asleep.for_s
        return None if worker.loan_left_s or is_desired else f"is still asleep: {worker.last_error}"
    doing = "" if worker.staging is None else f", {worker.staging.stage}"
    target = target_version(state, worker.worker)
    if target is not None and worker.weight_version != target:
        return f"has weights {worker.weight_version}, not {target}{doing}"
    if worker.epoch < state.epoch:
        return f"is at epoch {worker.epoch} of {state.epoch}{doing}"
    return None


def stale_workers(workers: Iterable[WorkerPresence], states: Mapping[str, DesiredState]) -> tuple[str, ...]:
    """Return the ids of the workers whose presence does not show yet that they handled their recorded commands."""
    return tuple(
        worker.worker
        for worker in workers
        if worker.state not in SILENT
        and worker.model in states
        and any(recorded.epoch > worker.epoch for recorded in effective(states[worker.model], worker.worker).values())
    )


def shows_ack(presence: WorkerPresence | None, ack: Ack) -> bool:
    """Return True if a worker's presence is as new as its ack of a recorded command, or its incarnation has ended."""
    return presence is None or presence.incarnation != ack.incarnation or presence.epoch >= (ack.epoch or 0)


class RecordedStop(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded pause, drain or sleep. It outlives its author and ends with a resume or a wake."""

    model: str
    """Model of the workers."""
    worker: str | None
    """The one worker that it stops; None: all workers of the model."""
    what: str
    """`paused (keep)`, `paused (wait)`, `paused (abort)`, `drained`, `asleep` or `lent for N s`."""
    by: str
    """Who recorded it; empty if the release of its author does not say."""
    since: float | None
    """Unix time of the recording; None if the release of its author does not say."""


def list_stops(states: Mapping[str, DesiredState]) -> list[RecordedStop]:
    """Return the stops of all models, first those for all workers of a model, then those for single workers."""
    found = []
    for model, state in sorted(states.items()):
        for worker, registers in [(None, state.registers), *sorted(state.workers.items())]:
            for register in ("pause", "sleep"):
                if register in registers and (what := stop_of(registers[register])) is not None:
                    recorded = registers[register]
                    since = recorded.at or None
                    found.append(RecordedStop(model=model, worker=worker, what=what, by=recorded.by, since=since))
    return found


def stop_of(recorded: Recorded) -> str | None:
    """Return in words how a recorded command stops workers; None: it does not."""
    match recorded.command:
        case Pause(mode=mode):
            return f"paused ({mode})"
        case Drain():
            return "drained"
        case Sleep() if recorded.for_s:
            return f"lent for {recorded.for_s:g} s"
        case Sleep():
            return "asleep"
    return None


def check_started(state: DesiredState, workers: tuple[WorkerPresence, ...], command: UpdateWeights | LoadLora) -> None:
    """Check that a version is newer than the version of workers for which nothing is recorded.

    Raises:
        ControlError: `old_version`.
    """
    started = {worker.weight_version for worker in workers if served_version(state, worker.worker) is None}
    if started and (command.version < max(started) or started == {command.version}):
        problem = f"version {command.version} is not newer than {max(started)}, which workers were started with"
        remedy = "" if isinstance(command, LoadLora) else "; set allow_rollback to load it anyway"
        raise ControlError(ControlCode.OLD_VERSION, f"{problem}{remedy}")


class ReadVerdict(enum.Enum):
    """The relation of a read to the read before it."""

    CURRENT = enum.auto()
    """The read state is the same or a later one."""
    STALE = enum.auto()
    """The read state is older, so the read does not count."""
    LOST = enum.auto()
    """The previous state was lost. This state is a different one, of which nothing was handled."""


class ReadOrder:
    """Judges the reads of one desired state by one reader.

    In a cluster, a deposed leader may answer with an older state. A state has the random id of its bucket, and its
    epoch only rises. So an older epoch of the same bucket is a stale read: the reader keeps its state and reads again.
    Another bucket means that the previous bucket was lost. The caller passes in the time; nothing here waits.
    """

    def __init__(self) -> None:
        self._last: DesiredState | None = None
        self._stale_since: float | None = None

    def judge(self, state: DesiredState | None, now: float) -> ReadVerdict:
        """Judge a read. A read that is not stale is the reference for later reads.

        Args:
            state: state that was read; None: no state was ever recorded.
        """
        verdict = self._compare(state)
        if verdict is ReadVerdict.STALE:
            self._stale_since = now if self._stale_since is None else self._stale_since
            if now < self._stale_since + STALE_S:
                return verdict
            verdict = ReadVerdict.LOST
        # Nothing is lost with a state without commands.
        self._last = None if state is None or state.is_first else state
        self._stale_since = None
        return verdict

    def _compare(self, state: DesiredState | None) -> ReadVerdict:
        last = self._last
        if last is None:
            return ReadVerdict.CURRENT
        if state is None:
            return ReadVerdict.STALE
        if _is_other_bucket(last, state) or _is_other_history(last, state):
            return ReadVerdict.LOST
        return ReadVerdict.CURRENT if state.epoch >= last.epoch else ReadVerdict.STALE


def _is_other_bucket(last: DesiredState, state: DesiredState) -> bool:
    # Earlier releases write states without a bucket id.
    return bool(last.bucket and state.bucket) and last.bucket != state.bucket


def _is_other_history(last: DesiredState, state: DesiredState) -> bool:
    """Return True if an epoch has another command than before: the store was restored and written since."""
    changed = {seen.epoch for seen in set(state.seen) - set(last.seen)}
    return not changed.isdisjoint([seen.epoch for seen in last.seen])
