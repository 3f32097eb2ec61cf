"""Reads the CPU time of processes at the resolution of the kernel. `psutil` has only hundredths of a second."""

import ctypes
import os
import time

_libc = ctypes.CDLL(None)


def cpu_s(pid: int) -> float:
    """Return the seconds, user and system, that all threads of a process have used so far.

    Raises:
        OSError: there is no such process.
    """
    clock = ctypes.c_int()
    error = _libc.clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"{os.strerror(error)}: process {pid}")
    return time.clock_gettime(clock.value)
