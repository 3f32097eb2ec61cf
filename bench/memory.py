"""What Linux says of a process's memory: how large it is, and how large it was at most since a moment of choice."""

import ctypes
import gc
from pathlib import Path

__all__ = ["give_back", "peak_bytes", "reset_peak", "resident_bytes"]


def reset_peak(process: int | str = "self") -> None:
    """From here on, the high-water mark is that of now."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def resident_bytes(process: int | str = "self") -> int:
    """What the process takes now."""
    return _status_bytes(process, "VmRSS")


def peak_bytes(process: int | str = "self") -> int:
    """What the process took at most since its start or the last `reset_peak`."""
    return _status_bytes(process, "VmHWM")


def give_back() -> None:
    """Return what this process has freed to the system: it would hide that as much is taken again."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(process: int | str, field: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{process}/status has no {field}")
