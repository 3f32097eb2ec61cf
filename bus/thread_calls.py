"""Calls on a thread, and waits with a limit, that a cancelled caller does not leave behind."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


async def call_to_end(
    function: Callable[[*Args], Result], *arguments: *Args, executor: Executor | None = None
) -> Result:
    """Call a function on a thread and return its result. Raise a cancellation of the caller after it has ended.

    Args:
        executor: the threads; None: those of the event loop.
    """
    call = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        return await asyncio.shield(call)
    finally:
        await asyncio.wait((call,))


async def is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event`, at most for `seconds`. Return True if it is set then."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait until `event` is set, and set it after `seconds`. This costs a tenth of `asyncio.timeout`."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
