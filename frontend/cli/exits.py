"""The exit code of a command and its error line on stderr."""

import enum
from typing import TYPE_CHECKING

from ...schemas.errors import InvalidRequest, NoWorkers, RequestTimeout, RollbusError

if TYPE_CHECKING:
    from ...bus import CommandResult


INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, the convention of shells."""


class ExitCode(enum.IntEnum):
    """Exit codes of every subcommand."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    """Some workers applied a command and some did not."""
    TIMEOUT = 4
    """No worker answered a command in time, or another operation timed out."""
    NO_WORKERS = 5


class CommandFailed(RollbusError):
    """A command cannot continue. The user reads the message as one line."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)


class WrongUsage(CommandFailed):
    """The arguments or the files that they name are wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


def exit_code_of(error: RollbusError | OSError) -> ExitCode:
    """Return the exit code for an error that ended a command."""
    match error:
        case CommandFailed():
            return error.exit_code
        case InvalidRequest():
            return ExitCode.USAGE
        case NoWorkers():
            return ExitCode.NO_WORKERS
        case RequestTimeout() | TimeoutError():
            return ExitCode.TIMEOUT
        case _:
            return ExitCode.FAILED


def exit_code_of_result(result: "CommandResult") -> ExitCode:
    """Return the exit code for the result of a command.

    If some workers applied the command and some did not, it is `PARTIAL`. If no worker applied it and none gave a
    reason, it is `TIMEOUT`. Otherwise it is `FAILED`.
    """
    if result.is_complete:
        return ExitCode.OK
    if result.applied and not result.has_found_nothing:
        return ExitCode.PARTIAL
    refused = result.failed or result.unsupported or result.stale or result.applied
    return ExitCode.FAILED if refused else ExitCode.TIMEOUT


def cause_of(group: BaseExceptionGroup[BaseException]) -> RollbusError | OSError | None:
    """Return the error of `group` to report, or None if the group has an error that is neither ours nor an `OSError`.

    A `CommandFailed` has precedence, because it may have caused the other errors.
    """
    shown, others = group.split((RollbusError, OSError))
    if shown is None or others is not None:
        return None
    first: BaseException = shown.subgroup(CommandFailed) or shown
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, RollbusError | OSError) else None
