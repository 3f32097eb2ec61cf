"""Calls on a thread that a cancelled caller does not leave behind."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor


async def call_to_end(function: Callable[..., None], *arguments: str, executor: Executor | None = None) -> None:
    """Call a function on a thread. Raise a cancellation of the caller after the function has ended.

    Args:
        executor: the threads; None: those of the event loop.
    """
    call = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
    try:
        await asyncio.shield(call)
    finally:
        await asyncio.wait((call,))
