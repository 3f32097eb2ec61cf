"""What pytest loads before every test: how async tests run, and how hypothesis searches."""

import asyncio
import inspect

import hypothesis
import pytest

pytest_plugins = ["tests.support.fixtures"]

HANGS_AFTER_S = 120.0
"""Far above what any test takes, an engine's start included."""

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones. No deadline: machines vary.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def bounded() -> None:
        # A test that hangs fails where it hangs, and leaves time for the others.
        async with asyncio.timeout(HANGS_AFTER_S):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(debug=False) as runner:
        runner.run(bounded())
    return True
