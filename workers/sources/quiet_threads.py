"""Threads for work beside an engine: they take what time it leaves, on at most two cores."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["NICE", "Job", "Scratch", "run_quietly"]

NUM_THREADS: Final = 2
"""One hashes while the other reads or writes."""
NICE: Final = 15
"""Where another thread keeps a core busy, each of these gets 3 % of it; an idle core they get whole. With 10 it was a
tenth, and two engines on two cores kept 0.75 of their throughput: at each step they wait for their slowest thread."""


class Scratch:
    """Memory that a thread uses for one job after the other: new memory would be zeroed by the system each time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def get(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes of any content."""
        if len(self._memory) < size:
            self._memory = np.empty(0, np.uint8)  # the old memory goes before the new comes
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


Job = Callable[[Scratch], None]


async def run_quietly(jobs: Iterable[Job]) -> None:
    """Run all jobs, in order, some at a time; ends at the first that fails, with its error.

    Args:
        jobs: iterated on a thread, to the end, before the first one runs.

    Cancellation: waits for the jobs that run, so that none runs afterwards; `jobs` may be iterated to its end.
    """
    # Made on a thread: there may be a job for each of thousands of tensors.
    waiting, is_stopped = await asyncio.to_thread(deque, jobs), threading.Event()

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        scratch = Scratch()
        while not is_stopped.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job(scratch)

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="staging") as pool:
        futures = [asyncio.wrap_future(pool.submit(work)) for _ in range(min(NUM_THREADS, len(waiting)))]
        is_cancelled = False
        while running := [future for future in futures if not future.done()]:
            try:
                # A failure of one ends the others at their next job.
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                is_cancelled = True
            if is_cancelled or any(future.done() and future.exception() for future in futures):
                is_stopped.set()
    if is_cancelled:
        raise asyncio.CancelledError
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
