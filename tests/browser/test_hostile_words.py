"""Text from the wire that looks like HTML: the page shows it as text and never interprets it."""

import pytest
from selenium.webdriver import Chrome

from rollbus.schemas.presence import LoraInfo, Staging
from tests.browser.announcer import announced
from tests.browser.fleet_view import rows
from tests.browser.page import opened
from tests.http.support import http_before
from tests.support.presences import capabilities, presence

pytestmark = pytest.mark.slow

SCRIPT = "<script>window.taken = true</script>"
IMAGE = "<img src=x onerror='window.taken = true'>"
QUOTES = "\"'><svg onload=window.taken=true>&amp;"


async def test_markup_in_texts_of_workers_is_shown_as_text(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The page shows markup in names, errors and stages as text, and creates no element from it."""
    said = presence(
        worker="w0",
        incarnation=QUOTES,
        model=SCRIPT,
        weight_version=3,
        capabilities=capabilities(engine=IMAGE, engine_version=SCRIPT),
        last_error=IMAGE,
        staging=Staging(source=SCRIPT, stage=QUOTES, done_bytes=1, total_bytes=2),
        loras=(LoraInfo(name=IMAGE, version=1),),
        host=IMAGE,
    )
    other = presence(worker="w1", model=IMAGE)
    async with (
        announced(nats_url, fleet, lambda _: [said, other]),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        shown = await rows(page)
        assert shown["w0"]["note"].endswith(f"△ {IMAGE}")
        assert (shown["w0"]["model"], shown["w1"]["model"]) == (SCRIPT, IMAGE)
        assert shown["w0"]["note"].startswith(QUOTES)
        assert {SCRIPT, IMAGE} <= {*await page.texts("[data-testid=told] h3")}
        await page.click("[data-testid=worker-filter]")
        await page.press(IMAGE)
        await page.until_text("[data-testid=worker-count]", "2 of 2")
        made = "return document.querySelectorAll('main img, main script, svg[onload]').length"
        assert await page.run(made) == 0
        assert await page.run("return window.taken") is None
