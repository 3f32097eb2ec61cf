"""Reads from NVML who uses the memory of this worker's GPUs. It does not use CUDA, which would take memory itself."""

import logging
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from ...schemas.errors import ForeignError, foreign_code

logger = logging.getLogger(__name__)

DEFAULT_SHARE: Final = 0.92
"""vLLM's default of `gpu_memory_utilization`: the share of each GPU that a starting engine takes."""

MAX_PIDS = 4
"""Processes that a message names for each GPU."""


class GpuMemory(NamedTuple):
    """The memory of one GPU in bytes, and the processes that use it."""

    name: str
    free: int
    total: int
    pids: tuple[int, ...]
    """Ids as the driver knows them. In a container they may be those of the host."""


def read_gpus(load: Callable[[], Any]) -> list[GpuMemory]:
    """Return the memory of the GPUs that this process may use; an empty list if NVML does not answer.

    Args:
        load: imports the module `pynvml`.
    """
    try:
        with foreign_code():
            nvml = load()
            nvml.nvmlInit()
            try:
                return _read_visible(nvml)
            finally:
                nvml.nvmlShutdown()
    except ForeignError as exc:
        logger.warning("gpu.memory_read_failed error=%s", exc.cause)
        return []


def _read_visible(nvml: Any) -> list[GpuMemory]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(nvml.nvmlDeviceGetCount()))) if visible is None else visible.split(",")
    return [_read(nvml, name.strip()) for name in names if name.strip() not in {"", "-1"}]


def own_processes() -> frozenset[int]:
    """Return the ids of this process and of all processes below it."""
    import psutil

    process = psutil.Process()
    return frozenset([process.pid, *(child.pid for child in process.children(recursive=True))])


def _read(nvml: Any, name: str) -> GpuMemory:
    is_index = name.isdecimal()
    device = nvml.nvmlDeviceGetHandleByIndex(int(name)) if is_index else nvml.nvmlDeviceGetHandleByUUID(name.encode())
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)]
    return GpuMemory(name, int(memory.free), int(memory.total), tuple(sorted(pids)))


def describe_user(gpus: list[GpuMemory], needed: Callable[[GpuMemory], int], own: frozenset[int]) -> str | None:
    """Return who uses the memory of the first GPU that has too little; None: each has enough.

    Args:
        needed: returns the bytes that this engine needs of a GPU.
        own: process ids of this engine.
    """
    for gpu in gpus:
        if gpu.free >= needed(gpu):
            continue
        others = [pid for pid in gpu.pids if pid not in own]
        pids = ", ".join(map(str, others[:MAX_PIDS])) or "unknown"
        room = f"{gpu.free / 2**30:.1f} GiB are free, {needed(gpu) / 2**30:.1f} GiB are needed"
        return f"GPU in use by pid {pids} (GPU {gpu.name}: {room})"
    return None
