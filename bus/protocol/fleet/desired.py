"""The desired state of a model's workers, and how commands change it.

*Commands are recorded in one order, each once, and only whole.* Epochs count them; a command that comes again under the
same id changes nothing. Of two commands on one register of a worker the later counts, whether it was for all workers or
for that one: therefore one for all removes those for single workers.
"""

from msgspec.structs import replace

from ....schemas import limits
from ....schemas.control import AnyCommand, FinishWeightUpdate, LoadLora, UnloadLora, UpdateWeights, WeightSource
from ....schemas.desired import DesiredState, Recorded, SeenCommand
from ....schemas.errors import ControlCode, ControlError

__all__ = [
    "WEIGHTS",
    "cleared",
    "contains",
    "desired_loras",
    "effective",
    "may_come_back",
    "next_lora_version",
    "record",
    "set_back",
    "target_version",
    "version_label",
]

WEIGHTS = "weights"
"""The register that says which weights a worker should have."""


def record(state: DesiredState, command: AnyCommand) -> tuple[DesiredState, int]:
    """Record `command`: the new state and the command's epoch.

    A command whose id was seen changes nothing: `state` itself, and the epoch of the first time.

    Raises:
        ControlError: INVALID_COMMAND, it sets no register, is for another model, or a bound is reached; OLD_VERSION,
            the weights that it names are not newer than those recorded for some worker that it concerns.
    """
    for seen in state.seen:
        if seen.id == command.id:
            return state, seen.epoch
    register = command.register
    if register is None:
        raise ControlError(ControlCode.INVALID_COMMAND, f"{command.command} sets nothing that could be recorded")
    if command.model not in (None, state.model):
        raise ControlError(
            ControlCode.INVALID_COMMAND, f"model is {command.model!r}; this is the desired state of {state.model!r}"
        )
    if isinstance(command, UpdateWeights | FinishWeightUpdate):
        _check_version(state, command)
    epoch = state.epoch + 1
    command = replace(command, epoch=epoch, model=state.model)
    if command.workers is None:
        registers = _bounded({**state.registers, register: Recorded(epoch=epoch, command=command)})
        workers = _without(state.workers, register)
    else:
        registers = state.registers
        workers = dict(state.workers)
        for worker in command.workers:
            # Alone: the value would otherwise grow with the square of the workers.
            own = Recorded(epoch=epoch, command=replace(command, workers=(worker,)))
            workers[worker] = _bounded({**workers.get(worker, {}), register: own})
        if len(workers) > limits.MAX_WORKER_OVERRIDES:
            raise ControlError(
                ControlCode.INVALID_COMMAND,
                f"{len(workers)} workers would have commands of their own; allowed: {limits.MAX_WORKER_OVERRIDES}. "
                "The same command for all workers of the model, or a reset, clears them",
            )
    seen_commands = (*state.seen, SeenCommand(command.id, epoch))[-limits.MAX_SEEN_COMMANDS :]
    return replace(state, epoch=epoch, registers=registers, workers=workers, seen=seen_commands), epoch


def contains(state: DesiredState, written: DesiredState, over: DesiredState) -> bool:
    """Whether `written`, whose write over `over` was not answered, was stored before `state` was read.

    That its commands are among those seen is the proof: later writes may have changed all else.
    """
    own = set(written.seen) - set(over.seen)
    return state == written or (bool(own) and own <= set(state.seen))


def effective(state: DesiredState, worker: str) -> dict[str, Recorded]:
    """What counts for one worker: of each register the later of what was said to all and to it alone."""
    found = dict(state.registers)
    for register, own in state.workers.get(worker, {}).items():
        common = found.get(register)
        # They are equal where one command, undone, had stood for both.
        if common is None or own.epoch >= common.epoch:
            found[register] = own
    return found


def target_version(state: DesiredState | None, worker: str) -> int | None:
    """The version of the weights that a worker should have; None: nothing is recorded about that."""
    recorded = None if state is None else effective(state, worker).get(WEIGHTS)
    if recorded is None or not isinstance(recorded.command, UpdateWeights | FinishWeightUpdate):
        return None
    return recorded.command.version


def version_label(state: DesiredState | None, worker: str, version: int) -> str | None:
    """What a trainer called a version that a worker has; None: it did not say, or it is not the recorded one."""
    recorded = None if state is None else effective(state, worker).get(WEIGHTS)
    if recorded is None or not isinstance(recorded.command, UpdateWeights | FinishWeightUpdate):
        return None
    return recorded.command.label if recorded.command.version == version else None


