"""The fleet view: two workers on the synthetic engine, and many workers that only publish presence."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

from rollbus.frontend.http import Settings
from rollbus.schemas.control import ReadRequest
from rollbus.schemas.presence import EngineStats, LoraInfo, WorkerPresence, WorkerState
from rollbus.schemas.telemetry import RequestProgress, RequestTimeline, TimelineEvent
from rollbus.schemas.weights import Staging
from tests.browser.announcer import announced
from tests.browser.conftest import View
from tests.browser.page import PHONE, Page, Size, nameless, opened, roles
from tests.http.support import http_before
from tests.support.fleet import capabilities, presence
from tests.support.hand_control import APPLIED, controlled, unless

MANY = 1000
STEPS = 6
"""Heights of the table that are scrolled row by row. Then the test goes to the end."""
MAX_ROWS = 100
"""Maximum number of table rows that are elements at a time. The screen shows fewer than forty rows."""


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


async def test_rows_show_the_presence_of_the_workers(view: View) -> None:
    """A row shows state, version, slots, KV use, loan and error of the worker's presence.

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
    lent = replace(said, worker="w2", state=WorkerState.ASLEEP, loan_left_s=590.0)
    async with view(said, other, lent) as (_, page):
        await page.until_text("[data-testid=tile-workers-value]", "1 of 3")
        shown = await page.rows()
    assert shown.keys() == {"w0", "w1", "w2"}
    wanted: dict[str, dict[str, Any]] = {
        "w0": {"state": "outdated", "weight_version": "v12", "in_flight": "3 / 8", "waiting": "2", "kv_use": "43 %"},
        "w1": {"state": "serving", "weight_version": "v13", "in_flight": "3 / 8", "kv_use": "–"},
    }
    for worker, cells in wanted.items():
        for column, text in cells.items():
            assert text in shown[worker][column], (worker, column)
    assert shown["w0"]["note"] == "△ disk is full"
    assert shown["w1"]["note"] == ""
    assert shown["w2"]["note"] == "lent, 10 min 0 s left △ disk is full"


async def test_a_thousand_workers_are_scrolled_sorted_and_filtered(browser: Chrome, nats_url: str, fleet: str) -> None:
    """While a user scrolls, sorts and filters, the table has elements only for the visible rows and a few more."""
    async with (
        announced(nats_url, fleet, many_workers, again_s=60.0),
        http_before(nats_url, fleet) as http,
        # The height of the table is half of the screen's. On a tall one it has few steps to its end.
        opened(browser, f"{http.url}/", size=Size(1400, 1800)) as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "900 of 1,000")
        first, last = await _rows_while_scrolling(page, range(STEPS)), await _rows_while_scrolling(page, [10 * MANY])
        assert (min(first), max(last)) == (2, MANY + 1)
        assert sorted(first) == [*range(2, max(first) + 1)]
        assert max(first) > STEPS * len(last) / 2

        await page.click("th[data-column=in_flight] button")
        await _scroll(page, 0)
        await page.until(f"{FIRST}", "w999")
        await page.click("th[data-column=in_flight] button")
        await page.until(f"{FIRST}", "w0")

        await page.click("[data-testid=worker-filter]")
        await page.press("w77")
        await page.until_text("[data-testid=worker-count]", "11 of 1,000")
        assert {*await page.rows()} == {"w77", *(f"w77{i}" for i in range(10))}


FIRST = "return document.querySelector('[data-testid=workers] tbody tr[data-key]').dataset.key"


async def _scroll(page: Page, heights: float) -> None:
    """Scroll the table to so many times its height."""
    script = "const all = document.querySelector('.scroller'); all.scrollTop = arguments[0] * all.clientHeight;"
    await page.run(script, heights)


DRAWN = f"""
const view = document.querySelector('.scroller').getBoundingClientRect();
const all = [...document.querySelectorAll('[data-testid=workers] tbody tr[data-key]')];
const last = all.at(-1);
if (last.getBoundingClientRect().bottom >= view.bottom - 1 || last.ariaRowIndex == {MANY + 1})
    return Object.fromEntries(all.map(one => [one.ariaRowIndex, one.dataset.key]));
"""


async def _rows_while_scrolling(page: Page, steps: Iterable[int]) -> dict[int, str]:
    """Return the workers of the rows that are elements at these heights, by number of the row: never many at once."""
    seen: dict[int, str] = {}
    for step in steps:
        await _scroll(page, step)
        # The browser draws the rows with its next frame.
        shown = await page.until(DRAWN, bool)
        assert len(shown) <= MAX_ROWS
        seen |= {int(row): worker for row, worker in shown.items()}
    return seen


# Text from the wire that looks like HTML: the page shows it as text and never interprets it.


SCRIPT = "<script>window.taken = true</script>"
IMAGE = "<img src=x onerror='window.taken = true'>"
MADE = "return document.querySelectorAll('main img, main script, svg[onload]').length"
"""The number of elements that the page created from markup."""
QUOTES = "\"'><svg onload=window.taken=true>&amp;"


async def test_markup_in_texts_of_workers_is_shown_as_text(view: View) -> None:
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
    async with view(said, other) as (_, page):
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        shown = await page.rows()
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


# The page without a mouse, and in the accessibility tree that a screen reader uses.


FOCUS = "const at = document.activeElement; return at.dataset.testid ?? at.closest('th')?.dataset.column ?? at.id"


async def tab_to(page: Page, testid: str) -> list[str]:
    """Press Tab until an element has the focus. Return the elements that had the focus on the way."""
    seen: list[str] = []
    while testid not in seen:
        await page.press(Keys.TAB)
        seen.append(await page.run(FOCUS))
        assert len(seen) < 100, seen
    return seen


async def test_the_page_works_without_a_mouse(view: View) -> None:
    """Enter opens the dialog, the focus stays inside, and Escape closes it and returns the focus to its button.

    The column headers are buttons that announce the sort order, and the filter is a search box with a name.
    """
    async with view("w0") as (_, page):
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


# Tokens: the page asks for them when it needs them, and stores them only in the session storage of the tab.


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


async def test_nothing_is_shown_without_the_token(view: View) -> None:
    """The page reports a wrong token. The right token opens the page, also after a reload."""
    async with view("w0", settings=SETTINGS, may_fail=True) as (http, page):
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
