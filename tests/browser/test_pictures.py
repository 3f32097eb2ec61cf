"""Each view with a busy fleet. With `$ROLLBUS_SCREENSHOTS`, the tests save the screenshots of the docs."""

import asyncio
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from selenium.webdriver import Chrome

from rollbus.bus.protocol.telemetry.rates import History, Point
from rollbus.frontend.http.live import experts
from rollbus.frontend.http.live import fleet as live_fleet
from rollbus.schemas.rows import Rows
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.model import SyntheticModel, SyntheticWeights, checksum_of
from tests.browser.announcer import announced
from tests.browser.expert_view import counts_of, until_counts
from tests.browser.page import DESKTOP, PHONE, Page, Size, Theme, faint_texts, nameless, opened, photograph
from tests.browser.small_fleet import MODEL, busy_fleet, in_trouble, under_load
from tests.browser.test_acts import LEDGERS
from tests.control.support import folders
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.requests import sized

WORKERS = 5
REQUESTS = 90
SCREENS: dict[str, tuple[Size, Theme]] = {
    "fleet": (DESKTOP, "light"),
    "fleet-dark": (DESKTOP, "dark"),
    "fleet-phone": (PHONE, "light"),
}


async def test_the_fleet_view_fits_and_has_enough_contrast_and_names(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """In each size and theme, the fleet view needs no horizontal scrolling.

    All text has enough contrast and each element has a name.
    """
    async with (
        busy_fleet(nats_url, fleet, tmp_path, WORKERS) as (_, two),
        http_before(nats_url, fleet) as http,
    ):
        await http.rb.fleet.wait_for_workers(WORKERS)
        async with under_load(http.rb, REQUESTS), opened(browser, f"{http.url}/") as page:
            await page.until_text("[data-testid=tile-workers-value]", "5 of 5")
            await http.rb.fleet.update_weights(path=str(two), version=12, mode="keep")
            # The acks contain the routed experts of a canary, which take tens of kilobytes.
            await page.until(LEDGERS, ["update_weights", "check_weights"])
            async with announced(nats_url, fleet, in_trouble):
                for name, (size, theme) in SCREENS.items():
                    await page.resize(size)
                    await page.like(theme)
                    await page.goto(f"{http.url}/")
                    await check_look(page, name)


async def check_look(page: Page, name: str) -> None:
    """Check width, brightness, contrast and names of a page with all workers."""
    size, theme = SCREENS[name]
    await page.until_text("[data-testid=tile-workers-value]", "6 of 8")
    await page.until_text("[data-testid=tile-tokens-value]", lambda text: text not in (None, "–", "0"))
    await photograph(page, name)
    assert await page.run("return document.documentElement.scrollWidth") <= size.width
    background = await page.run("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.strip("rgba()").split(",")[:3])
    assert (brightness < 3 * 128) == (theme == "dark")
    assert await faint_texts(page) == []
    assert await nameless(page) == []


async def test_the_throughput_view_shows_an_hour_and_the_current_points(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The throughput view shows an hour of history and the current points."""
    remember_an_hour(monkeypatch, MODEL)
    async with (
        busy_fleet(nats_url, fleet, tmp_path, WORKERS),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/#/throughput") as page,
    ):
        await page.until("return document.querySelectorAll('#view-throughput canvas').length > 0")
        await page.until_text(
            "[data-testid=chart-tokens_per_s]", lambda text: bool(text) and "Tokens per second" in text
        )
        await photograph(page, "throughput")
        assert await faint_texts(page) == []
        assert await nameless(page) == []


# A synthetic hour of history, for screenshots of the throughput view.


POINTS = 715
PAUSES = (240, 480)
"""Indexes of the points that follow an update of the weights."""


def _points() -> Iterator[Point]:
    for i in range(POINTS):
        since = min(i - pause for pause in (0, *PAUSES) if i >= pause)
        up = 1 - math.exp(-since / 4)
        wave = 1 + 0.06 * math.sin(i / 23) + 0.03 * math.sin(i / 3.1)
        yield Point(
            tokens_per_s=9400 * wave * up,
            first_token_s=0.21 * wave + 0.9 * (1 - up),
            between_tokens_s=0.031 * wave,
            queue_wait_s=0.12 * wave + 2.5 * (1 - up),
            waiting=round(40 * wave + 300 * (1 - up)),
            in_flight=round(620 * up * wave),
        )


def remember_an_hour(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Give each service that starts from now on an hour of history of one model, followed by its real points."""

    class Past(History):
        def __init__(self) -> None:
            super().__init__()
            for number, point in enumerate(_points(), 1 - POINTS):
                self.add(number, point, {model: point}, {})

        def add(self, number: int, fleet: Point, models: Mapping[str, Point], workers: Mapping[str, Point]) -> None:
            super().add(POINTS + number, fleet, models, workers)

    time_of = live_fleet.LiveFleet.time_of
    monkeypatch.setattr(live_fleet, "History", Past)
    monkeypatch.setattr(live_fleet.LiveFleet, "time_of", lambda live, number: time_of(live, number - POINTS))


# The load of the experts on the synthetic engine: exact cells, and a router that collapses after an update.


CONFIG = SyntheticConfig(num_layers=2, num_experts=5, top_k=2)


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
    config = SyntheticConfig(num_layers=3, num_experts=8, top_k=2, step_s=0.05, max_model_len=10_000_000)
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
