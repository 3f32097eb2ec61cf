"""The desired state of a model's workers: one JSON value for each fleet and model in a NATS KV bucket.

The desired state consists of registers: `pause`, `weights`, `flush`, `sleep`, and `lora:<name>` for each adapter. A
register holds the last command that set it, with the epoch that recorded the command. Epochs count the recorded
commands, so commands of concurrent controllers have one order.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name
from .control import AnyCommand

__all__ = ["DesiredState", "Recorded", "SeenCommand"]

Epoch = Annotated[int, Meta(ge=0, le=2**53)]


class Recorded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of one register."""

    epoch: Epoch
    """Epoch that recorded the command."""
    command: AnyCommand
    """Command that set the register."""
    by: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """Who set it, as its controller says: a client, or `http:` and a user of the HTTP service. Empty: not announced."""
    at: Annotated[float, Meta(ge=0)] = 0.0
    """Unix time of the recording, by the clock of the author. 0: not announced."""


class SeenCommand(msgspec.Struct, frozen=True, array_like=True):
    """A recorded command, whether or not a register still holds it."""

    id: str
    """Id of the command."""
    epoch: Epoch
    """Epoch that recorded the command."""


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of the workers of one model."""

    v: Literal[1] = 1
    """Wire version."""
    model: str
    """Name of the model."""
    epoch: Epoch = 0
    """Number of commands recorded so far."""
    registers: dict[str, Recorded] = {}
    """Registers for all workers of the model, by register name."""
    workers: dict[str, dict[str, Recorded]] = {}
    """Registers for single workers, by worker id and register name. Of two commands for one register, the later command
    counts."""
    seen: Annotated[tuple[SeenCommand, ...], Meta(max_length=limits.MAX_SEEN_COMMANDS)] = ()
    """Last recorded commands. A repeated command is not recorded again."""
    bucket: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """Random id that the first state of a bucket gets and all later states keep. A state with this id and an older
    epoch is a stale read. Empty: the program that wrote the state does not know this field."""

    def __post_init__(self) -> None:
        """Check the model's name."""
        check_name("model", self.model)

    @property
    def is_first(self) -> bool:
        """True if no command was ever recorded. Such a state only makes the model known."""
        return not (self.registers or self.workers or self.seen)
