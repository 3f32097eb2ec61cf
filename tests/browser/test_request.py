"""The timeline of one request, found by its id."""

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from rollbus.frontend.http.settings import Settings
from tests.browser.page import each, opened
from tests.browser.test_tokens import give
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.requests import short

pytestmark = pytest.mark.slow

EVENTS = each("[data-testid=attempt] tr[data-event]", "one.dataset.event")
NOTE = "[data-testid=request-note]"


async def test_the_page_shows_the_timeline_of_a_request(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The page shows the timeline of the entered request id from the queue to the end, and reports an unknown id."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/", may_fail=True) as page,
    ):
        await http.rb.fleet.wait_for_workers()
        await http.rb.complete(short("gsm8k/rollout.7"))
        await page.click("[data-testid=tab-request]")
        await page.click("[data-testid=request-id]")
        await page.press("gsm8k/rollout.7", Keys.ENTER)
        events = await page.until(EVENTS, lambda found: "ended" in found)
        assert [event for event in events if event != "published"] == [
            "offered",
            "started",
            "prefilled",
            "first_token",
            "ended",
        ]
        shown = await page.run("return document.querySelector('#view-request').innerText")
        assert "w0" in shown
        assert "3 tokens" in shown
        assert "rollout.7" in await page.run("return location.href")

        await page.goto(f"{http.url}/#/request?id=nobody")
        await page.until_text(NOTE, lambda text: bool(text) and "No worker knows nobody" in text)
        assert await page.run(EVENTS) == []


async def test_the_data_token_shows_no_timeline(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The token for requests shows the fleet, but not the timeline of a request."""
    settings = Settings(token="data-token-7319", admin_token="admin-token-2846")
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet, settings) as http,
        opened(browser, f"{http.url}/", may_fail=True) as page,
    ):
        await http.rb.fleet.wait_for_workers()
        await http.rb.complete(short("rollout-8"))
        await give(page, "data-token-7319")
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
        await page.goto(f"{http.url}/#/request?id=rollout-8")
        await page.until_text(NOTE, lambda text: bool(text) and "cannot be looked up" in text)
        await page.until_text("[data-testid=token-dialog]", lambda text: bool(text) and "admins" in text)
        assert await page.run(EVENTS) == []
        await give(page, "admin-token-2846")
        await page.until(EVENTS, lambda found: "ended" in found)
