"""Outages of the service and of its NATS server: the page reports them and recovers without a reload."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from selenium.webdriver import Chrome

import rollbus
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.frontend.http.server import listen, serving
from rollbus.frontend.http.settings import Settings
from tests.browser.fleet_view import rows
from tests.browser.page import Page, opened
from tests.http.support import http_before
from tests.support.configured_servers import free_nodes
from tests.support.fleet import synthetic_worker
from tests.support.nats_server import require_binary

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


async def test_a_hidden_page_closes_its_connection(browser: Chrome, nats_url: str, fleet: str) -> None:
    """A page that is hidden for a long time closes its connection. It connects again as soon as it is visible."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet) as http,
        opened(browser, f"{http.url}/") as page,
    ):
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
            assert {*await rows(page)} == {"w0"}
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
