"""Each view with a busy fleet. With `$ROLLBUS_SCREENSHOTS`, the tests save the screenshots of the docs."""

from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.browser.accessibility import faint_texts, nameless
from tests.browser.announcer import announced
from tests.browser.page import DESKTOP, PHONE, Size, Theme, opened
from tests.browser.past_hour import remember_an_hour
from tests.browser.screenshots import photograph
from tests.browser.small_fleet import MODEL, busy_fleet, in_trouble, under_load
from tests.browser.test_acts import LEDGERS
from tests.http.support import http_before

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