def desired_loras(state: DesiredState | None) -> frozenset[str]:
    """Names of the adapters that any worker should have."""
    if state is None:
        return frozenset()
    commands = (item.command for own in (state.registers, *state.workers.values()) for item in own.values())
    return frozenset(command.name for command in commands if isinstance(command, LoadLora))


def next_lora_version(state: DesiredState, register: str) -> int:
    """The version after those recorded in an adapter's register, for all workers or single ones; 1 for a new one.

    After an unload its version is forgotten. The epoch stands in for it, so that versions that were counted up before
    do not come again: what was cached with those adapters must not be taken for the new one's.
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

    What later commands have set since stays. Where that is all of it, `state` itself is returned.
    """
    new_epoch = state.epoch + 1
    registers = dict(state.registers)
    workers = {worker: dict(own) for worker, own in state.workers.items()}
    was_common = register in registers and registers[register].epoch == epoch
    if was_common:
        _restore(registers, before.registers, register, new_epoch)
    for worker in {*workers, *before.workers}:
        own = workers.setdefault(worker, {})
        # A command for all had removed it; one for this worker had replaced it.
        if own[register].epoch == epoch if register in own else was_common:
            _restore(own, before.workers.get(worker, {}), register, new_epoch)
    workers = {worker: own for worker, own in workers.items() if own}
    if registers == state.registers and workers == state.workers:
        return state
    return replace(state, epoch=new_epoch, registers=registers, workers=workers)


def may_come_back(state: DesiredState, command: AnyCommand) -> bool:
    """Whether a command that does not stand in `state` may be set back to.

    It was recorded, and later ones have taken its place, which may be undone; what an undo has put there may not.
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
    """Nothing desired any more, in a new epoch: epochs never begin anew, or later commands would look old."""
    return DesiredState(model=state.model, epoch=state.epoch + 1, seen=state.seen, bucket=state.bucket)


def _check_version(state: DesiredState, command: UpdateWeights | FinishWeightUpdate) -> None:
    """Refuse to go back, or to call other weights by the same version, where that was not asked for."""
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
        source = _source_of(present)
        if command.version < present.version:
            problem = f"is older than the recorded {present.version}"
        elif command.version == present.version and _source_of(command) != source:
            problem = f"is recorded already, from {source or 'a transfer engine'}"
        else:
            continue
        raise ControlError(
            ControlCode.OLD_VERSION, f"version {command.version} {problem}; allow_rollback permits it all the same"
        )


def _source_of(command: UpdateWeights | FinishWeightUpdate) -> WeightSource | None:
    """None: they came by a transfer."""
    return command.source if isinstance(command, UpdateWeights) else None


def _restore(registers: dict[str, Recorded], before: dict[str, Recorded], register: str, epoch: int) -> None:
    previous = before.get(register)
    if previous is None:
        registers.pop(register, None)
    else:
        command = replace(previous.command, epoch=epoch)
        registers[register] = Recorded(epoch=epoch, command=command)


def _without(workers: dict[str, dict[str, Recorded]], register: str) -> dict[str, dict[str, Recorded]]:
    """Take `register` from each worker's own; workers that are left with none are dropped."""
    rest = {
        worker: {name: recorded for name, recorded in own.items() if name != register}
        for worker, own in workers.items()
    }
    return {worker: own for worker, own in rest.items() if own}


def _bounded(registers: dict[str, Recorded]) -> dict[str, Recorded]:
    """Refuse too many adapters; drop the oldest unloads above as many."""
    num_loaded = sum(isinstance(recorded.command, LoadLora) for recorded in registers.values())
    if num_loaded > limits.MAX_LORAS:
        raise ControlError(ControlCode.INVALID_COMMAND, f"{num_loaded} adapters; allowed: {limits.MAX_LORAS}")
    unloaded = [
        (recorded.epoch, name) for name, recorded in registers.items() if isinstance(recorded.command, UnloadLora)
    ]
    excess = max(len(unloaded) - limits.MAX_LORAS, 0)
    dropped = {name for _, name in sorted(unloaded)[:excess]}
    return {name: recorded for name, recorded in registers.items() if name not in dropped}
