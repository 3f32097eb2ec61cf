"""A short chaos run. `python -m tests.chaos` runs longer, and `tests.soak` has workers of only one role."""

from pathlib import Path

import pytest

from tests.chaos.run import Settings, run
from tests.support.nats_server import require_binary

pytestmark = pytest.mark.slow

SETTINGS = Settings(
    num_requests=150,
    seed=7,
    seconds_between_faults=0.8,
    num_workers=4,
    max_in_flight=64,
    step_s=0.008,
    max_num_seqs=8,
    lease_s=2.0,
    num_prefill=2,
)


@pytest.mark.proves("P1", "P8")
async def test_every_result_is_right_during_kills_stops_and_restarts(tmp_path: Path) -> None:
    """During kills, stops and restarts of workers and server, each result arrives once and as if undisturbed.

    Here a prefill and a decode worker serve each request together.
    """
    require_binary()
    said: list[str] = []
    with (tmp_path / "workers.log").open("wb") as log:
        summary = await run(SETTINGS, stderr=log.fileno(), say=said.append)

    assert summary.num_results == SETTINGS.num_requests
    assert summary.faults.total() == len(said) >= 5
    assert max(summary.attempts) > 1
    assert summary.counters["prefill_legs"] > 0
