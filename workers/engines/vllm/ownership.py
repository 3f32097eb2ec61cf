"""The engine's processes end with the worker that started them, no sooner and no later, and leave its stdout alone."""

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
"""For an orphaned engine core to take its own children down, before it is killed."""
TRAVELS = "_rollbus_travels"
"""Attribute of the class: what `adopt` is called with in the engine core's process."""


def owned_executor(executor_class: type, cores: Cores | None = None) -> type:
    """Make the class that stands for vLLM's executor class until it reaches the engine core's process.

    vLLM has no hook that runs in the engine core before it loads, and an engine core does not notice that its
    parent was killed (v1/engine/core.py: run_busy_loop). But the executor class travels there: by pickle where
    processes are spawned, by memory where they are forked. Both ways lead through `adopt`. It is a subclass, because
    vLLM 0.31 and later ask in the worker's process what kind of executor it is.

    Args:
        cores: what that process computes on, if it does itself.
    """
    kind = _metaclass(type(executor_class))
    owned: type = kind(executor_class.__name__, (executor_class,), {TRAVELS: (executor_class, os.getpid(), cores)})
    return owned


@functools.cache
def _metaclass(base: type) -> type:
    def build(cls: type, *args: Any, **kwargs: Any) -> Any:
        # In a forked process; a spawned one has unpickled the executor class itself.
        return adopt(*getattr(cls, TRAVELS))(*args, **kwargs)

    kind = type("Owned", (base,), {"__call__": build})
    # Asked for by every pickler before it takes a class for a global name.
    copyreg.pickle(kind, lambda cls: (adopt, getattr(cls, TRAVELS)))
    return kind


def adopt(executor_class: type, owner_pid: int, cores: Cores | None) -> type:
    """Called in the engine core's process: bind its life to the owner's, not to its terminal and its stdout."""
    if os.getpid() != owner_pid:
        # Before the engine core checks its configuration, which it does before it loads plugins by itself.
        plugin.install()
        plugin.keep_external_hits()
        kv_history.install()
        # A Ctrl-C is for the worker, which ends its requests first; the engine would stop under its hands. And all
        # that the engine core starts is in its group.
        os.setpgrp()
        # The worker's stdout is for machines to read; libraries in the engine print to it as they please.
        os.dup2(2, 1)
        threading.Thread(target=_end_with, args=(owner_pid,), name="end-with-owner", daemon=True).start()
        # What vLLM and torch consist of takes seconds to look through for garbage, and the process ends anyway.
        atexit.register(gc.freeze)
        if cores is not None:
            cores.apply()
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
