"""Polling waits for events without a notification."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import pytest
import uvloop

# Time limits of tests, far longer than the awaited event takes, and longer on a machine that is slow or busy.

FACTOR = float(os.environ.get("ROLLBUS_TEST_PATIENCE") or 1)
"""Factor for machines on which these limits are too short."""
MAX_SLOWNESS = 5.0
"""Bound of `slowness`. A limit then still ends a hanging test, and before `faulthandler_timeout` ends the run."""
LOOK_AGAIN_S = 5.0
"""Seconds between looks at the load. The load average itself follows the load in about a minute."""


def slowness() -> float:
    """Return how many times as long work takes as on an idle machine: processes that want a core, for each core."""
    return min(max(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1.0), MAX_SLOWNESS)


def patient(seconds: float) -> float:
    """Return the limit of a wait, scaled by `$ROLLBUS_TEST_PATIENCE` and by the load when this process started."""
    return seconds * FACTOR * SLOWNESS_AT_START


@contextlib.asynccontextmanager
async def busy_timeout(seconds: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` in the block after this time, of which a busy machine counts only its share."""
    loop = asyncio.get_running_loop()
    counted = loop.time()
    calls: list[asyncio.TimerHandle] = []

    def extend() -> None:
        nonlocal counted
        passed, counted = loop.time() - counted, loop.time()
        end = timeout.when()
        if end is not None and not timeout.expired():
            timeout.reschedule(end + passed * (1 - 1 / slowness()))
            calls[:] = [loop.call_later(LOOK_AGAIN_S, extend)]

    async with asyncio.timeout(seconds) as timeout:
        calls.append(loop.call_later(LOOK_AGAIN_S, extend))
        try:
            yield
        finally:
            calls[0].cancel()


SLOWNESS_AT_START = slowness()
SOON_S = patient(60.0)
"""Limit of operations that take milliseconds or at most a lease, on a machine with enough cores."""
HANGS_AFTER_S = 300.0 * FACTOR
"""Limit of a whole test without an engine, for `busy_timeout`."""
ENGINE_STARTS_S = patient(480.0)
"""Limit of several vLLM engines that start in parallel: minutes on a busy machine that first reads vLLM from disk."""
ENGINE_HANGS_AFTER_S = 540.0 * FACTOR
"""Limit of a whole test that may start engines, for `busy_timeout`. `faulthandler_timeout`, which ends the test run, is
longer than `MAX_SLOWNESS` times this limit."""
UNHURRIED_LEASE_S = 60.0
"""The longest allowed lease, for tests of other topics: a process without a core for seconds keeps its requests."""


POLL_S = 0.01


async def until(read: Callable[[], Awaitable[object]], expected: object, *, again_s: float = POLL_S) -> None:
    """Poll until `read` returns `expected`, for changes in other processes that send no notification."""
    seen: object = None
    with contextlib.suppress(TimeoutError):
        async with busy_timeout(SOON_S):
            while (seen := await read()) != expected:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(again_s)

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


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}

on_both_loops = pytest.mark.parametrize("loop", LOOPS)
"""Runs an `async def` test with the argument `loop` on each of them (tests/conftest.py)."""


in_trainers_run = pytest.mark.skipif(
    "ROLLBUS_TEST_TRAINERS" not in os.environ, reason="takes a minute: `make test-trainers` runs it"
)
"""Leaves a test out of `make test`."""
