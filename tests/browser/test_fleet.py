"""The fleet view: two workers on the synthetic engine, and many workers that only publish presence."""

from typing import Any

import pytest
from msgspec.structs import replace
from selenium.webdriver import Chrome

from rollbus.schemas.presence import EngineStats, WorkerPresence, WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.browser.announcer import announced
from tests.browser.fleet_view import ROWS, rows
from tests.browser.page import DESKTOP, PHONE, Page, Size, Theme, opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.presences import capabilities, presence

SLOTS = 4
MANY = 1000
MAX_ROWS = 100
"""Maximum number of table rows that are elements at a time. A screen shows fewer than thirty rows."""


def many_workers(_: int) -> list[WorkerPresence]:
    """Return a thousand workers with different loads. Every tenth worker is paused."""
    small = capabilities(max_num_seqs=MANY)
    return [
        presence(
            worker=f"w{i}",
            state=WorkerState.SERVING if i % 10 else WorkerState.PAUSED,
            weight_version=i % 3,
            in_flight=i,
            capabilities=small,
            lease_s=600.0,
        )
        for i in range(MANY)
    ]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_the_page_fits_on_the_screen(
    browser: Chrome, nats_url: str, fleet: str, size: Size, theme: Theme
) -> None:
    """In light and dark mode, on desktop and phone, the page shows the workers and needs no horizontal scrolling."""
    config = SyntheticConfig(max_num_seqs=SLOTS)
    async with (
        synthetic_worker(nats_url, fleet, config=config, worker_id="w0"),
        synthetic_worker(nats_url, fleet, config=config, worker_id="w1"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/", size=size, theme=theme) as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        assert await page.run("return document.documentElement.scrollWidth") <= size.width
        assert await page.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (theme == "dark")
        background = await page.run("return getComputedStyle(document.body).backgroundColor")
        red, green, blue, *_ = (int(part) for part in background.strip("rgba()").split(",")[:3])
        assert (red + green + blue < 3 * 128) == (theme == "dark")


async def test_rows_show_the_presence_of_the_workers(browser: Chrome, nats_url: str, fleet: str) -> None:
    """A row shows state, version, slots, KV use and error of the worker's presence.

    A missing value is not shown as 0.
    """
    said = presence(
        worker="w0",
        state=WorkerState.OUTDATED,
        weight_version=12,
        in_flight=3,
        capabilities=capabilities(max_num_seqs=8),
        engine_stats=EngineStats(kv_cache_use=0.43, waiting=2),
        last_error="disk is full",
    )
    other = replace(said, worker="w1", state=WorkerState.SERVING, weight_version=13, engine_stats=None, last_error=None)
    async with (
        announced(nats_url, fleet, lambda _: [said, other]),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "1 of 2")
        shown = await rows(page)
    assert shown.keys() == {"w0", "w1"}
    wanted: dict[str, dict[str, Any]] = {
        "w0": {"state": "outdated", "weight_version": "v12", "in_flight": "3 / 8", "waiting": "2", "kv_use": "43 %"},
        "w1": {"state": "serving", "weight_version": "v13", "in_flight": "3 / 8", "kv_use": "–"},
    }
    for worker, cells in wanted.items():
        for column, text in cells.items():
            assert text in shown[worker][column], (worker, column)
    assert shown["w0"]["note"] == "△ disk is full"
    assert shown["w1"]["note"] == ""


async def test_a_thousand_workers_are_scrolled_sorted_and_filtered(browser: Chrome, nats_url: str, fleet: str) -> None:
    """While a user scrolls, sorts and filters, the table has elements only for the visible rows and a few more."""
    async with (
        announced(nats_url, fleet, many_workers, again_s=5.0),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "900 of 1,000")
        seen = {*await _rows_while_scrolling(page)}
        assert seen == {f"w{i}" for i in range(MANY)}

        await page.click("th[data-column=in_flight] button")
        await _scroll(page, 0)
        await page.until(f"{FIRST}", "w999")
        await page.click("th[data-column=in_flight] button")
        await page.until(f"{FIRST}", "w0")

        await page.click("[data-testid=worker-filter]")
        await page.press("w77")
        await page.until_text("[data-testid=worker-count]", "11 of 1,000")
        assert {*await rows(page)} == {"w77", *(f"w77{i}" for i in range(10))}


FIRST = "return document.querySelector('[data-testid=workers] tbody tr[data-key]').dataset.key"


async def _scroll(page: Page, top: int) -> int:
    """Scroll the table towards `top` and return the position that it reached."""
    script = "const all = document.querySelector('.scroller'); all.scrollTop = arguments[0]; return all.scrollTop;"
    at: int = await page.run(script, top)
    return at


async def _rows_while_scrolling(page: Page) -> list[str]:
    """Return the workers of all rows from top to bottom. Check that there are never many elements."""
    seen: list[str] = []
    step = await page.run("return document.querySelector('.scroller').clientHeight")
    top = -1
    while (now := await _scroll(page, top + 1 if top < 0 else top + step)) != top:
        top = now
        # The browser draws the rows with its next frame.
        drawn = await page.until(
            f"const view = document.querySelector('.scroller').getBoundingClientRect();"
            f"const all = [...document.querySelectorAll('[data-testid=workers] tbody tr[data-key]')];"
            f"const last = all.at(-1).getBoundingClientRect();"
            f"return last.bottom >= view.bottom - 1 || all.at(-1).ariaRowIndex == {MANY + 1};"
        )
        assert drawn
        now_shown = [row["worker"] for row in await page.run(ROWS)]
        assert len(now_shown) <= MAX_ROWS
        seen += now_shown
    return seen
