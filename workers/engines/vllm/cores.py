"""Where a model computes on a CPU: in the engine core's own process, and on which cores.

Left to itself, vLLM gives it a process of its own (platforms/cpu.py: check_and_update_config), so that its threads can
be bound to cores by the environment. That process imports vLLM and torch once more, which is a third of the time in
which a small model starts; both sides wait for each other by polling, which doubles what a token costs; and of several
engines on one machine each is bound to the same cores, the first ones.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

__all__ = ["Cores", "compute_in_core"]

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
"""Which cores an engine computes on, as users say it: a list, `nobind`, or `auto`."""
NUM_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Cores:
    """What an engine core's process computes on.

    Args:
        num_threads: that compute at a time; None: as OpenMP has it.
        bound: numbers of the cores that the process stays on; empty: wherever there is room.
    """

    num_threads: int | None
    bound: tuple[int, ...]

    def apply(self) -> None:
        """Use these cores in this process; called in the engine core before it loads the model."""
        import torch

        # The configuration is completed again in this process, and would ask for another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.bound:
            os.sched_setaffinity(0, self.bound)
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)


def compute_in_core(args: "AsyncEngineArgs", config: "VllmConfig") -> Cores | None:
    """Change `config` so that the model computes in the engine core's process, and say on which cores.

    Returns:
        None where that is not for us to choose: not on a CPU, in several processes, or as the arguments say.
    """
    from vllm.platforms import current_platform

    parallel = config.parallel_config
    is_one_process = parallel.world_size == parallel.data_parallel_size == 1
    if not current_platform.is_cpu() or not is_one_process or args.distributed_executor_backend is not None:
        return None
    try:
        from vllm.utils.ompmultiprocessing import OMPProcessManager
    except ImportError:
        # Another release, which may have other reasons too.
        return None
    chosen = OMPProcessManager(config).cpu_lists
    parallel.distributed_executor_backend = "uni"
    if not chosen:
        return Cores(None, ())
    is_auto = os.environ.get(BINDING, "auto") == "auto"
    num_threads = None if is_auto and NUM_THREADS in os.environ else len(chosen[0])
    return Cores(num_threads, () if is_auto else tuple(chosen[0]))
