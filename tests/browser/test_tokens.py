"""Tokens: asked for where they are needed, and kept nowhere but in the tab's own storage."""

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from rollbus.frontend.http.settings import Settings
from tests.browser.page import Page, opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker

pytestmark = pytest.mark.slow

SETTINGS = Settings(token="data-token-7319", admin_token="admin-token-2846")
LINK = "return document.querySelector('[data-testid=link]').dataset.state"
TRACES = """
return [document.documentElement.outerHTML, location.href, JSON.stringify(localStorage), document.cookie,
        ...[...document.querySelectorAll("input")].map(input => input.value)].join("\\n");
"""
"""Where a token must not be left."""


async def give(page: Page, token: str) -> None:
    """Type a token into the dialog that asks for it."""
    await page.click("[data-testid=token-input]")
    await page.press(token, Keys.ENTER)


async def check_leaves_no_trace(page: Page, token: str) -> None:
    """A token is in no address, not in the document, and in no storage that outlives the tab."""
    await page.listen()
    assert token not in "\n".join([await page.run(TRACES), *page.urls])
    assert [token] == await page.run("return Object.values(sessionStorage)")


async def test_nothing_is_shown_without_the_token(browser: Chrome, nats_url: str, fleet: str) -> None:
    """A wrong one is said to be wrong; the right one opens the page, and again after it was loaded anew."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet, SETTINGS) as http,
        opened(browser, f"{http.url}/", may_fail=True) as page,
    ):
        await page.until(LINK, "denied")
        assert "w0" not in await page.run("return document.body.innerText")
        await give(page, "wrong-token-5555")
        await page.until_text("[data-testid=banner]", lambda text: bool(text) and "is wrong" in text)
        assert "w0" not in await page.run("return document.body.innerText")
        await give(page, SETTINGS.token or "")
        await page.until(LINK, "live")
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
        await check_leaves_no_trace(page, SETTINGS.token or "")
        await page.goto(f"{http.url}/")
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
