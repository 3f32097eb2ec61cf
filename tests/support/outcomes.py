"""How requests and commands end, well or not."""

from collections.abc import Awaitable
from typing import TypeVar

import pytest

from rollbus import CommandIncomplete, CommandResult, Generation, RequestError

__all__ = ["error_of", "incomplete", "outcome"]

E = TypeVar("E", bound=Exception)


async def outcome(completing: Awaitable[Generation]) -> Generation | RequestError:
    """What comes of a request, well or not."""
    try:
        return await completing
    except RequestError as exc:
        return exc


async def error_of(failing: Awaitable[object], kind: type[E]) -> E:
    """The error of what must fail."""
    with pytest.raises(kind) as caught:
        await failing
    return caught.value


async def incomplete(command: Awaitable[CommandResult]) -> CommandIncomplete:
    """The error that a command ends with."""
    return await error_of(command, CommandIncomplete)
