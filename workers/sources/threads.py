"""Low-priority threads for work beside an engine, and the progress of that work.

The threads use the time that the engine leaves.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from ...schemas.limits import MAX_ERROR_CHARS
from ...schemas.rows import Uint8s
from ...schemas.weights import Staging, WeightSource

Report = Callable[[str], None]
"""Called with the stage that a command has reached, for display to users."""
NUM_THREADS: Final = 2
"""One thread hashes while the other reads or writes."""
NICE: Final = 15
"""The nice value. If another thread keeps a core busy, each of these threads gets 3 % of the core. An idle core is used
fully. With the value 10 they got 10 %, and two engines on two cores kept only 75 % of their throughput, because each
engine step waits for the slowest thread of the engine."""


class Progress:
    """Counts the bytes of each stage.

    Args:
        source: the source that is staged.
        report: called when a stage begins.
    """

    def __init__(self, source: WeightSource, report: Report) -> None:
        self._source: Final = str(source)[:MAX_ERROR_CHARS]
        self._report = report
        self._stage = ""
        self._done = 0
        self._total = 0
        # Two threads add bytes.
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        """The bytes received over the network, in all stages."""
        self.on_move: Callable[[], None] | None = None
        """Called when a stage begins and when bytes are added, on any thread."""

    @property
    def staging(self) -> Staging:
        """The current stage with its bytes."""
        done = min(self._done, self._total)
        return Staging(source=self._source, stage=self._stage, done_bytes=done, total_bytes=self._total)

    def begin(self, stage: str, total_bytes: int = 0) -> None:
        """Begin a stage of `total_bytes`."""
        with self._lock:
            self._done, self._total = 0, total_bytes
        if stage != self._stage:
            self._stage = stage
            self._report(stage)
        self._move()

    def add(self, num_bytes: int) -> None:
        """Add bytes to the current stage. Any thread may call this."""
        with self._lock:
            self._done += num_bytes
        self._move()

    def add_fetched(self, num_bytes: int) -> None:
        """Add bytes that were received over the network."""
        self.fetched_bytes += num_bytes
        self.add(num_bytes)

    def _move(self) -> None:
        if (on_move := self.on_move) is not None:
            on_move()


class Scratch:
    """Memory that a thread reuses for all its jobs, because the system zeroes newly allocated memory each time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def get(self, size: int) -> Uint8s:
        """Return `size` bytes with arbitrary content."""
        if len(self._memory) < size:
            self._memory = np.empty(0, np.uint8)  # free the old memory before the new allocation
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


Job = Callable[[Scratch], None]


async def run_quietly(jobs: Iterable[Job], *, num_threads: int = NUM_THREADS, is_urgent: bool = False) -> None:
    """Run all jobs in their order, at most `num_threads` at a time. If a job fails, stop and raise its error.

    Args:
        jobs: the jobs. A thread iterates over all of them before the first job runs.
        is_urgent: True for the usual priority, because a worker waits for the jobs before it serves.

    Cancellation: waits for the running jobs, so that no job runs afterwards; `jobs` may be iterated to its end.
    """
    # The jobs are made on a thread, because there may be one for each of thousands of tensors.
    waiting, is_stopped = await asyncio.to_thread(deque, jobs), threading.Event()

    def work() -> None:
        if not is_urgent:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        scratch = Scratch()
        while not is_stopped.is_set():
            try:
                job = waiting.popleft()
            except IndexError:
                return
            job(scratch)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="staging") as pool:
        futures = [asyncio.wrap_future(pool.submit(work)) for _ in range(num_threads)]
        is_cancelled = False
        while running := [future for future in futures if not future.done()]:
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError:
                # Also a second one: leaving the pool with running jobs would block the event loop.
                is_cancelled = True
            # If one thread fails, the other stops before its next job.
            is_stopped.set()
    if is_cancelled:
        raise asyncio.CancelledError
    for error in filter(None, [future.exception() for future in futures]):
        raise error
