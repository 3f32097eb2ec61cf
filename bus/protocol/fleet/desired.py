"""The desired state of a model's workers, and how commands change it.

*Commands are recorded in one order, each once, and completely.* The epoch counts the recorded commands. A command that
arrives again with the same id changes nothing. Of two commands on one register of a worker, the later command counts,
whether it was for all workers or for that worker. So a command for all workers removes the commands for single workers.
"""

from collections.abc import Collection

from msgspec.structs import replace

from ....schemas import limits
from ....schemas.control import AnyCommand, FinishWeightUpdate, LoadLora, UnloadLora, UpdateWeights, WeightSource
from ....schemas.desired import DesiredState, Recorded, SeenCommand
from ....schemas.errors import ControlCode, ControlError

__all__ = [
    "WEIGHTS",
    "check_recordable",
    "check_unload",
    "cleared",
    "contains",
    "desired_loras",
    "effective",
    "may_come_back",
    "next_lora_version",
    "other_digests",
    "record",
    "set_back",
    "target_version",
    "version_label",
]

WEIGHTS = "weights"
"""The register with the weights that a worker should have."""


def record(state: DesiredState, command: AnyCommand, by: str = "", at: float = 0.0) -> tuple[DesiredState, int]:
    """Record `command`. Return the new state and the command's epoch.

    A command with a known id changes nothing: the result is `state` itself and the epoch of the first recording.

    Args:
        by: controller that sends the command. The command's own `by` counts first.
        at: Unix time.

    Raises:
        ControlError: INVALID_COMMAND if it sets no register, is for another model, or exceeds a limit. OLD_VERSION if
            its weights are not newer than those recorded for a worker that it applies to.
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
    if isinstance(command, UpdateWeights | FinishWeightUpdate):
        _check_version(state, command)
    if isinstance(command, LoadLora) and command.name == state.model:
        # Requests that name the model use its base weights, so no request could use the adapter.
        problem = f"name is {command.name!r}, which is the name of the model itself; allowed: another name"
        raise ControlError(ControlCode.INVALID_COMMAND, problem)
    epoch = state.epoch + 1
    # Workers of earlier releases can read the author beside the command, but not inside it.
    by, command = command.by or by, replace(command, epoch=epoch, model=state.model, by=None)
    if command.workers is None:
        registers = _bounded({**state.registers, register: Recorded(epoch=epoch, command=command, by=by, at=at)})
        workers = _without(state.workers, register)
    else:
        registers = state.registers
        workers = dict(state.workers)
        for worker in command.workers:
            # Each worker gets a command that names it alone: the size must not grow with the square of the workers.
            own = Recorded(epoch=epoch, command=replace(command, workers=(worker,)), by=by, at=at)
            workers[worker] = _bounded({**workers.get(worker, {}), register: own})
        if len(workers) > limits.MAX_WORKER_OVERRIDES:
            raise ControlError(
                ControlCode.INVALID_COMMAND,
                f"{len(workers)} workers would have commands of their own; allowed: {limits.MAX_WORKER_OVERRIDES}. "
                "To clear them, send the same command to all workers of the model, or a reset",
            )
    seen_commands = (*state.seen, SeenCommand(command.id, epoch))[-limits.MAX_SEEN_COMMANDS :]
    return replace(state, epoch=epoch, registers=registers, workers=workers, seen=seen_commands), epoch


def check_recordable(state: DesiredState, command: AnyCommand) -> None:
    """Raise the errors of `record` for weights whose digest is not known yet.

    A path may be a symlink to the recorded path, so it may hold the recorded content.

    Raises:
        ControlError: as `record`.
    """
    if isinstance(command, UpdateWeights) and command.digest is None and command.source.path is not None:
        recorded = (present.digest for present in _of_version(state, command.version) if present.source.path)
        command = replace(command, digest=next(recorded, None))
    record(state, command)


def other_digests(state: DesiredState, command: UpdateWeights) -> frozenset[str]:
    """Return the digests that `state` records for the version of `command`, except the digest of `command`."""
    digests = {present.digest for present in _of_version(state, command.version) if present.digest is not None}
    return frozenset(digests - {command.digest})


def _of_version(state: DesiredState, version: int) -> list[UpdateWeights]:
    """Return the recorded updates to a version, for all or single workers."""
    recorded = (own[WEIGHTS].command for own in (state.registers, *state.workers.values()) if WEIGHTS in own)
    return [command for command in recorded if isinstance(command, UpdateWeights) and command.version == version]


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


def target_version(state: DesiredState | None, worker: str) -> int | None:
    """Return the version of the weights that a worker should have; None: no version is recorded."""
    recorded = None if state is None else effective(state, worker).get(WEIGHTS)
    if recorded is None or not isinstance(recorded.command, UpdateWeights | FinishWeightUpdate):
        return None
    return recorded.command.version


def version_label(state: DesiredState | None, worker: str, version: int) -> str | None:
    """Return the trainer's label of a worker's version; None: it has no label, or is not the recorded version."""
    recorded = None if state is None else effective(state, worker).get(WEIGHTS)
    if recorded is None or not isinstance(recorded.command, UpdateWeights | FinishWeightUpdate):
        return None
    return recorded.command.label if recorded.command.version == version else None


def desired_loras(state: DesiredState | None) -> frozenset[str]:
    """Return the names of the adapters that any worker should have."""
    if state is None:
        return frozenset()
    commands = (item.command for own in (state.registers, *state.workers.values()) for item in own.values())
    return frozenset(command.name for command in commands if isinstance(command, LoadLora))


def check_unload(state: DesiredState, command: UnloadLora, loaded: Collection[str]) -> None:
    """Check that some worker of `command` has its adapter, or should have it.

    Args:
        loaded: names of the adapters that these workers have loaded. They may have more than is recorded after a reset.

    Raises:
        ControlError: NOT_FOUND.
    """
    if command.name in loaded or any(seen.id == command.id for seen in state.seen):
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
    recorded = [
        registers[register].command for registers in (state.registers, *state.workers.values()) if register in registers
    ]
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
    was_common = register in registers and registers[register].epoch == epoch
    if was_common:
        _restore(registers, before.registers, register, new_epoch)
    for worker in {*workers, *before.workers}:
        own = workers.setdefault(worker, {})
        # A command for all workers had removed it, or a command for this worker had replaced it.
        if own[register].epoch == epoch if register in own else was_common:
            _restore(own, before.workers.get(worker, {}), register, new_epoch)
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
    standing = [
        registers[command.register].epoch
        for registers in (state.registers, *state.workers.values())
        if command.register in registers
    ]
    recorded = set(epochs.values())
    return any(epoch > epochs[command.id] and epoch in recorded for epoch in standing)


def cleared(state: DesiredState) -> DesiredState:
    """Clear the desired state in a new epoch.

    Epochs never restart: workers would treat later commands as old.
    """
    return DesiredState(model=state.model, epoch=state.epoch + 1, seen=state.seen, bucket=state.bucket)


def _check_version(state: DesiredState, command: UpdateWeights | FinishWeightUpdate) -> None:
    """Check that the version does not go back, or name other weights by the same version, without `allow_rollback`."""
    if command.allow_rollback:
        return
    if command.workers is None:
        concerned = [state.registers, *state.workers.values()]
    else:
        concerned = [effective(state, worker) for worker in command.workers]
    for registers in concerned:
        present = registers[WEIGHTS].command if WEIGHTS in registers else None
        if not isinstance(present, UpdateWeights | FinishWeightUpdate):
            continue
        if command.version < present.version:
            problem = f"is older than the recorded {present.version}"
        elif command.version == present.version and not _is_same_content(command, present):
            problem = f"is recorded already, from {_source_of(present) or 'a transfer engine'}"
            if isinstance(present, UpdateWeights) and present.digest is not None:
                problem += f" with the digest {present.digest}"
        else:
            continue
        raise ControlError(ControlCode.OLD_VERSION, f"version {command.version} {problem}; allow_rollback permits it")


def _source_of(command: UpdateWeights | FinishWeightUpdate) -> WeightSource | None:
    """Return the source of the weights; None: a weight transfer."""
    return command.source if isinstance(command, UpdateWeights) else None


def _is_same_content(one: UpdateWeights | FinishWeightUpdate, other: UpdateWeights | FinishWeightUpdate) -> bool:
    """Return True if both commands name the same weights: by their digests, or without digests by their sources."""
    if isinstance(one, UpdateWeights) and isinstance(other, UpdateWeights) and one.digest and other.digest:
        return one.digest == other.digest
    return _source_of(one) == _source_of(other)


def _restore(registers: dict[str, Recorded], before: dict[str, Recorded], register: str, epoch: int) -> None:
    previous = before.get(register)
    if previous is None:
        registers.pop(register, None)
    else:
        registers[register] = replace(previous, epoch=epoch, command=replace(previous.command, epoch=epoch))


def _without(workers: dict[str, dict[str, Recorded]], register: str) -> dict[str, dict[str, Recorded]]:
    """Remove `register` from each worker's own registers, and the workers that have none left."""
    rest = {
        worker: {name: recorded for name, recorded in own.items() if name != register}
        for worker, own in workers.items()
    }
    return {worker: own for worker, own in rest.items() if own}


def _bounded(registers: dict[str, Recorded]) -> dict[str, Recorded]:
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
