"""Pytest configuration of all tests: how async tests run and how hypothesis searches."""

import asyncio
import gc
import importlib.util
import inspect
import os
import re
import signal
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.processes import RUN, OwnCache
from tests.support.waits import ENGINE_HANGS_AFTER_S, HANGS_AFTER_S, LOOPS, busy_timeout

pytest_plugins = ["tests.support.fixtures"]

CLIENTS = ("anthropic", "openai", "renderers")
"""Packages that take two seconds to import. Each of nine processes collects the files that import them, and few of them
run such a file: a module is loaded when a test of a file that imports it begins."""


class Unloaded(types.ModuleType):
    """Stands for a client until a public name is read. `import` and pytest read others, such as `__test__`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__path__":
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


for name in CLIENTS:
    if name not in sys.modules and (found := importlib.util.find_spec(name)) is not None:
        sys.modules[name] = Unloaded(name)
        sys.modules[name].__spec__ = found

STARTED_FIRST = (
    "tests/engine/test_launch.py",
    "tests/engine/test_families.py",
    "tests/docs/test_code_blocks.py",
)
"""Files that take minutes, the longest first, with all that share its engines. If one of them started last, other
processes would wait for it."""
ALL_NEED_AN_ENGINE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.vllm\b", re.MULTILINE)
"""Files without a test for the part of `.ci/test` without engines."""
LOADS_TORCH = re.compile(
    r"(?m)^(from|import) (torch|transformers|bench\.(routing_ways|scale|trainer)|rollbus\.trainer|"
    r"rollbus\.integrations\.(sessions|verl)|tests\.(sessions\.(families|support)|http\.test_tools))\b|importorskip\(.vllm",
)
"""Files that import torch, directly, by one of these modules, by matplotlib or with vLLM's parsers. Their tests have
the marker `torch`, and run in the part with engines: its processes import torch anyway, and there are half as many."""
PARTS = {"not vllm and not torch": False, "vllm or torch": True}
"""The expressions of the two parts of `.ci/test`. True: the part with engines."""
USES_ENGINES = re.compile(r"def test_\w+\([^)]*\b(moe|dense|reloaded): RunningEngine\b")

# Each run uses the same examples: 50, which catch all faults of tests/mutants that 100 catch, in half of the time.
# `pytest --hypothesis-profile=explore` searches for new ones. No deadline, because the speed of machines varies.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)

# A shell starts background programs with SIGINT ignored, and child processes inherit that. Some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

OWN_CACHE = pytest.StashKey[OwnCache]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the run its own cache directory, which processes of pytest-xdist inherit."""
    config.addinivalue_line("markers", "torch: its file imports torch (tests/conftest.py)")
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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with selected tests in the two parts of `.ci/test`: each of nine processes collects them."""
    has_engines = PARTS.get(config.option.markexpr)
    if collection_path.suffix != ".py" or has_engines is None:
        return None
    if loads_torch(collection_path):
        return not has_engines or None
    text = collection_path.read_text()
    return ("mark.vllm" not in text if has_engines else bool(ALL_NEED_AN_ENGINE.search(text))) or None


@cache
def loads_torch(file: Path) -> bool:
    """Return True if a file of tests imports torch."""
    return file.name.startswith("test_") and bool(LOADS_TORCH.search(file.read_text()))


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
        if loads_torch(item.path):
            item.add_marker("torch")
    items.sort(key=lambda item: [item.nodeid.startswith(f"{file}::") for file in STARTED_FIRST], reverse=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all files that share a browser or engines: each other process would start them too."""
    from xdist.scheduler import LoadFileScheduling

    if config.option.dist != "loadfile":
        return None
    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda node: shared_by(config.rootpath / file_of(node)) or file_of(node)
    return scheduling


@cache
def shared_by(file: Path) -> str | None:
    """Return the directory with the fixtures of whole processes that tests of the file share, or None."""
    shares_engines = file.parent.name == "engine" and USES_ENGINES.search(file.read_text())
    return file.parent.name if shares_engines or file.parent.name == "browser" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Load clients here, because two threads may not do it. Skip tests of routed experts if vLLM returns none."""
    for name in CLIENTS:
        if isinstance(item, pytest.Function) and name in vars(item.module):
            hasattr(sys.modules[name], "__path__")
    if item.get_closest_marker("routing") is not None:
        # This import loads vLLM, as the marked tests do anyway.
        from tests.support.vllm_engine import no_routing_here

        reason = no_routing_here()
        if reason is not None:
            pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test on a separate event loop, of the kind that its argument `loop` names."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    limit_s = ENGINE_HANGS_AFTER_S if pyfuncitem.get_closest_marker("vllm") else HANGS_AFTER_S

    async def bounded() -> None:
        # The time limit lies inside the loop, so a traceback shows where a test hangs, and other tests still run.
        async with busy_timeout(limit_s):
            await pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    names = inspect.signature(pyfuncitem.obj).parameters
    with asyncio.Runner(debug=False, loop_factory=LOOPS[str(pyfuncitem.funcargs.get("loop", "asyncio"))]) as runner:
        runner.run(bounded())
    return True
