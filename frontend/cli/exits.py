"""How a command ends: its exit code and the one line on stderr that says why."""

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...schemas.errors import InvalidRequest, NoWorkers, RequestTimeout, RollbusError

if TYPE_CHECKING:
    from ...bus import CommandResult

__all__ = ["INTERRUPTED", "CommandFailed", "ExitCode", "cause_of", "exit_code_of", "exit_code_of_ledger"]

INTERRUPTED = 130
"""Ended by Ctrl-C: 128 + SIGINT, as shells count."""


class ExitCode(enum.IntEnum):
    """Exit codes of every subcommand."""

    OK = 0
    FAILED = 1
    USAGE = 2
    PARTIAL = 3
    """Some workers acknowledged a command and some did not."""
    TIMEOUT = 4
    """No worker said in time that it did, or did not, carry out a command; or something else took too long."""
    NO_WORKERS = 5


class CommandFailed(RollbusError):
    """A command cannot go on; the message is the line that its user reads."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def exit_code_of(error: RollbusError | OSError) -> ExitCode:
    """The exit code that fits an error which ended a command."""
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


def exit_code_of_ledger(ledger: "CommandResult") -> ExitCode:
    """The exit code that fits what the workers answered to a command.

    Some applied it and some did not: partial. None did, and none said why: timeout. Else: failed.
    """
    if ledger.is_complete:
        return ExitCode.OK
    if ledger.applied and not ledger.has_found_nothing:
        return ExitCode.PARTIAL
    refused = ledger.failed or ledger.unsupported or ledger.stale or ledger.applied
    return ExitCode.FAILED if refused else ExitCode.TIMEOUT


def cause_of(group: BaseExceptionGroup[BaseException]) -> RollbusError | OSError | None:
    """The error in `group` to show: a `CommandFailed` before others, as those may be its consequences."""
    leaves = list(_leaves(group))
    shown = [leaf for leaf in leaves if isinstance(leaf, (RollbusError, OSError))]
    if len(shown) < len(leaves):
        return None
    return min(shown, key=lambda leaf: not isinstance(leaf, CommandFailed))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for each in error.exceptions:
        yield from _leaves(each)
