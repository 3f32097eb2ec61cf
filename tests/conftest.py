"""Pytest configuration of all tests: how async tests run and how hypothesis searches."""

import asyncio
import gc
import inspect
import os
import signal
import sys

import hypothesis
import pytest

from tests.support.processes import RUN, OwnCache
from tests.support.waits import ENGINE_HANGS_AFTER_S, HANGS_AFTER_S, busy_timeout

pytest_plugins = ["tests.support.fixtures"]

STARTED_FIRST = ("tests/test_rl_loop.py", "tests/engine/test_families.py", "tests/docs/test_code_blocks.py")
"""Files that take minutes, the longest first. If one of them started last, other processes would wait for it."""

# Each run uses the same examples; `pytest --hypothesis-profile=explore` searches for new ones. No deadline, because the
# speed of machines varies.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)

# A shell starts background programs with SIGINT ignored, and child processes inherit that. Some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

OWN_CACHE = pytest.StashKey[OwnCache]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run its own cache directory, which processes of pytest-xdist inherit."""
    gc.disable()
    if RUN not in os.environ:
        config.stash[OWN_CACHE] = OwnCache()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if it has left files in the user's cache directory."""
    cache = session.config.stash.get(OWN_CACHE, None)
    if cache is not None and (left := cache.left_behind()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        sys.stderr.write(f"\ntests left in the user's cache directory: {', '.join(map(str, left))}\n")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache directory of the run."""
    cache = config.stash.get(OWN_CACHE, None)
    if cache is not None:
        del os.environ[RUN]
        cache.remove()


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of imported modules, which stay: it takes a fifth of the collection."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that need a server or an engine as slow, and move those of the longest files to the front."""
    for item in items:
        if "nats_url" in getattr(item, "fixturenames", ()) or item.get_closest_marker("vllm") is not None:
            item.add_marker("slow")
    items.sort(key=lambda item: [item.nodeid.startswith(f"{file}::") for file in STARTED_FIRST], reverse=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests of routed experts if the installed vLLM returns none."""
    if item.get_closest_marker("routing") is not None:
        # This import loads vLLM, as the marked tests do anyway.
        from tests.support.vllm_engine import no_routing_here

        reason = no_routing_here()
        if reason is not None:
            pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test on a separate event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    limit_s = ENGINE_HANGS_AFTER_S if pyfuncitem.get_closest_marker("vllm") else HANGS_AFTER_S

    async def bounded() -> None:
        # The time limit lies inside the loop, so a traceback shows where a test hangs, and other tests still run.
        async with busy_timeout(limit_s):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(debug=False) as runner:
        runner.run(bounded())
    return True
