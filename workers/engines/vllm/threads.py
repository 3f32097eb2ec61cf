"""Work in threads that is never abandoned."""

import asyncio
from collections.abc import Callable

__all__ = ["to_the_end"]

CANCEL_AGAIN_S = 0.5
"""How often a cancelled start looks for processes that vLLM has started meanwhile."""


async def to_the_end(work: Callable[[], None], *, on_cancel: Callable[[], None] | None = None) -> None:
    """Run `work` in a thread and stay until it has ended, also when cancelled: a thread cannot be abandoned.

    When cancelled, calls `on_cancel` again and again until `work` has ended.
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
        # Asked for, so that asyncio does not report it as forgotten.
        future.exception()
        raise
