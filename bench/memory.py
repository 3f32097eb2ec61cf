"""Reads the memory of a process from Linux: its present size, and its peak size since a chosen moment."""

import ctypes
import gc
from pathlib import Path


def reset_peak(process: int | str = "self") -> None:
    """Set the peak size to the present size."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def resident_bytes(process: int | str = "self") -> int:
    """Return the present size of the process."""
    return _status_bytes(process, "VmRSS")


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak size of the process since its start or the last `reset_peak`."""
    return _status_bytes(process, "VmHWM")


def give_back() -> None:
    """Return the freed memory of this process to the system. A later allocation would otherwise not show as growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(process: int | str, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{process}/status has no {field}")
