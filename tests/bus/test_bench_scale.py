"""`bench.scale`: its figures match its processes, and docs/scaling.md explains them."""

import json

import pytest

from bench.scale import started_fleet, work
from bench.scale_paper import DOC, RESULTS, with_tables
from rollbus.workers.engines.synthetic.config import SyntheticConfig


def test_the_scaling_page_equals_the_recorded_figures() -> None:
    """The tables of docs/scaling.md equal those that the figures beside it and the wire format give."""
    text = DOC.read_text()

    assert with_tables(text, json.loads(RESULTS.read_text())) == text


@pytest.mark.slow
async def test_cpu_time_and_memory_are_measured_for_each_side() -> None:
    """The benchmark counts the requests of all clients, and measures CPU time and memory of each side separately."""
    async with started_fleet(2, 2, SyntheticConfig()) as fleet:
        done = await work(fleet, 20, 4, 10)

    assert done.num_requests == 40
    assert done.num_frames > 0
    assert done.used.cpu_s.keys() == done.used.rss_bytes.keys() == {"worker", "client", "server"}
    assert all(used > 0 for used in (*done.used.cpu_s.values(), *done.used.rss_bytes.values()))
