"""Polling waits for events without a notification."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import pytest
import uvloop

from tests.support.patience import HANGS_AFTER_S, SOON_S, busy_timeout

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


# Resources that several tests share because they start slowly. A broken resource is replaced for the next test.


T = TypeVar("T")


class Shared(Generic[T]):
    """Starts a resource when a test first requests it, and replaces it when it is broken.

    Args:
        make: starts the resource; leaving the context ends it.
        is_sound: returns True if the next test can use the resource like a new one.
    """

    def __init__(
        self, make: Callable[[], contextlib.AbstractContextManager[T]], *, is_sound: Callable[[T], bool]
    ) -> None:
        self._make = make
        self._is_sound = is_sound
        self._life = contextlib.ExitStack()
        self._made: list[T] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.close()

    def get(self) -> T:
        """Return the resource; replace it first if it is broken."""
        if self._made and not self._is_sound(self._made[0]):
            self._made.clear()
            # An error at the end of the broken resource must not fail the next test.
            with contextlib.suppress(Exception):
                self._life.close()
        if not self._made:
            self._made.append(self._life.enter_context(self._make()))
        return self._made[0]


# The event loops that connections support.


RUNNERS: dict[str, Callable[[Coroutine[Any, Any, None]], None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}

on_both_loops = pytest.mark.parametrize("loop", RUNNERS)
"""Parametrizes a test with the argument `loop`."""


def run_on(loop: str, scenario: Coroutine[Any, Any, None]) -> None:
    """Run `scenario` on this loop; the time limit lies inside the loop, so a traceback shows where `scenario` hangs."""

    async def bounded() -> None:
        async with asyncio.timeout(HANGS_AFTER_S):
            await scenario

    RUNNERS[loop](bounded())
