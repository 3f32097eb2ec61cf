"""The engine's processes end with the worker that started them, and keep their hands off its stdout."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["OwnedExecutor"]

GRACE_S = 10.0
"""For an orphaned engine core to take its own children down, before it is killed."""


class OwnedExecutor:
    """Stands for vLLM's executor class on its way into the engine core's process, and makes that process ours.

    vLLM has no hook that runs in the engine core before it loads, and an engine core does not notice that its
    parent was killed (v1/engine/core.py: run_busy_loop). But the executor class travels there: by pickle where
    processes are spawned, by memory where they are forked.
    """

    def __init__(self, executor_class: Callable[..., Any]) -> None:
        self._executor_class = executor_class

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return adopt, (self._executor_class,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the executor in a forked process; a spawned one has the executor class itself."""
        return adopt(self._executor_class)(*args, **kwargs)


def adopt(executor_class: Callable[..., Any]) -> Callable[..., Any]:
    """Called in the engine core's process: bind its life to the parent's, send what it prints to stderr."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        # The worker's stdout is for machines to read; libraries in the engine print to it as they please.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=_end_with, args=(parent,), name="end-with-parent", daemon=True).start()
    return executor_class


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
