"""Checks if the author of a signed command or desired state may change it, by the author's certificate. No I/O.

An admin and a frontend may change everything. A publisher may send some commands for some models. Every author writes
the whole desired state. So a publisher also sends its base: the last state by an author that may write all of it. The
publisher's state may differ from the base only in the publisher's own registers.
"""

from typing import Final, get_args

from ....schemas.certificate import Certificate
from ....schemas.control import AnyCommand, Command
from ....schemas.desired import DesiredState, Recorded
from ....schemas.errors import ControlCode, ControlError, RemoteProtocolError

__all__ = ["MAX_AGE_S", "check_age", "check_authority", "check_limited_state", "check_unlimited"]

MAX_AGE_S: Final = 60.0
"""The maximum age of a command's signature in seconds, by the worker's clock. For this time, a copied command can be
published again. A controller signs a command again at each repeat, so the limit only needs room for clock differences.
"""

_REGISTERS: Final = {
    str(kind.__struct_config__.tag): kind.sets for kind in get_args(AnyCommand) if kind.sets is not None
}


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
    if _without(state, own) != _without(base, own):
        raise RemoteProtocolError(f"{who} has changed more than {', '.join(sorted(own))}")
    for registers in (state.registers, *state.workers.values()):
        for name in own & registers.keys():
            if not _may_record(by, state, name, registers[name]):
                raise RemoteProtocolError(f"{who} may not record {registers[name].command.command} in {name}")


def _without(state: DesiredState, own: frozenset[str]) -> tuple[dict[str, Recorded], dict[str, dict[str, Recorded]]]:
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
