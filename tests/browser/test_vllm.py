"""The page beside a real engine: its worker among synthetic ones."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.browser.fleet_view import rows
from tests.browser.page import opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_state
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSION = 5


@pytest.fixture(scope="module")
def workers(nats_url: str, tiny_moe_float32: Path) -> Iterator[RealWorkers]:
    """Give a fleet of the tests of this file alone: all that its worker counts is theirs."""
    workers = RealWorkers(nats_url, tiny_moe_float32, version=VERSION)
    try:
        yield workers
    finally:
        workers.stop()


async def test_two_synthetic_workers_and_one_on_vllm(browser: Chrome, nats_url: str, workers: RealWorkers) -> None:
    """State, version and slots of each are those that it announces."""
    await workers.have(1)
    async with (
        synthetic_worker(nats_url, workers.fleet, worker_id="s0", weight_version=1),
        synthetic_worker(nats_url, workers.fleet, worker_id="s1", weight_version=2),
        http_before(nats_url, workers.fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        state = await until_state(http.rb, lambda state: len(state.workers) == 3)
        await page.until_text("[data-testid=tile-workers-value]", "3 of 3")
        shown = await rows(page)
        assert len(shown) == 3
        for worker in state.workers:
            cells = shown[worker.worker]
            assert worker.capabilities is not None
            assert cells["state"].endswith(worker.state.value)
            assert cells["model"] == worker.model
            assert cells["weight_version"] == f"v{worker.weight_version}"
            assert cells["in_flight"].endswith(f"0 / {worker.capabilities.max_num_seqs}")
            assert worker.engine_stats is not None
            assert cells["kv_use"].endswith("0 %")
