"""Runs functions in threads and always waits for their end."""

import asyncio
from collections.abc import Callable

__all__ = ["to_the_end"]

CANCEL_AGAIN_S = 0.5
"""Seconds between two calls of `on_cancel`. A cancelled start kills the new processes of vLLM at each call."""


async def to_the_end(work: Callable[[], None], *, on_cancel: Callable[[], None] | None = None) -> None:
    """Run `work` in a thread and wait until it has ended.

    Cancellation: call `on_cancel` repeatedly until `work` has ended, because a thread cannot be stopped.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            if on_cancel is not None:
                on_cancel()
            try:
                await asyncio.wait({future}, timeout=CANCEL_AGAIN_S)
            except asyncio.CancelledError:
                continue
        # Retrieve the exception, so that asyncio does not log it as never retrieved.
        future.exception()
        raise
