"""The boundary of one command. An error of an engine or a source ends the worker only if the engine is dead."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.errors import ControlCode, ControlError, EngineDead

__all__ = ["UnknownFailure", "command_boundary"]

logger = logging.getLogger(__name__)


class UnknownFailure(ControlError):
    """An undocumented error of an engine or a source: the effect of the command is unknown."""


@contextmanager
def command_boundary(command: str) -> Iterator[None]:
    """Run the block, which executes `command`.

    Raises:
        ControlError: the command failed. The class is `UnknownFailure` if the error was not a ControlError.
        TimeoutError: the command exceeded its time limit.
        EngineDead: the engine is dead.
    """
    try:
        yield
    except (ControlError, TimeoutError, EngineDead):
        raise
    except Exception as exc:
        # Boundary: the worker publishes a failed ack and continues.
        logger.exception("command.failed command=%s", command)
        raise UnknownFailure(ControlCode.ENGINE_ERROR, f"{type(exc).__name__}: {exc}") from exc
