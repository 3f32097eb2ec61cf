"""The page without a mouse, and in the accessibility tree that a screen reader uses."""

from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from tests.browser.accessibility import nameless, roles
from tests.browser.page import Page, opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker

FOCUS = "const at = document.activeElement; return at.dataset.testid ?? at.closest('th')?.dataset.column ?? at.id"


async def tab_to(page: Page, testid: str) -> list[str]:
    """Press Tab until an element has the focus. Return the elements that had the focus on the way."""
    seen: list[str] = []
    while testid not in seen:
        await page.press(Keys.TAB)
        seen.append(await page.run(FOCUS))
        assert len(seen) < 100, seen
    return seen


async def test_the_dialog_opens_and_closes(browser: Chrome, nats_url: str, fleet: str) -> None:
    """Enter opens the dialog, the focus stays inside, and Escape closes it and returns the focus to its button."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
        passed = await tab_to(page, "token-button")
        assert passed[0] == "skip"
        await page.press(Keys.ENTER)
        await page.until(FOCUS, "token-input")
        assert (await roles(page))["dialog"] == ["Token"]
        assert await nameless(page) == []
        for _ in range(6):
            await page.press(Keys.TAB)
            assert await page.run("return document.activeElement.matches('dialog *, body')")
        await page.press(Keys.ESCAPE)
        await page.until("return document.querySelector('dialog')", None)
        assert await page.run(FOCUS) == "token-button"


async def test_the_table_is_sorted_and_filtered(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The column headers are buttons that announce the sort order, and the filter is a search box with a name."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
        await tab_to(page, "worker-filter")
        await page.press("nobody")
        await page.until_text("[data-testid=worker-count]", "0 of 1")
        await tab_to(page, "weight_version")
        await page.press(Keys.ENTER)
        sort = "return document.querySelector('[data-testid=workers] th[aria-sort]')?.ariaSort"
        await page.until(sort, "descending")
        found = await roles(page)
        assert "Workers" in found["table"]
        assert found["searchbox"] == ["Filter workers"]
        assert found["tablist"]
        assert found["main"]
        assert await page.run("return [document.documentElement.lang, document.title !== '']") == ["en", True]
