"""Commands from the page: a dialog describes each command, then the command is sent, then the ledger shows its acks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from selenium.webdriver import Chrome

from rollbus.frontend.http.settings import Settings
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.browser.page import Page, each, opened
from tests.browser.small_fleet import under_load
from tests.browser.test_tokens import check_leaves_no_trace, give
from tests.http.support import Http, http_before
from tests.support.fleet import synthetic_worker
from tests.support.fleet_states import all_serve, until_state

ADMIN = "admin-token-2846"
LEDGER = each("[data-testid=act-ledger] tbody tr", "[one.dataset.key, one.dataset.result]")
STATES = each("[data-testid=workers] td[data-column=state]", "one.innerText")
LEDGERS = each("[data-testid=ledger][data-done=true]", "one.dataset.command")
DISABLED = each("[data-testid=act-pause], [data-testid=act-drain]", "one.disabled")


@asynccontextmanager
async def two_workers(nats_url: str, fleet: str, settings: Settings | None = None) -> AsyncIterator[Http]:
    """Serve a fleet with the workers `w0` and `w1`, which compute each token slowly."""
    config = SyntheticConfig(step_s=0.02, max_model_len=10_000_000)
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
    """A drain with an active filter goes only to the workers that the filter shows."""
    async with two_workers(nats_url, fleet) as http, opened(browser, f"{http.url}/") as page:
        await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
        await page.click("[data-testid=worker-filter]")
        await page.press("w1")
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


async def test_a_filter_that_shows_no_worker_selects_no_worker(browser: Chrome, nats_url: str, fleet: str) -> None:
    """If the filter shows no worker, the dialog offers no worker instead of all workers."""
    async with two_workers(nats_url, fleet) as http, opened(browser, f"{http.url}/") as page:
        await page.until(DISABLED, [False, False])
        await page.click("[data-testid=worker-filter]")
        await page.press("zzz")
        await page.until(each("[data-testid=workers] tbody tr[data-key]", "one.dataset.key"), [])
        await page.click("[data-testid=act-pause]")
        await page.until_text("[data-testid=act-says]", "The filter shows no worker. Clear it to choose workers.")
        assert await page.texts("[data-testid=act-confirm]") == []
