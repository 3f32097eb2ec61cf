"""Time limits of tests, far longer than the awaited event takes, with a factor for slow machines.

A wait with one of these limits ends as soon as the awaited event occurs. So a limit costs a passing test nothing and
only bounds how long a failing test hangs. A test that expects a timeout, for example of a lease, uses its own time.
"""

import os

__all__ = ["ENGINE_HANGS_AFTER_S", "ENGINE_STARTS_S", "HANGS_AFTER_S", "SOON_S", "UNHURRIED_LEASE_S", "patient"]

FACTOR = float(os.environ.get("ROLLBUS_TEST_PATIENCE") or 1)
"""Factor for machines on which these limits are too short."""


def patient(seconds: float) -> float:
    """Return the limit of a wait, scaled by `$ROLLBUS_TEST_PATIENCE`."""
    return seconds * FACTOR


SOON_S = patient(60.0)
"""Limit of operations that take milliseconds or at most a lease, on a machine with enough cores."""
HANGS_AFTER_S = patient(300.0)
"""Limit of a whole test without an engine."""
ENGINE_STARTS_S = patient(480.0)
"""Limit of several vLLM engines that start in parallel: minutes on a busy machine that first reads vLLM from disk."""
ENGINE_HANGS_AFTER_S = patient(540.0)
"""Limit of a whole test that may start engines. It is shorter than `faulthandler_timeout`, which ends the test run."""
UNHURRIED_LEASE_S = 60.0
"""The longest allowed lease, for tests of other topics: a process without a core for seconds keeps its requests."""
