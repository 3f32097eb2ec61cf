"""Each view with a busy fleet. With `$ROLLBUS_SCREENSHOTS`, the tests save the screenshots of the docs."""

import asyncio
import re
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.browser.accessibility import faint_texts, nameless
from tests.browser.announcer import announced
from tests.browser.page import DESKTOP, PHONE, Size, Theme, opened
from tests.browser.past_hour import remember_an_hour
from tests.browser.screenshots import photograph
from tests.browser.small_fleet import MODEL, SLOTS, bias_router, busy_fleet, in_trouble, under_load
from tests.browser.test_acts import LEDGERS
from tests.browser.test_request import EVENTS
from tests.http.support import http_before
from tests.support.requests import greedy
from tests.support.streams import start_stream

pytestmark = pytest.mark.slow

WORKERS = 5
REQUESTS = 90
SCREENS: dict[str, tuple[Size, Theme]] = {
    "fleet": (DESKTOP, "light"),
    "fleet-dark": (DESKTOP, "dark"),
    "fleet-phone": (PHONE, "light"),
}


@pytest.mark.parametrize("name", SCREENS)
async def test_the_fleet_view_has_enough_contrast_and_names(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path, name: str
) -> None:
    """In each size and theme, all text of the fleet view has enough contrast and each element has a name."""
    size, theme = SCREENS[name]
    async with (
        busy_fleet(nats_url, fleet, tmp_path, WORKERS) as (_, two),
        http_before(nats_url, fleet) as http,
    ):
        await http.rb.fleet.wait_for_workers(WORKERS)
        async with under_load(http.rb, REQUESTS), opened(browser, f"{http.url}/", size=size, theme=theme) as page:
            await page.until_text("[data-testid=tile-workers-value]", "5 of 5")
            await http.rb.fleet.update_weights(path=str(two), version=12, mode="keep")
            # The acks contain the routed experts of a canary, which take tens of kilobytes.
            await page.until(LEDGERS, ["update_weights", "check_weights"])
            async with announced(nats_url, fleet, in_trouble):
                await page.until_text("[data-testid=tile-workers-value]", "6 of 8")
                await page.until_text("[data-testid=tile-tokens-value]", lambda text: text not in (None, "–", "0"))
                await photograph(page, name)
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


async def test_the_request_view_shows_a_pause_and_other_weights(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """The request view shows a request that a pause held and that continued with other weights."""
    async with (
        busy_fleet(nats_url, fleet, tmp_path, 1) as (_, two),
        http_before(nats_url, fleet) as http,
        asyncio.TaskGroup() as tasks,
    ):
        await http.rb.fleet.wait_for_workers()
        stream = await start_stream(tasks, http.rb, greedy(1, 24, request_id="rollout-7"))
        await http.rb.fleet.update_weights(path=str(two), version=12, mode="keep")
        await stream.reading
        async with opened(browser, f"{http.url}/#/request?id=rollout-7") as page:
            events = await page.until(EVENTS, lambda found: "ended" in found)
            assert {"held", "resumed", "weights"} <= {*events}
            await photograph(page, "request")
            assert await faint_texts(page) == []
            assert await nameless(page) == []


def is_collapsed(summary: str | None) -> bool:
    """Return True if the busiest expert of the worst layer has several times the mean."""
    found = re.search(r"expert has ([\d.]+)×", summary or "")
    return found is not None and float(found[1]) > 3


async def test_the_experts_view_shows_a_collapsed_router(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The experts view shows layer by layer that new weights send most tokens to a few experts."""
    async with (
        busy_fleet(nats_url, fleet, tmp_path, 1) as (_, two),
        http_before(nats_url, fleet) as http,
    ):
        await http.rb.fleet.wait_for_workers()
        bias_router(monkeypatch, two)
        async with under_load(http.rb, SLOTS), opened(browser, f"{http.url}/#/experts?layer=12&expert=3") as page:
            await page.until_text("[data-testid=imbalance]", lambda text: bool(text) and "Worst layer" in text)
            await http.rb.fleet.update_weights(path=str(two), version=12, mode="keep")
            await page.until_text("[data-testid=imbalance]", is_collapsed)
            await photograph(page, "experts")
            assert await faint_texts(page) == []
            assert await nameless(page) == []
