"""Time limits of tests are long and scalable, and one module defines them."""

import asyncio
import tomllib

import pytest

from tests.support import patience
from tests.support.processes import ROOT


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
