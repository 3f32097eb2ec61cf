"""Time limits of tests, far longer than the awaited event takes, and longer on a machine that is slow or busy.

A wait with one of these limits ends as soon as the awaited event occurs. So a limit costs a passing test nothing and
only bounds how long a failing test hangs. A test that expects a timeout, for example of a lease, uses its own time.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

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
