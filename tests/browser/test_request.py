"""The list of requests, and the timeline of one request, found by its id."""

import asyncio

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

import rollbus
from rollbus.frontend.http.settings import Settings
from rollbus.schemas.errors import RequestRejected
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.browser.page import PHONE, Size, each, opened
from tests.browser.test_tokens import give
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.requests import endless, short
from tests.support.streams import start_stream

EVENTS = each("[data-testid=attempt] tr[data-event]", "one.dataset.event")
NOTE = "[data-testid=request-note]"
LISTED = each(
    "[data-testid=requests] tr[data-key]", "[one.innerText.split(/\\s+/).slice(0, 2).join(' '), one.cells[5].innerText]"
)
"""The id and state of each listed request, and its worker."""
LINK = "[data-testid=requests] tr[data-key] a"
SLOW = SyntheticConfig(step_s=0.005, max_model_len=10_000_000)


@pytest.mark.parametrize("size", [Size(1280, 800), PHONE], ids=["desktop", "phone"])
async def test_the_request_view_begins_with_a_list(browser: Chrome, nats_url: str, fleet: str, size: Size) -> None:
    """The list has the requests of the worker in the address. A click or Enter opens a trace, a link leads back."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="alice") as alice,
        synthetic_worker(nats_url, fleet, worker_id="w0", config=SLOW),
        http_before(nats_url, fleet) as http,
        asyncio.TaskGroup() as tasks,
        opened(browser, f"{http.url}/#/request?worker=w0", size=size) as page,
    ):
        await alice.fleet.wait_for_workers()
        with pytest.raises(RequestRejected):
            await alice.complete(short("gsm8k/wrong", lora="missing"))
        stream = await start_stream(tasks, alice, endless("gsm8k/rollout.7"))
        async with synthetic_worker(nats_url, fleet, worker_id="w1", config=SLOW):
            await http.rb.fleet.wait_for_workers(2)
            await page.until(LISTED, [["gsm8k/rollout.7 decode", "w0"]])
            await page.until_text("[data-testid=request-count]", "1 at 1 worker")
            assert await page.run("return document.documentElement.scrollWidth") <= size.width
            await page.run("document.querySelector('[data-testid=show-failed]').focus()")
            await page.press(" ")
            await page.until(LISTED, [["gsm8k/wrong unsupported", "w0"]])
            await page.click(LINK)
            await page.until(EVENTS, lambda found: "ended" in found)
            assert await page.run("return location.hash") == "#/request?worker=w0&show=failed&id=gsm8k%2Fwrong"
            assert await page.run("return document.activeElement.dataset.testid") == "request-back"
            await page.press(Keys.ENTER)
            await page.until(LISTED, [["gsm8k/wrong unsupported", "w0"]])

            await page.goto(f"{http.url}/#/request?worker=w1")
            await page.until_text("[data-testid=request-count]", "0 at 1 worker")
            await page.run("document.querySelector('#request-worker').select()")
            await page.press(Keys.DELETE, Keys.TAB)
            await page.until_text("[data-testid=request-count]", "1 at 2 workers")
            await page.click("#request-client")
            await page.press("nobody", Keys.ENTER)
            await page.until_text("[data-testid=request-count]", "0 at 2 workers")
            await page.goto(f"{http.url}/#/request?client=alice")
            await page.until(LISTED, [["gsm8k/rollout.7 decode", "w0"]])
            await page.run(f"document.querySelector('{LINK}').focus()")
            await page.press(Keys.ENTER)
            await page.until(EVENTS, lambda found: "first_token" in found)
            assert await page.run("return document.documentElement.scrollWidth") <= size.width
            await alice.fleet.abort(["gsm8k/rollout.7"])
            await stream.reading


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
    """The token for requests shows the fleet, but neither the list of requests nor the timeline of one."""
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
        await page.click("[data-testid=tab-request]")
        await page.until_text("[data-testid=request-problem]", "The list of requests needs the token of admins.")
        await page.goto(f"{http.url}/#/request?id=rollout-8")
        await page.until_text(NOTE, lambda text: bool(text) and "cannot be looked up" in text)
        await page.until_text("[data-testid=token-dialog]", lambda text: bool(text) and "admins" in text)
        assert await page.run(EVENTS) == []
        await give(page, "admin-token-2846")
        await page.until(EVENTS, lambda found: "ended" in found)
