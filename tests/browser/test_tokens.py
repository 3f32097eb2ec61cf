"""Tokens: the page asks for them when it needs them, and stores them only in the session storage of the tab."""

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from rollbus.frontend.http.settings import Settings
from tests.browser.page import Page, opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker

SETTINGS = Settings(token="data-token-7319", admin_token="admin-token-2846")
LINK = "return document.querySelector('[data-testid=link]').dataset.state"
TRACES = """
return [document.documentElement.outerHTML, location.href, JSON.stringify(localStorage), document.cookie,
        ...[...document.querySelectorAll("input")].map(input => input.value)].join("\\n");
"""
"""Places that must not contain a token."""


async def give(page: Page, token: str) -> None:
    """Enter a token into the token dialog."""
    await page.click("[data-testid=token-input]")
    await page.press(token, Keys.ENTER)


async def check_leaves_no_trace(page: Page, token: str) -> None:
    """Check that the token is in no URL, not in the document, and in no storage that outlives the tab."""
    await page.listen()
    assert token not in "\n".join([await page.run(TRACES), *page.urls])
    assert [token] == await page.run("return Object.values(sessionStorage)")


async def test_nothing_is_shown_without_the_token(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The page reports a wrong token. The right token opens the page, also after a reload."""
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
