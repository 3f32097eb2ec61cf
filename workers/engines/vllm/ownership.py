"""Binds the engine's processes to their worker: they end when the worker ends, and do not write to its stdout."""

import atexit
import copyreg
import functools
import gc
import os
import select
import signal
import threading
from multiprocessing.process import BaseProcess
from typing import Any

from . import kv_history, plugin
from .cores import Cores

__all__ = ["kill", "owned_executor"]

GRACE_S = 10.0
"""Seconds in which an orphaned engine core ends its own children, before it is killed."""
TRAVELS = "_rollbus_travels"
"""Attribute of the class with the arguments of `adopt` in the engine core's process."""


def owned_executor(executor_class: type, cores: Cores | None = None) -> type:
    """Create a class that replaces vLLM's executor class and calls `adopt` in the engine core's process.

    vLLM has no hook that runs in the engine core before it loads the model. An engine core also does not notice when
    its parent was killed (v1/engine/core.py: run_busy_loop). But vLLM passes the executor class to the engine core: by
    pickle to a spawned process, by memory to a forked process. In both cases `adopt` runs. The new class is a subclass,
    because vLLM 0.31 and later check the kind of executor in the worker's process.

    Args:
        cores: cores of the engine core's process; None: other processes compute the model.
    """
    kind = _metaclass(type(executor_class))
    owned: type = kind(executor_class.__name__, (executor_class,), {TRAVELS: (executor_class, os.getpid(), cores)})
    return owned


@functools.cache
def _metaclass(base: type) -> type:
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        # Only in a forked process: a spawned process has called `adopt` when it unpickled the class.
        return adopt(*getattr(cls, TRAVELS))(*args, **kwargs)

    kind = type("Owned", (base,), {"__call__": build})
    # Every pickler uses this function before it would pickle the class as a global name.
    copyreg.pickle(kind, lambda cls: (adopt, getattr(cls, TRAVELS)))
    return kind


def adopt(executor_class: type, owner_pid: int, cores: Cores | None) -> type:
    """Prepare the engine core's process and return the executor class. In the owner's process, only return the class.

    The engine core's process then ends with its owner. It does not receive the signals of the owner's terminal, and
    does not write to the owner's stdout.
    """
    if os.getpid() != owner_pid:
        # Install the plugin here, because the engine core checks its configuration before it loads plugins.
        plugin.install()
        plugin.keep_external_hits()
        kv_history.install()
        # A Ctrl-C must reach only the worker, which ends its requests before the engine stops. All processes that the
        # engine core starts join its new group.
        os.setpgrp()
        # Programs read the worker's stdout, and libraries in the engine may print. Send their output to stderr.
        os.dup2(2, 1)
        threading.Thread(target=_end_with, args=(owner_pid,), name="end-with-owner", daemon=True).start()
        # A garbage collection at exit would scan all objects of vLLM and torch for seconds, without a benefit.
        atexit.register(gc.freeze)
        if cores is not None:
            cores.apply()
    return executor_class


def kill(process: BaseProcess) -> None:
    """Kill the engine core's process and all processes that it has started. They have a separate process group."""
    pid = process.pid
    if pid is None:
        return
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            # `adopt` has not run yet: the process is still in the worker's group and has no children.
            process.kill()
    except ProcessLookupError:
        return


def _end_with(owner_pid: int) -> None:
    # `multiprocessing.parent_process()` is not set yet when a spawned process unpickles the class.
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        pass
    else:
        select.select([owner], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
