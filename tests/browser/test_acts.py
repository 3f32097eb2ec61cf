"""Commands from the page: a dialog describes each command, then the command is sent, then the ledger shows its acks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.keys import Keys

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.http import Settings
from rollbus.frontend.http.server import listen, serving
from rollbus.schemas.errors import RequestRejected
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.browser.conftest import View
from tests.browser.page import PHONE, Page, Size, each, opened
from tests.browser.small_fleet import under_load
from tests.browser.test_fleet import check_leaves_no_trace, give
from tests.http.support import Http, http_before
from tests.support.fleet import all_serve, synthetic_worker, until_state
from tests.support.nats_server import free_nodes, require_binary
from tests.support.requests import endless, short, start_stream

ADMIN = "admin-token-2846"
LEDGER = each("[data-testid=act-ledger] tbody tr", "[one.dataset.key, one.dataset.result]")
STATES = each("[data-testid=workers] td[data-column=state]", "one.innerText")
LEDGERS = each("[data-testid=ledger][data-done=true]", "one.dataset.command")
DISABLED = each("[data-testid=act-pause], [data-testid=act-drain]", "one.disabled")


@asynccontextmanager
async def two_workers(nats_url: str, fleet: str, settings: Settings | None = None) -> AsyncIterator[Http]:
    """Serve a fleet with the workers `w0` and `w1`, which compute each token slowly."""
    config = SyntheticConfig(step_s=0.1, max_model_len=10_000_000)
    async with (
        synthetic_worker(nats_url, fleet, config=config, worker_id="w0"),
        synthetic_worker(nats_url, fleet, config=config, worker_id="w1"),
        http_before(nats_url, fleet, settings) as http,
    ):
        await http.own.fleet.wait_for_workers(2)
        await http.rb.fleet.wait_for_workers(2)
        yield http


async def send(page: Page, act: str) -> None:
    """Send a command and wait until both workers have applied it."""
    await page.click(f"[data-testid=act-{act}]")
    await page.click("[data-testid=act-confirm]")
    await page.until(LEDGER, [["w0", "applied"], ["w1", "applied"]])
    await page.click("[data-testid=act-close]")


async def test_the_dialog_shows_the_size_of_a_pause_and_the_page_the_acks(
    browser: Chrome, nats_url: str, fleet: str
) -> None:
    """The dialog shows the numbers of workers and requests before the command is sent.

    The ledger then lists each worker that applied it.
    """
    async with (
        two_workers(nats_url, fleet) as http,
        under_load(http.rb, 3),
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text("[data-testid=tile-in-flight-value]", "3")
        await page.click("[data-testid=act-pause]")
        said = await page.until_text("[data-testid=act-dialog]", lambda text: text is not None)
        assert "2 workers" in said
        assert "3 requests in flight" in said
        assert all_serve(await http.rb.fleet.state())
        await page.click("[data-testid=act-cancel]")
        await page.until("return document.querySelector('dialog')", None)
        assert all_serve(await http.rb.fleet.state())

        await send(page, "pause")
        await until_state(http.rb, lambda state: {one.state for one in state.workers} == {WorkerState.PAUSED})
        await page.until(STATES, lambda states: len(states) == 2 and all("paused" in state for state in states))
        await page.until_text("[data-testid=told-pause]", lambda text: bool(text) and "keep" in text)
        # The requests survive the pause and continue.
        await page.until_text("[data-testid=tile-in-flight-value]", "3")
        await send(page, "resume")
        await until_state(http.rb, all_serve)
        await page.until(STATES, lambda states: len(states) == 2 and all("serving" in state for state in states))
        # The ledgers of the commands that the service received from the bus.
        await page.until(LEDGERS, ["resume", "pause"])


async def test_a_filter_chooses_the_workers(browser: Chrome, nats_url: str, fleet: str) -> None:
    """A command with an active filter goes only to the workers that the filter shows. If it shows none, to none."""
    async with two_workers(nats_url, fleet) as http, opened(browser, f"{http.url}/") as page:
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        await page.click("[data-testid=worker-filter]")
        await page.press("w1zzz")
        await page.until(each("[data-testid=workers] tbody tr[data-key]", "one.dataset.key"), [])
        await page.click("[data-testid=act-pause]")
        await page.until_text("[data-testid=act-says]", "The filter shows no worker. Clear it to choose workers.")
        assert await page.texts("[data-testid=act-confirm]") == []
        await page.press(Keys.ESCAPE)
        await page.click("[data-testid=worker-filter]")
        await page.press(*[Keys.BACKSPACE] * 3)
        await page.until_text("[data-testid=worker-count]", "1 of 2")
        await page.click("[data-testid=act-drain]")
        await page.until_text("[data-testid=act-says]", lambda text: bool(text) and "1 worker" in text)
        await page.click("[data-testid=act-confirm]")
        await page.until(LEDGER, [["w1", "applied"]])
        drained = {"w0": WorkerState.SERVING, "w1": WorkerState.DRAINED}
        await until_state(http.rb, lambda state: {one.worker: one.state for one in state.workers} == drained)


async def test_commands_require_the_admin_token(browser: Chrome, nats_url: str, fleet: str) -> None:
    """Without the admin token, the page is read-only.

    It reports a wrong token, and the right token leaves no trace in the page.
    """
    async with (
        two_workers(nats_url, fleet, Settings(admin_token=ADMIN)) as http,
        opened(browser, f"{http.url}/", may_fail=True) as page,
    ):
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        await page.until(DISABLED, [True, True])
        await page.until_text("[data-testid=act-why]", lambda text: bool(text) and "token" in text)

        await page.click("[data-testid=token-button]")
        await give(page, "wrong-token-5555")
        await page.until("return document.body.innerText", lambda text: "is not an admin token" in text)
        assert await page.run(DISABLED) == [True, True]

        if await page.run("return document.querySelector('dialog') === null"):
            await page.click("[data-testid=token-button]")
        await give(page, ADMIN)
        await page.until(DISABLED, [False, False])
        await send(page, "pause")
        await until_state(http.rb, lambda state: {one.state for one in state.workers} == {WorkerState.PAUSED})
        await check_leaves_no_trace(page, ADMIN)


# The list of requests, and the timeline of one request, found by its id.


EVENTS = each("[data-testid=attempt] tr[data-event]", "one.dataset.event")
NOTE = "[data-testid=request-note]"
LISTED = each(
    "[data-testid=requests] tr[data-key]", "[one.innerText.split(/\\s+/).slice(0, 2).join(' '), one.cells[5].innerText]"
)
"""The id and state of each listed request, and its worker."""
LINK = "[data-testid=requests] tr[data-key] a"
SLOW = SyntheticConfig(step_s=0.1, max_model_len=10_000_000)


async def check_fits(page: Page) -> None:
    """Check that the page is as wide as a small screen and, at the end, a phone."""
    for size in (Size(1280, 800), PHONE):
        await page.resize(size)
        assert await page.run("return document.documentElement.scrollWidth") <= size.width


async def test_the_request_view_begins_with_a_list(browser: Chrome, nats_url: str, fleet: str) -> None:
    """The list has the requests of the worker in the address. A click or Enter opens a trace, a link leads back."""
    async with (
        rollbus.connect(nats_url, fleet=fleet, client="alice") as alice,
        synthetic_worker(nats_url, fleet, worker_id="w0", config=SLOW),
        http_before(nats_url, fleet) as http,
        asyncio.TaskGroup() as tasks,
        opened(browser, f"{http.url}/#/request?worker=w0", size=PHONE) as page,
    ):
        await alice.fleet.wait_for_workers()
        with pytest.raises(RequestRejected):
            await alice.complete(short("gsm8k/wrong", lora="missing"))
        stream = await start_stream(tasks, alice, endless("gsm8k/rollout.7"))
        async with synthetic_worker(nats_url, fleet, worker_id="w1", config=SLOW):
            await http.rb.fleet.wait_for_workers(2)
            await page.until(LISTED, [["gsm8k/rollout.7 decode", "w0"]])
            await page.until_text("[data-testid=request-count]", "1 at 1 worker")
            await check_fits(page)
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
            await check_fits(page)
            await alice.fleet.abort(["gsm8k/rollout.7"])
            await stream.reading


async def test_the_page_shows_the_timeline_of_a_request(view: View) -> None:
    """The page shows the timeline of the entered request id from the queue to the end, and reports an unknown id."""
    async with view("w0", may_fail=True) as (http, page):
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


async def test_the_data_token_shows_no_timeline(view: View) -> None:
    """The token for requests shows the fleet, but neither the list of requests nor the timeline of one."""
    settings = Settings(token="data-token-7319", admin_token="admin-token-2846")
    async with view("w0", settings=settings, may_fail=True) as (http, page):
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


# Outages of the service and of its NATS server: the page reports them and recovers without a reload.


pytestmark = pytest.mark.slow

SERVING = "[data-testid=tile-workers-value]"


@contextlib.asynccontextmanager
async def service(nats_url: str, fleet: str, address: str) -> AsyncIterator[None]:
    """Serve a fleet at a given address."""
    host, port = address.split(":")
    async with (
        rollbus.connect(nats_url, fleet=fleet) as rb,
        serving(rb, Settings(), listen(host, int(port))),
    ):
        yield


async def until_live(page: Page) -> None:
    """Wait until the page receives data and shows no banner."""
    await page.until("return document.querySelector('[data-testid=link]').dataset.state", "live")
    await page.until("return document.querySelector('[data-testid=banner]').checkVisibility()", False)


SET_HIDDEN = """
Object.defineProperty(document, "hidden", {value: arguments[0], configurable: true});
document.dispatchEvent(new Event("visibilitychange"));
"""
SHORT_WAIT = (
    "const wait = window.setTimeout; window.setTimeout = (f, ms, ...rest) => wait(f, ms === 30000 ? 50 : ms, ...rest);"
)


async def test_a_hidden_page_closes_its_connection(view: View) -> None:
    """A page that is hidden for a long time closes its connection. It connects again as soon as it is visible."""
    async with view("w0") as (http, page):
        script = await page.command("Page.addScriptToEvaluateOnNewDocument", source=SHORT_WAIT)
        await page.goto(f"{http.url}/?again")
        await page.command("Page.removeScriptToEvaluateOnNewDocument", **script)
        await until_live(page)
        await page.run(SET_HIDDEN, True)
        await page.until("return document.querySelector('[data-testid=link]').dataset.state", "resting")
        await page.run(SET_HIDDEN, False)
        await until_live(page)
        await page.until_text(SERVING, "1 of 1")


async def test_the_page_recovers_after_the_service_restarts(browser: Chrome, nats_url: str, fleet: str) -> None:
    """While the service is down, a banner shows the time of the last data.

    After the restart, the page shows the current state.
    """
    [address] = free_nodes(1)
    async with synthetic_worker(nats_url, fleet, worker_id="w0"), contextlib.AsyncExitStack() as first:
        await first.enter_async_context(service(nats_url, fleet, address))
        async with opened(browser, f"http://{address}/", may_fail=True) as page:
            await page.until_text(SERVING, "1 of 1")
            await until_live(page)
            await first.aclose()
            await page.until_text("[data-testid=banner]", lambda text: bool(text) and "No data since" in text)
            # The page keeps the last known data and marks them as stale.
            assert {*await page.rows()} == {"w0"}
            assert await page.run("return document.body.classList.contains('stale')")
            async with synthetic_worker(nats_url, fleet, worker_id="w1"), service(nats_url, fleet, address):
                await until_live(page)
                await page.until_text(SERVING, "2 of 2")
                assert not await page.run("return document.body.classList.contains('stale')")


async def test_the_page_stays_connected_while_the_nats_server_is_down(browser: Chrome, fleet: str) -> None:
    """While the NATS server is down, the service keeps the page connected, and the page names the missing server."""
    require_binary()
    async with (
        EmbeddedServer() as server,
        synthetic_worker(server.url, fleet, worker_id="w0"),
        http_before(server.url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
        await page.until_text(SERVING, "1 of 1")
        await until_live(page)
        await server.kill()
        await page.until_text("[data-testid=banner]", lambda text: bool(text) and "NATS" in text)
        assert await page.run("return document.querySelector('[data-testid=link]').dataset.state") == "live"
        await server.restart()
        await until_live(page)
        await page.until_text(SERVING, "1 of 1")
