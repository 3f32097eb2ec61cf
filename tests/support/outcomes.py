"""Outcomes of requests and commands: results or errors."""

from collections.abc import Awaitable
from typing import TypeVar

import pytest

from rollbus import CommandIncomplete, CommandResult, Generation, RequestError

E = TypeVar("E", bound=Exception)


async def outcome(completing: Awaitable[Generation]) -> Generation | RequestError:
    """Return the result of a request, or its error."""
    try:
        return await completing
    except RequestError as exc:
        return exc


async def error_of(failing: Awaitable[object], kind: type[E]) -> E:
    """Assert that the awaitable raises an error of this class; return the error."""
    with pytest.raises(kind) as caught:
        await failing
    return caught.value


async def incomplete(command: Awaitable[CommandResult]) -> CommandIncomplete:
    """Return the error of an incomplete command."""
    return await error_of(command, CommandIncomplete)
