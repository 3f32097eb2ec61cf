"""Text from the wire that looks like HTML: the page shows it as text and never interprets it."""

from selenium.webdriver import Chrome

from rollbus.schemas.control import ReadRequest
from rollbus.schemas.presence import LoraInfo
from rollbus.schemas.telemetry import RequestProgress, RequestTimeline, TimelineEvent
from rollbus.schemas.weights import Staging
from tests.browser.announcer import announced
from tests.browser.fleet_view import rows
from tests.browser.page import PHONE, opened
from tests.http.support import http_before
from tests.support.hand_control import APPLIED, controlled, unless
from tests.support.presences import capabilities, presence

SCRIPT = "<script>window.taken = true</script>"
IMAGE = "<img src=x onerror='window.taken = true'>"
MADE = "return document.querySelectorAll('main img, main script, svg[onload]').length"
"""The number of elements that the page created from markup."""
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
        assert await page.run(MADE) == 0
        assert await page.run("return window.taken") is None


LONG = IMAGE + "x" * (512 - len(IMAGE))
OPEN = "[...document.querySelectorAll('[data-testid=requests] a')].find(one => one.title === arguments[0]).click()"
TITLES = "return [...document.querySelectorAll('[data-testid=requests] a')].map(one => [one.title, one.innerText])"


async def test_markup_in_texts_of_requests_is_shown_as_text(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The list and the trace show markup in ids, clients and reasons as text; long ids do not widen the page."""
    timelines = (
        RequestTimeline(request_id="x:1", given_id=LONG, client=SCRIPT, lane=IMAGE, traceparent=QUOTES, events=(
            TimelineEvent(at=1.0, event="toString"), TimelineEvent(at=2.0, event="ended", reason=IMAGE * 50),
        )),
        RequestTimeline(request_id=QUOTES, client=IMAGE, progress=RequestProgress(seconds=1.0), events=(
            TimelineEvent(at=1.0, event="held", reason=SCRIPT),
        )),
        RequestTimeline(request_id="no events", client="c"),
    )  # fmt: skip
    async with (
        controlled(nats_url, fleet, "w0") as control,
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/#/request", size=PHONE) as page,
    ):
        control["w0"].abilities = {"telemetry_reads": True, "request_lists": True}
        control["w0"].reply = unless(ReadRequest, {**APPLIED, "timelines": timelines})
        await control["w0"].announce()
        shown = dict(await page.until(TITLES, lambda found: len(found) == 3))
        assert shown.keys() == {LONG, QUOTES, "no events"}
        assert (len(shown[LONG]), shown[LONG][:24]) == (48, IMAGE[:24])
        texts = await page.run("return document.querySelector('[data-testid=requests]').innerText")
        assert {f"held by {SCRIPT}", IMAGE, SCRIPT} <= {*texts.split("\t")}
        assert await page.run("return document.documentElement.scrollWidth") <= PHONE.width
        assert await page.run(MADE) == 0

        await page.run(OPEN, LONG)
        await page.until_text("#request-title", LONG)
        assert "\n" + IMAGE in await page.run("return document.querySelector('#view-request').innerText")
        assert await page.run("return document.documentElement.scrollWidth") <= PHONE.width
        assert await page.run(MADE) == 0
        assert await page.run("return window.taken") is None
