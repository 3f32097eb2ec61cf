"""Polling waits for events without a notification."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from tests.support.patience import SOON_S, busy_timeout

LOOK_AGAIN_S = 0.01


async def until(read: Callable[[], Awaitable[object]], expected: object) -> None:
    """Poll until `read` returns `expected`, for changes in other processes that send no notification."""
    seen: object = None
    with contextlib.suppress(TimeoutError):
        async with busy_timeout(SOON_S):
            while (seen := await read()) != expected:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(LOOK_AGAIN_S)

    # Explicit message, because pytest explains only assertions in test files.
    assert seen == expected, f"{read.__qualname__} is {seen} and not {expected}"


async def until_true(is_met: Callable[[], object]) -> None:
    """Poll until `is_met` returns true."""

    async def read() -> bool:
        return bool(is_met())

    read.__qualname__ = is_met.__qualname__
    await until(read, True)
