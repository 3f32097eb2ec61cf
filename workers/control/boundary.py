"""The boundary of one command: no error of an engine or a source ends its worker, unless the engine is dead."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.errors import ControlCode, ControlError, EngineDead

__all__ = ["UnknownFailure", "command_boundary"]

logger = logging.getLogger(__name__)


class UnknownFailure(ControlError):
    """An error that no engine and no source documents: what the command has changed is not known."""


@contextmanager
def command_boundary(command: str) -> Iterator[None]:
    """Run the body, which carries out `command`.

    Raises:
        ControlError: the command failed; `UnknownFailure`, with an error that is no ControlError.
        TimeoutError: it took too long.
        EngineDead: the engine is gone.
    """
    try:
        yield
    except (ControlError, TimeoutError, EngineDead):
        raise
    except Exception as exc:
        # Boundary: the worker answers that the command failed, and goes on.
        logger.exception("command.failed command=%s", command)
        raise UnknownFailure(ControlCode.ENGINE_ERROR, f"{type(exc).__name__}: {exc}") from exc
