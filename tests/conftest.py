"""What pytest loads before every test: how async tests run, and how hypothesis searches."""

import asyncio
import inspect
import signal

import hypothesis
import pytest

from tests.support.patience import ENGINE_HANGS_AFTER_S, HANGS_AFTER_S

pytest_plugins = ["tests.support.fixtures"]

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones. No deadline: machines vary.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)

# A shell starts what is to run in the background with Ctrl-C ignored, and programs inherit that: some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of routed experts where the installed vLLM returns none."""
    if item.get_closest_marker("routing") is not None:
        # Imports vLLM, as those tests do.
        from tests.support.routing_here import no_routing_here

        reason = no_routing_here()
        if reason is not None:
            pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests on an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    limit_s = ENGINE_HANGS_AFTER_S if pyfuncitem.get_closest_marker("vllm") else HANGS_AFTER_S

    async def bounded() -> None:
        # A test that hangs fails where it hangs, and leaves time for the others.
        async with asyncio.timeout(limit_s):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(debug=False) as runner:
        runner.run(bounded())
    return True
