"""How long tests wait for what must happen: far longer than it takes, and longer still on a slow machine.

A wait with one of these limits ends as soon as what it waits for is there. So the limits cost a passing test nothing;
they bound how long a failing one hangs. A wait that a test expects to run out, such as a lease, has a time of its own.
"""

import os

__all__ = ["ENGINE_HANGS_AFTER_S", "ENGINE_STARTS_S", "HANGS_AFTER_S", "SOON_S", "UNHURRIED_LEASE_S", "patient"]

FACTOR = float(os.environ.get("ROLLBUS_TEST_PATIENCE") or 1)
"""For machines on which even these limits are too short."""


def patient(seconds: float) -> float:
    """Return the limit of a wait, scaled by `$ROLLBUS_TEST_PATIENCE`."""
    return seconds * FACTOR


SOON_S = patient(60.0)
"""For what takes milliseconds, or a lease at most, where each process gets a core when it needs one."""
HANGS_AFTER_S = patient(300.0)
"""For a whole test without an engine."""
ENGINE_STARTS_S = patient(480.0)
"""For several vLLM engines that start side by side: minutes on a busy machine that reads vLLM from its disk first."""
ENGINE_HANGS_AFTER_S = patient(540.0)
"""For a whole test of engines, some of which it may start. Below `faulthandler_timeout`, which ends the run."""
UNHURRIED_LEASE_S = 60.0
"""Lease for tests of other things, the longest allowed: a process without a core for seconds keeps its work."""
