"""The page with a vLLM engine: its worker beside synthetic workers, and the load of its experts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from selenium.webdriver import Chrome

from tests.browser.expert_view import counts_of, until_counts
from tests.browser.fleet_view import rows
from tests.browser.page import opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import until_state
from tests.support.real_fleet import RealWorkers, greedy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VERSION = 5
REQUESTS = 6


@pytest.fixture(scope="module")
def workers(nats_url: str, tiny_moe_float32: Path) -> Iterator[RealWorkers]:
    """Start workers in a separate fleet, so that the tests of this module own all counts of the worker."""
    workers = RealWorkers(nats_url, tiny_moe_float32, version=VERSION)
    try:
        yield workers
    finally:
        workers.stop()


async def test_the_page_shows_synthetic_workers_and_a_vllm_worker(
    browser: Chrome, nats_url: str, workers: RealWorkers
) -> None:
    """The page shows state, version and slots of each worker as the worker announces them."""
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


@pytest.mark.routing
async def test_the_heat_map_equals_the_counts_of_the_rows(browser: Chrome, nats_url: str, workers: RealWorkers) -> None:
    """Without prefix cache hits, each cell equals the number of choices in the rows from position 0 on."""
    await workers.have(1)
    async with (
        http_before(nats_url, workers.fleet) as http,
        opened(browser, f"{http.url}/#/experts") as page,
    ):
        await http.rb.fleet.wait_for_workers()
        [worker] = http.rb.fleet.workers
        # The test before has left another model, which is still known.
        asked = [replace(greedy(40 + i, 8, seed=i), model=worker.model) for i in range(REQUESTS)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(http.rb.complete(request)) for request in asked]
        done = [task.result() for task in running]
        assert worker.capabilities is not None
        assert worker.capabilities.routed_experts is not None
        assert {generation.cached_tokens for generation in done} == {0}
        expected = counts_of(done, worker.capabilities.routed_experts.num_experts)
        await until_counts(page, "generated", expected["generated"])
        await until_counts(page, "prompt", expected["prompt"])
