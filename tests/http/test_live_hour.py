"""One hour of a large fleet in the live view: its memory does not grow."""

import gc
import json
import math
import tracemalloc

import pytest

from rollbus.bus.client.client import FleetWatch, HeardWorker
from rollbus.bus.protocol.telemetry.rates import SERIES_BYTES, STEP_S, History
from rollbus.frontend.follow import Heard
from rollbus.frontend.http.live.events import encode_event, model_lines, worker_points, worker_row
from rollbus.frontend.http.live.viewers import Viewer
from rollbus.schemas.presence import WorkerCounters
from tests.support.presences import capabilities, presence

HOUR_S = 3600
WARM_UP_S = 60
CAN = capabilities()


class ScriptedWatch(FleetWatch):
    """A watch of simulated workers with one presence per second, at a time that the test sets."""

    def __init__(self, num_workers: int) -> None:
        self.now = 0
        self._num_workers = num_workers

    async def workers(self) -> tuple[HeardWorker, ...]:
        """Return the current presence of all workers. Some workers start, end and restart."""
        return tuple(self._worker(number) for number in range(self._num_workers))

    def _worker(self, number: int) -> HeardWorker:
        life = (self.now + number) // 600
        name = f"w{number:04d}" if number % 10 else f"w{number:04d}-{life}"
        counters = WorkerCounters(requests=self.now, generated_tokens=1000 * self.now, first_tokens=self.now)
        worker = presence(worker=name, incarnation=str(life), capabilities=CAN, counters=counters, in_flight=number % 4)
        return HeardWorker(worker, float(self.now))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [20])
async def test_memory_does_not_grow_in_an_hour(num_workers: int) -> None:
    """Apart from the kept points of known size, memory does not grow in an hour, even if a viewer never reads."""
    watch, heard, history, viewer = ScriptedWatch(num_workers), Heard(), History(), Viewer()
    tracemalloc.start()
    try:
        for second in range(1, HOUR_S + WARM_UP_S + 1):
            watch.now = second
            await heard.update(watch)
            rows = [worker_row(each, heard.rates, float(second)) for each in heard.workers.values()]
            lines = tuple(model_lines([each.presence for each in heard.workers.values()], {}))
            viewer.offer("fleet", encode_event("fleet", {"workers": rows, "models": lines}))
            if second % STEP_S == 0:
                history.add(second // STEP_S, *worker_points(heard, (), (math.nan, {})))
            if second == WARM_UP_S:
                gc.collect()
                before = tracemalloc.get_traced_memory()[0] - history.num_bytes
        gc.collect()
        after = tracemalloc.get_traced_memory()[0] - history.num_bytes
    finally:
        tracemalloc.stop()
    event = viewer.__dict__["_pending"]["fleet"]
    assert len(json.loads(event.partition(b"data: ")[2])["workers"]) == num_workers
    # The history keeps the points of each ended worker for an hour.
    assert history.num_bytes <= (2 + num_workers + num_workers // 10 * 7) * SERIES_BYTES
    assert after < 1.1 * before + 20_000 * num_workers
