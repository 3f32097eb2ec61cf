"""Selects the process and the cores that compute a model on a CPU: the engine core's process.

By default, vLLM starts a separate process for the model (platforms/cpu.py: check_and_update_config), so that the
environment can bind its threads to cores. This has three disadvantages:

- The process imports vLLM and torch again, which is a third of the start time of a small model.
- Both processes wait for each other by polling, which doubles the time per token.
- With several engines on one machine, vLLM binds each of them to the same first cores.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

__all__ = ["Cores", "compute_in_core"]

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Environment variable with the cores of an engine: a list, `nobind`, or `auto`."""
NUM_THREADS = "OMP_NUM_THREADS"


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
