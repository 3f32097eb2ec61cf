"""What a signed command or desired state may change, by the certificate of its author. Pure.

An admin and a frontend may change everything. A publisher may give some commands for some models. It writes the whole
desired state, as all authors do. So it sends its base along: the last state by an author that may write all of it. Its
own state may differ from the base in its own registers alone.
"""

from typing import Final, get_args

from ....schemas.certificate import Certificate
from ....schemas.control import AnyCommand, Command
from ....schemas.desired import DesiredState, Recorded
from ....schemas.errors import ControlCode, ControlError, RemoteProtocolError

__all__ = ["MAX_AGE_S", "check_age", "check_authority", "check_limited_state", "check_unlimited"]

MAX_AGE_S: Final = 60.0
"""Of a command's signature, by the worker's clock: what was heard before may be sent again for as long at most. It is
signed anew at each repeat, so that this is room for clocks that differ."""

_REGISTERS: Final = {
    str(kind.__struct_config__.tag): kind.sets for kind in get_args(AnyCommand) if kind.sets is not None
}


def check_authority(by: Certificate, command: Command, model: str) -> None:
    """Refuse what the author may not command to workers of `model`.

    Raises:
        ControlError: `not_allowed`.
    """
    if not by.covers_command(command.command):
        allowed = ", ".join(by.commands or ())
        raise ControlError(
            ControlCode.NOT_ALLOWED, f"{by.role} {by.name} may not give {command.command}; allowed: {allowed}"
        )
    if not by.covers_model(model):
        allowed = ", ".join(by.models or ())
        raise ControlError(
            ControlCode.NOT_ALLOWED, f"{by.role} {by.name} may not command workers of {model!r}; allowed: {allowed}"
        )


def check_unlimited(own: Certificate | None) -> None:
    """Raise if this user may not sign states that others wrote.

    Raises:
        ControlError: `not_allowed`.
    """
    if own is None or own.is_limited:
        raise ControlError(
            ControlCode.NOT_ALLOWED,
            "to sign what others wrote takes the credentials of an admin, with a certificate by the root key",
        )


def check_age(age_s: float) -> None:
    """Refuse a command that was signed too long ago: it may be a copy that is published once more.

    Raises:
        ControlError: `not_allowed`.
    """
    if abs(age_s) > MAX_AGE_S:
        ago = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s ahead"
        raise ControlError(
            ControlCode.NOT_ALLOWED,
            f"it was signed {ago} by this worker's clock; allowed: {MAX_AGE_S:g} s. Clocks of controllers and workers "
            "must agree",
        )


def check_limited_state(by: Certificate, state: DesiredState, base: DesiredState | None) -> None:
    """Refuse a state whose author may not write it whole, unless it is `base` but for what the author may change.

    Raises:
        RemoteProtocolError: it differs in something else.
    """
    who = f"{by.role} {by.name}"
    base = base or DesiredState(model=state.model)
    if not by.covers_model(state.model):
        raise RemoteProtocolError(f"{who} may not write what is desired of {state.model!r}")
    if state.epoch < base.epoch:
        raise RemoteProtocolError(f"{who} has written epoch {state.epoch} over epoch {base.epoch}")
    if base.bucket not in {"", state.bucket}:
        raise RemoteProtocolError(f"{who} has written another bucket's id")
    own = frozenset(register for command, register in _REGISTERS.items() if by.covers_command(command))
    if _without(state, own) != _without(base, own):
        raise RemoteProtocolError(f"{who} has changed more than {', '.join(sorted(own))}")
    for registers in (state.registers, *state.workers.values()):
        for name in own & registers.keys():
            if not _may_record(by, state, name, registers[name]):
                raise RemoteProtocolError(f"{who} may not record {registers[name].command.command} in {name}")


def _without(state: DesiredState, own: frozenset[str]) -> tuple[dict[str, Recorded], dict[str, dict[str, Recorded]]]:
    """All that stands in other registers."""
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
