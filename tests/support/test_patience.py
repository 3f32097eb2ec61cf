"""Time limits of tests are long and scalable, and one module defines them."""

import asyncio
import os
import re
import runpy
import tomllib

import pytest

from tests.support import patience
from tests.support.processes import ROOT

LIMIT = re.compile(r"asyncio\.(?:timeout\(|wait_for\(.*, )([0-9.]+)\)")
EXPECTED_TO_RUN_OUT_S = 1.0
"""A test with a shorter limit expects the timeout."""


@pytest.mark.parametrize(("factor", "scale"), [("", 1.0), ("1", 1.0), ("2.5", 2.5)])
def test_limits_scale_with_the_environment(monkeypatch: pytest.MonkeyPatch, factor: str, scale: float) -> None:
    """`$ROLLBUS_TEST_PATIENCE` multiplies each limit."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.delenv("ROLLBUS_TEST_PATIENCE", raising=False)
    plain = runpy.run_path(patience.__file__)
    monkeypatch.setenv("ROLLBUS_TEST_PATIENCE", factor)
    scaled = runpy.run_path(patience.__file__)

    for name in vars(patience):
        if name.endswith("_S") and name != "UNHURRIED_LEASE_S":
            assert scaled[name] == scale * plain[name]
    assert scaled["patient"](4.0) == scale * 4.0


@pytest.mark.parametrize(("processes", "factor"), [(0, 1.0), (1, 1.0), (3, 3.0), (40, patience.MAX_SLOWNESS)])
def test_limits_follow_the_load_of_the_machine(monkeypatch: pytest.MonkeyPatch, processes: int, factor: float) -> None:
    """Limits grow with the processes that want a core, up to a bound."""
    load = float(processes * len(os.sched_getaffinity(0)))
    monkeypatch.setenv("ROLLBUS_TEST_PATIENCE", "")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    assert patience.slowness() == factor
    assert runpy.run_path(patience.__file__)["SOON_S"] == 60.0 * factor


@pytest.mark.parametrize(("slow", "ends"), [(1.0, True), (4.0, False)])
async def test_a_limit_in_progress_grows_while_the_machine_is_busy(
    monkeypatch: pytest.MonkeyPatch, slow: float, ends: bool
) -> None:
    """A timeout that has begun counts only the share of the time in which the test had a core."""
    monkeypatch.setattr(patience, "slowness", lambda: slow)
    monkeypatch.setattr(patience, "LOOK_AGAIN_S", 0.01)
    timed_out, over = False, asyncio.Event()
    asyncio.get_running_loop().call_later(0.4, over.set)
    try:
        async with patience.busy_timeout(0.2):
            await over.wait()
    except TimeoutError:
        timed_out = True

    assert timed_out is ends


def test_the_run_ends_a_hanging_test_after_its_own_limit() -> None:
    """The longest limit of a test is shorter than `faulthandler_timeout`, in pytest's settings and in `.ci/test`."""
    longest_s = patience.ENGINE_HANGS_AFTER_S / patience.FACTOR * patience.MAX_SLOWNESS
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]

    assert longest_s < settings["faulthandler_timeout"]
    assert f"print {settings['faulthandler_timeout']} * factor" in (ROOT / ".ci/test").read_text()


def test_each_limit_comes_from_the_patience_module() -> None:
    """Each limit that a busy machine could exceed comes from `tests/support/patience.py`."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for match in LIMIT.finditer(path.read_text())
        if float(match[1]) >= EXPECTED_TO_RUN_OUT_S
    ]

    assert found == []
