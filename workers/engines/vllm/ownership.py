"""The engine's processes end with the worker that started them, no sooner and no later, and leave its stdout alone."""

import atexit
import gc
import os
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from workers.engines.vllm.cores import Cores
from workers.engines.vllm.kv import plugin

__all__ = ["OwnedExecutor", "kill"]

GRACE_S = 10.0
"""For an orphaned engine core to take its own children down, before it is killed."""


class OwnedExecutor:
    """Stands for vLLM's executor class on its way into the engine core's process, and makes that process ours.

    vLLM has no hook that runs in the engine core before it loads, and an engine core does not notice that its
    parent was killed (v1/engine/core.py: run_busy_loop). But the executor class travels there: by pickle where
    processes are spawned, by memory where they are forked.

    Args:
        cores: what that process computes on, if it does itself.
    """

    def __init__(self, executor_class: Callable[..., Any], cores: Cores | None = None) -> None:
        self._executor_class = executor_class
        self._owner_pid = os.getpid()
        self._cores = cores

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return adopt, (self._executor_class, self._owner_pid, self._cores)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the executor in a forked process; a spawned one has the executor class itself."""
        return adopt(self._executor_class, self._owner_pid, self._cores)(*args, **kwargs)


def adopt(executor_class: Callable[..., Any], owner_pid: int, cores: Cores | None) -> Callable[..., Any]:
    """Called in the engine core's process: bind its life to the owner's, not to its terminal and its stdout."""
    if os.getpid() != owner_pid:
        # Before the engine core checks its configuration, which it does before it loads plugins by itself.
        plugin.install()
        # A Ctrl-C is for the worker, which ends its requests first; the engine would stop under its hands. And all
        # that the engine core starts is in its group.
        os.setpgrp()
        # The worker's stdout is for machines to read; libraries in the engine print to it as they please.
        os.dup2(2, 1)
        threading.Thread(target=_end_with, args=(owner_pid,), name="end-with-owner", daemon=True).start()
        # What vLLM and torch consist of takes seconds to look through for garbage, and the process ends anyway.
        atexit.register(gc.freeze)
        if cores is not None:
            cores.take()
    return executor_class


def kill(process: BaseProcess) -> None:
    """Kill the engine core's process with all that it has started: they are in a process group of their own."""
    pid = process.pid
    if pid is None:
        return
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            # Not adopted yet: still in the worker's group, and without children.
            process.kill()
    except ProcessLookupError:
        return


def _end_with(owner_pid: int) -> None:
    # Not `multiprocessing.parent_process()`: a spawned process does not know its parent yet when it unpickles this.
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        pass
    else:
        select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
