"""The processes of an engine: where the model is computed, how the processes begin, and how they end with their worker.

By default, vLLM starts a separate process for the model on a CPU (platforms/cpu.py: check_and_update_config), so that
the environment can bind its threads to cores. This has three disadvantages, so the engine core's process computes the
model:

- The process imports vLLM and torch again, which is a third of the start time of a small model.
- Both processes wait for each other by polling, which doubles the time per token.
- With several engines on one machine, vLLM binds each of them to the same first cores.

By default, vLLM spawns an engine core after the worker has imported vLLM. The engine core then imports vLLM again,
which is half of the start time of a small model. So on a CPU the engine core is forked from a process that has imported
vLLM. On GPUs, vLLM itself forks engine cores if it can. The process is the fork server of the standard library
(`multiprocessing.forkserver`). Forking it is safe, because it has one thread and computes nothing. It ends with the
worker's process. A worker's process imports vLLM before it starts threads, and forks the fork server from itself
(`preload`): one import for both, and one copy of its 450 MB. In any other process, the fork server imports vLLM itself,
while that process imports it too (`begin_preload`). The first engine with a class of models also starts a process that
inspects the class, which vLLM then keeps in its cache: it is forked too.
"""

import atexit
import contextlib
import copyreg
import functools
import gc
import itertools
import multiprocessing
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from ....schemas.errors import ForeignError, foreign_code
from . import corrections, plugin

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs


BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable with the cores of an engine: a list, `nobind`, or `auto`."""
NUM_THREADS = "OMP_NUM_THREADS"
GRACE_S = 10.0
"""Seconds in which an orphaned engine core ends its own children, before it is killed."""
TRAVELS = "_rollbus_travels"
"""Attribute of the class with the arguments of `adopt` in the engine core's process."""
PRELOADED = "rollbus.workers.engines.vllm.preloaded"
READ_ON_IMPORT = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
"""Environment variables that vLLM sets for its processes (platforms/cpu.py: check_and_update_config). torch reads them
when it is imported."""
_forks: ContextVar[bool] = ContextVar("_forks", default=False)
"""True if processes that vLLM starts in this context are forked from the fork server."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of an engine core's process.

    Args:
        num_threads: number of threads that compute; None: the default of OpenMP.
        bound: numbers of the cores to which the process is bound; empty: any core.
    """

    num_threads: int | None
    bound: tuple[int, ...]

    def apply(self) -> None:
        """Use these cores in this process. Call this in the engine core before it loads the model."""
        import torch

        # vLLM completes the configuration again in this process. By default it would select a separate process again.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.bound:
            os.sched_setaffinity(0, self.bound)
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)


def compute_in_core(args: "AsyncEngineArgs", config: "VllmConfig") -> Cores | None:
    """Change `config` so that the engine core's process computes the model, and return its cores.

    Returns:
        None, with `config` unchanged: the engine does not run on a CPU, it needs several processes, the arguments
        select an executor, or this release of vLLM is not supported.
    """
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    is_one_process = parallel.world_size == parallel.data_parallel_size == 1
    if not current_platform.is_cpu() or not is_one_process or args.distributed_executor_backend is not None:
        return None
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:
        # Another release of vLLM, which may need the separate process for other reasons too.
        return None
    chosen = OMPProcessManager(config).cpu_lists
    parallel.distributed_executor_backend = "uni"
    if not chosen:
        return Cores(None, ())
    is_auto = os.environ.get(BINDING, "auto") == "auto"
    num_threads = None if is_auto and NUM_THREADS in os.environ else len(chosen[0])
    return Cores(num_threads, () if is_auto else tuple(chosen[0]))


def own_executor(executor_class: type, cores: Cores | None = None) -> type:
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
        corrections.install()
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


def preload() -> None:
    """Import vLLM into this process and fork the fork server from it, unless vLLM runs on GPUs. This takes seconds.

    Call this while the process has one thread. The fork server gets the current environment, and keeps no other open
    file than the standard ones. An error of the import is no error here: the start of the engine reports it.
    """
    if not _is_for_cpus():
        return
    os.environ.update(READ_ON_IMPORT)
    try:
        with foreign_code():
            import_core()
    except ForeignError:
        return
    resource_tracker.ensure_running()
    server: Any = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener.bind(address)
        listener.listen()
        alive, keeps_alive = os.pipe()
        pid = os.fork()
        if pid == 0:
            _serve_forks(listener.fileno(), alive)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keeps_alive, pid


def _serve_forks(listener: int, alive: int) -> NoReturn:
    """Be the fork server until the other end of the pipe `alive` is closed."""
    try:
        for before, after in itertools.pairwise((2, *sorted((listener, alive)), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(before + 1, after)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        isolate()
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import vLLM and torch in this block, and exclude their one million objects from garbage collection.

    Otherwise the collector scans these objects several times during the import, in each later full collection, also of
    a forked process, and at the exit of the process. Each scan blocks the event loop for up to seconds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
        atexit.register(gc.freeze)


def import_core() -> None:
    """Import the modules of an engine core."""
    with without_collection():
        import vllm.v1.engine.core
        import vllm.v1.executor.uniproc_executor
        import vllm.v1.worker.cpu_worker  # noqa: F401


def isolate() -> None:
    """Leave a Ctrl-C and the stdout of the terminal to the worker's process, whose stdout programs read."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The imported modules may print.
    os.dup2(2, 1)


def begin_preload() -> None:
    """Start the fork server, which imports vLLM, unless it runs. Do not wait for the import.

    The fork server gets the current environment of this process.
    """
    if _is_for_cpus():
        os.environ.update(READ_ON_IMPORT)
        multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOADED])
        forkserver.ensure_running()


@contextlib.contextmanager
def fork_from_server() -> Iterator[None]:
    """Fork the engine cores and inspections that vLLM starts in this block and thread from the fork server.

    This has no effect on what this release of vLLM starts in another way.
    """
    if not _is_for_cpus():
        yield
        return
    from vllm.model_executor.models import registry
    from vllm.v1.engine import utils

    for module, name, forking in (
        (utils, "get_mp_context", _fork_server),
        (registry, "_run_in_subprocess", _run_in_fork),
    ):
        own = getattr(module, name, None)
        if own is not None and not isinstance(own, functools.partial):
            setattr(module, name, functools.partial(_run_or_fork, own, forking))
    token = _forks.set(True)
    try:
        yield
    finally:
        _forks.reset(token)


def _run_or_fork(own: Callable[..., Any], forking: Callable[..., Any], *args: Any) -> Any:
    """Run `forking` in the contexts of `fork_from_server`, in place of `own`, by which vLLM starts processes."""
    return (forking if _forks.get() else own)(*args)


def _fork_server() -> BaseContext:
    return multiprocessing.get_context("forkserver")


def _run_in_fork(function: Callable[[], Any]) -> Any:
    """Run what vLLM runs in a new interpreter, so that the worker's process initializes no device."""
    # vLLM's pickler: the function is a lambda.
    import cloudpickle

    with ProcessPoolExecutor(1, _fork_server()) as forks:
        return forks.submit(_run_with_plugins, cloudpickle.dumps(function)).result()


def _run_with_plugins(pickled: bytes) -> Any:
    import cloudpickle
    from vllm.plugins import load_general_plugins

    # They may register models.
    load_general_plugins()
    return cloudpickle.loads(pickled)()


def _is_for_cpus() -> bool:
    """True if the installed vLLM runs on CPUs. Decide this without an import, as vLLM's platforms/__init__.py does."""
    with contextlib.suppress(PackageNotFoundError):
        return "cpu" in version("vllm")
    with contextlib.suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False
