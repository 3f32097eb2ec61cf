"""The load of the experts on the synthetic engine: exact cells, and a router that collapses after an update."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from selenium.webdriver import Chrome

from rollbus.frontend.http.live import experts
from rollbus.schemas.rows import Rows
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.model import SyntheticModel, SyntheticWeights, checksum_of
from tests.browser.expert_view import counts_of, until_counts
from tests.browser.page import opened
from tests.browser.small_fleet import under_load
from tests.control.support import folders
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.requests import sized

CONFIG = SyntheticConfig(num_layers=3, num_experts=8, top_k=2)


async def test_each_cell_equals_the_count_of_the_rows(browser: Chrome, nats_url: str, fleet: str) -> None:
    """Each cell equals the count of the rows: apart for prompts and generated tokens, and for two workers or one."""
    async with (
        synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="w0"),
        synthetic_worker(nats_url, fleet, config=CONFIG, worker_id="w1"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/#/experts") as page,
    ):
        await http.rb.fleet.wait_for_workers(2)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(http.rb.complete(sized(20 + i, 8))) for i in range(16)]
        done = [task.result() for task in running]
        expected = counts_of(done, CONFIG.num_experts)
        await until_counts(page, "generated", expected["generated"])
        await until_counts(page, "prompt", expected["prompt"])
        await page.click("[data-testid=experts-worker]")
        await page.press("w0")
        await page.run("document.activeElement.blur()")
        alone = counts_of([each for each in done if each.worker_ids[-1] == "w0"], CONFIG.num_experts)
        await until_counts(page, "prompt", alone["prompt"])


async def test_the_page_shows_a_collapsed_router(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map of the last seconds shows that new weights send every token to the same experts."""
    one, two = folders(tmp_path)
    collapsed = SyntheticWeights.of(checksum_of(two)).experts
    chosen = SyntheticModel.rows

    def rows(model: SyntheticModel, contexts: npt.NDArray[np.uint64], weights: npt.NDArray[np.uint64]) -> Rows:
        found = chosen(model, contexts, weights)
        found[weights == collapsed] = np.arange(model.config.top_k)
        return found

    monkeypatch.setattr(SyntheticModel, "rows", rows)
    monkeypatch.setattr(experts, "WINDOW_S", 5.0)
    config = SyntheticConfig(num_layers=3, num_experts=8, top_k=2, step_s=0.02, max_model_len=10_000_000)
    fields: dict[str, Any] = {"model_path": str(one), "weight_roots": (str(tmp_path),), "weight_version": 1}
    fields["cache_dir"] = str(tmp_path / "cache")
    async with (
        synthetic_worker(nats_url, fleet, config=config, worker_id="w0", **fields),
        http_before(nats_url, fleet) as http,
    ):
        await http.rb.fleet.wait_for_workers()
        async with under_load(http.rb, 8), opened(browser, f"{http.url}/#/experts") as page:
            await page.until_text("[data-testid=imbalance]", lambda text: bool(text) and "0 of 24 experts" in text)
            await http.rb.fleet.update_weights(path=str(two), version=2, mode="keep")
            said = await page.until_text("[data-testid=imbalance]", lambda text: bool(text) and "18 of 24" in text)
            assert "its busiest expert has 4.00×" in said
