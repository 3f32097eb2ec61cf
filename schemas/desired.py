"""What a model's workers should be doing: kept in a NATS KV bucket, one JSON value for each fleet and model.

It is made of registers: `pause`, `weights`, `flush`, `sleep`, and `lora:<name>` for each adapter. A register holds the
last command that set it, with the epoch in which it was recorded. Epochs count the recorded commands, so that what
concurrent controllers want has one order.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from . import limits
from .checks import check_name
from .control import AnyCommand

__all__ = ["DesiredState", "Recorded", "SeenCommand"]

Epoch = Annotated[int, Meta(ge=0, le=2**53)]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One register."""

    epoch: Epoch
    """In which the command was recorded."""
    command: AnyCommand
    """What set the register."""


class SeenCommand(msgspec.Struct, frozen=True, array_like=True):
    """A command that was recorded, whether or not it still stands in a register."""

    id: str
    """Of the command."""
    epoch: Epoch
    """In which it was recorded."""


class DesiredState(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one model should be doing."""

    v: Literal[1] = 1
    """Wire version."""
    model: str
    """Whose workers."""
    epoch: Epoch = 0
    """Commands recorded so far."""
    registers: dict[str, Recorded] = {}
    """For all workers of the model."""
    workers: dict[str, dict[str, Recorded]] = {}
    """For single workers, by id: of two commands on one register the later counts."""
    seen: Annotated[tuple[SeenCommand, ...], Meta(max_length=limits.MAX_SEEN_COMMANDS)] = ()
    """The last commands, so that one that comes again is not recorded again."""
    bucket: Annotated[str, Meta(max_length=limits.MAX_NAME_CHARS)] = ""
    """A random id that the first state of a bucket gets and later ones keep: an older epoch under it is a stale read.
    Empty: written by a program that knows of none."""

    def __post_init__(self) -> None:
        """Check the name."""
        check_name("model", self.model)
