"""Decides what the author of a signed command or desired state may change, and what the recorded state binds. No I/O.

An admin and a frontend may change everything. A publisher may send some commands for some models. Every author writes
the whole desired state. So a publisher also sends its base: the last state by an author that may write all of it. The
publisher's state may differ from the base only in the publisher's own registers.

A version is pinned to its content: the record has the digest that all workers found at its source when they staged it.
"""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar, get_args

from msgspec.structs import replace

from ....schemas.acks import Ack
from ....schemas.checks import list_names
from ....schemas.control import AnyCommand, Certificate, Command, DesiredState, LoadLora, Recorded, UpdateWeights
from ....schemas.errors import ControlCode, ControlError, RemoteProtocolError
from ....schemas.presence import WorkerPresence
from ....schemas.weights import WeightSource

MAX_AGE_S: Final = 60.0
"""The maximum age of a command's signature in seconds, by the worker's clock. For this time, a copied command can be
published again. A controller signs a command again at each repeat, so the limit only needs room for clock differences.
"""
_REGISTERS: Final = {
    str(kind.__struct_config__.tag): kind.sets for kind in get_args(AnyCommand) if kind.sets is not None
}
MAX_NAMED: Final = 8
"""Workers that an error message names, for each digest or each command. The command result has all of them."""
Load = TypeVar("Load", UpdateWeights, LoadLora)


def check_authority(by: Certificate, command: Command, model: str) -> None:
    """Check that the author may send this command to workers of `model`.

    Raises:
        ControlError: `not_allowed`.
    """
    if not by.covers_command(command.command):
        allowed = ", ".join(by.commands or ())
        raise ControlError(
            ControlCode.NOT_ALLOWED, f"{by.role} {by.name} may not send {command.command}; allowed: {allowed}"
        )
    if command.by is not None and by.is_limited:
        raise ControlError(ControlCode.NOT_ALLOWED, f"{by.role} {by.name} may not send commands of {command.by}")
    if not by.covers_model(model):
        allowed = ", ".join(by.models or ())
        raise ControlError(
            ControlCode.NOT_ALLOWED, f"{by.role} {by.name} may not command workers of {model!r}; allowed: {allowed}"
        )


def check_unlimited(own: Certificate | None) -> None:
    """Check that this user may sign states that others wrote.

    Raises:
        ControlError: `not_allowed`.
    """
    if own is None or own.is_limited:
        raise ControlError(
            ControlCode.NOT_ALLOWED,
            "to sign a state of another author, use the credentials of an admin, with a certificate by the root key",
        )


def check_age(age_s: float) -> None:
    """Check the age of a command's signature. An old command may be a copy that was published again.

    Raises:
        ControlError: `not_allowed`.
    """
    if abs(age_s) > MAX_AGE_S:
        ago = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s ahead"
        raise ControlError(
            ControlCode.NOT_ALLOWED,
            f"the command was signed {ago} by this worker's clock; allowed: {MAX_AGE_S:g} s. Clocks of controllers "
            "and workers must agree",
        )


def check_limited_state(by: Certificate, state: DesiredState, base: DesiredState | None) -> None:
    """Check that a limited author changed only its own registers of `base`.

    Raises:
        RemoteProtocolError: the state differs in something else.
    """
    who = f"{by.role} {by.name}"
    base = base or DesiredState(model=state.model)
    if not by.covers_model(state.model):
        raise RemoteProtocolError(f"{who} may not write the desired state of {state.model!r}")
    if state.epoch < base.epoch:
        raise RemoteProtocolError(f"{who} has written epoch {state.epoch} over epoch {base.epoch}")
    if base.bucket not in {"", state.bucket}:
        raise RemoteProtocolError(f"{who} wrote the id of another bucket")
    own = frozenset(register for command, register in _REGISTERS.items() if by.covers_command(command))
    if _omit(state, own) != _omit(base, own):
        raise RemoteProtocolError(f"{who} has changed more than {', '.join(sorted(own))}")
    for registers in state.everywhere:
        for name in own & registers.keys():
            if not _may_record(by, state, name, registers[name]):
                raise RemoteProtocolError(f"{who} may not record {registers[name].command.command} in {name}")


def _omit(state: DesiredState, own: frozenset[str]) -> tuple[dict[str, Recorded], dict[str, dict[str, Recorded]]]:
    """Return all other registers, for all workers and for single workers."""
    registers = {name: recorded for name, recorded in state.registers.items() if name not in own}
    workers = {
        worker: others
        for worker, mine in state.workers.items()
        if (others := {name: recorded for name, recorded in mine.items() if name not in own})
    }
    return registers, workers


def _may_record(by: Certificate, state: DesiredState, register: str, recorded: Recorded) -> bool:
    command = recorded.command
    return (
        by.covers_command(command.command)
        and command.register == register
        and command.model == state.model
        and recorded.epoch <= state.epoch
    )


def without(capability: str, workers: Collection[WorkerPresence], model: str) -> tuple[str, ...]:
    """Return the workers of a model that lack a capability, so that they could not decode a desired state with it.

    The desired state is one message for the whole model, so one such worker counts. A starting worker has
    published no capabilities yet, and is left out.
    """
    return tuple(
        sorted(
            worker.worker
            for worker in workers
            if worker.model == model
            and worker.capabilities is not None
            and not getattr(worker.capabilities, capability)
        )
    )


def pin(command: Load, staged: Mapping[str, Ack], unable: Collection[str]) -> tuple[Load, tuple[str, ...]]:
    """Return the command with the digest and the real path that the workers found, and warnings.

    Args:
        staged: the acks of the workers that staged the source.
        unable: the result of `without` for `weight_digests`.

    Raises:
        ControlError: `other_content`: workers found different content at one source, or other content than the digest
            of `command`.
    """
    groups: dict[str, list[str]] = {}
    for worker, ack in sorted(staged.items()):
        if ack.digest is not None:
            groups.setdefault(ack.digest, []).append(worker)
    if command.digest is not None:
        groups.setdefault(command.digest, ["the command"])
    if len(groups) > 1:
        shown = "; ".join(f"{digest} on {list_names(workers, limit=MAX_NAMED)}" for digest, workers in groups.items())
        raise ControlError(
            ControlCode.OTHER_CONTENT,
            f"workers found different content at {command.source}: {shown}; allowed: the same tensors on all workers, "
            "in files that no program changes",
        )
    paths = {ack.path for ack in staged.values()}
    if command.source.path is not None and len(paths) == 1 and (path := next(iter(paths))) is not None:
        command = replace(command, source=WeightSource(path=path))
    silent = sorted({*unable, *(worker for worker, ack in staged.items() if ack.digest is None)})
    if silent:
        names = list_names(silent, limit=MAX_NAMED)
        why = f"{names} cannot compare digests (an earlier release, or an engine on several machines)"
    elif not groups:
        why = "no worker has read its source yet"
    else:
        return replace(command, digest=next(iter(groups))), ()
    return replace(command, digest=None), (f"version {command.version} is unpinned: {why}",)


def unpinned(state: DesiredState) -> list[str]:
    """Return a line for each recorded version of weights or of an adapter that has no digest."""
    lines = set()
    for registers in state.everywhere:
        for recorded in registers.values():
            match recorded.command:
                case UpdateWeights(digest=None, version=version):
                    lines.add(f"version {version} of {state.model} is unpinned: no load can prove its content")
                case LoadLora(digest=None, version=version, name=name):
                    lines.add(f"version {version} of adapter {name} is unpinned: no load can prove its content")
    return sorted(lines)
