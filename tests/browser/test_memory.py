"""A page that is opened after an incident shows what happened."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome

import rollbus
from rollbus.frontend.http.live import experts
from rollbus.schemas.presence import WorkerState
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.browser.announcer import announced
from tests.browser.conftest import View
from tests.browser.expert_view import counts_of, until_counts
from tests.browser.page import DESKTOP, PHONE, Size, each, opened
from tests.control.support import folders
from tests.http.support import http_before
from tests.support.fleet import capabilities, presence, synthetic_worker
from tests.support.requests import sized

EVENTS = each("[data-testid=event]", "one.innerText.replace(/\\s+/g, ' ')")
LANES = each("[data-testid=day] svg[role=img]", "one.ariaLabel")


async def test_a_page_opened_later_shows_commands_and_the_last_starts(
    browser: Chrome, nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A service that starts after an incident shows the recorded commands, with mode, version, author and time."""
    one, two = folders(tmp_path)
    fields: dict[str, Any] = {
        "model_path": str(one),
        "weight_roots": (str(tmp_path),),
        "cache_dir": str(tmp_path / "cache"),
    }
    async with synthetic_worker(nats_url, fleet, worker_id="w0", weight_version=1, **fields):
        async with rollbus.connect(nats_url, fleet=fleet, client="operator") as rb:
            await rb.fleet.wait_for_workers()
            await rb.fleet.pause(mode="wait")
            await rb.fleet.resume()
            await rb.fleet.update_weights(path=str(two), version=2, label="step-2")
        async with http_before(nats_url, fleet) as http, opened(browser, f"{http.url}/") as page:
            shown = await page.until(EVENTS, lambda found: len(found) == 4)
            lanes = await page.run(LANES)
            assert "Commands come from the store" in (await page.texts("[data-testid=day-since]"))[0]
    assert [text.split(" by ")[0] for text in shown[:3]] == [
        "▲ update weights synthetic: v2 “step-2”",
        "▶ resume synthetic",
        "Ⅱ pause synthetic: wait",
    ]
    assert all("by operator, epoch" in text for text in shown[:3])
    assert shown[3].startswith("● started w0")
    assert lanes == ["restarts: 1 in 1 h 0 min", "updates: 1 in 1 h 0 min", "pauses: 2 in 1 h 0 min"]


async def test_a_restart_is_an_event_and_a_mark(browser: Chrome, nats_url: str, fleet: str) -> None:
    """A worker that comes back as another process is shown as restarted, with the reason that `up` announces."""
    lives = [
        presence(worker="w0", incarnation="a", uptime_s=9000.0, lease_s=60.0),
        presence(worker="w0", incarnation="b", uptime_s=0.0, last_error="killed by SIGKILL", lease_s=60.0),
    ]
    async with (
        http_before(nats_url, fleet) as http,
        announced(nats_url, fleet, lambda number: [lives[number > 6]]),
        opened(browser, f"{http.url}/") as page,
    ):
        shown = await page.until(EVENTS, lambda found: any("restarted" in text for text in found))
    assert shown[0].startswith("↻ restarted w0: killed by SIGKILL")
    assert shown[1].startswith("● started w0")


LONG = "a-name-of-a-worker-with-much-to-say-0123456789"
ERROR = "storage: no space left on /var/cache/rollbus: 61.1 GB are needed, 12.4 GB are free"
CUT = each(
    "[data-testid=workers] tr > :is(td, th)", "[one.dataset.column ?? 'worker', one.scrollWidth - one.clientWidth]"
)
VISIBLE = """
const view = document.querySelector(".scroller").getBoundingClientRect();
return [...document.querySelectorAll("tr[data-key] :is(td[data-column=state], td[data-column=tokens_per_s], .below)")]
    .filter(one => one.innerText).map(one => [one.innerText.trim(), one.getBoundingClientRect()])
    .filter(([, box]) => box.width && box.left >= view.left && box.right <= view.right).map(([text]) => text);
"""


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_no_column_is_cut_and_tables_tell_that_they_scroll(view: View, size: Size) -> None:
    """A column is as wide as its widest text. A table with more columns says so until it is scrolled to its end."""
    said = [
        presence(worker="w0", in_flight=1024, capabilities=capabilities(max_num_seqs=1024), last_error=ERROR),
        presence(worker=LONG, state=WorkerState.WAITING_FOR_WEIGHTS, model="org/model-" + "x" * 40),
    ]
    async with view(*said, size=size) as (_, page):
        await page.until_text("[data-testid=tile-workers-value]", "1 of 2")
        wrapped = ("worker", "state") if size is PHONE else ()
        await page.until(
            CUT, lambda cells: len(cells) > 26 and all(over <= 0 or name in wrapped for name, over in cells)
        )
        await page.until("return document.querySelector('.scroller').classList.contains('more-right')")
        if size is PHONE:
            seen = await page.run(VISIBLE)
            assert f"△ {ERROR}" in seen
            assert sum("serving" in text for text in seen) == 1
            assert len(seen) == 5, seen
        await page.run("document.querySelector('.scroller').scrollLeft = 1e6")
        await page.until("return document.querySelector('.scroller').classList.contains('more-right')", False)


async def test_the_heat_map_keeps_its_last_counts(
    browser: Chrome, nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is opened after the last token shows all counts of the newest weights, and says so.

    It keeps its counts after the worker is gone.
    """
    monkeypatch.setattr(experts, "PERIOD_S", 0.2)
    monkeypatch.setattr(experts, "WINDOW_S", 0.0)
    config = SyntheticConfig(num_layers=2, num_experts=5, top_k=2)
    async with (
        http_before(nats_url, fleet) as http,
        contextlib.AsyncExitStack() as worker,
        opened(browser, f"{http.url}/#/experts") as page,
    ):
        await worker.enter_async_context(synthetic_worker(nats_url, fleet, config=config, worker_id="w0"))
        await http.rb.fleet.wait_for_workers()
        done = await http.rb.complete(sized(20, 8))
        expected = counts_of([done], config.num_experts)
        await until_counts(page, "generated", expected["generated"])
        said = await page.until_text("[data-testid=seen]", lambda text: bool(text) and "tokens seen" in text)
        assert said.startswith("no tokens in the last minute; all of the newest weights: 100 % of 7")
        await worker.aclose()
        await page.until_text("#view-experts .notice", bool)
        await until_counts(page, "prompt", expected["prompt"])


async def test_a_worker_leads_to_its_log_and_its_requests(view: View) -> None:
    """The view of one worker names its host, process, log and error, and links to its requests."""
    # The service has no history of the worker yet.
    said = presence(worker="w0", host="node-3", pid=4711, log="/var/log/w0.log", last_error=ERROR, uptime_s=60.0)
    async with view(said, may_fail=True) as (_, page):
        await page.click("tr[data-key=w0] a")
        facts = await page.until_text("[data-testid=worker-facts]", bool)
        assert facts.endswith("host node-3, process 4711 · log /var/log/w0.log")
        await page.until_text("#view-throughput .notice", ERROR)
        assert await page.run(each("#view-throughput .controls a", "one.hash")) == ["#/fleet", "#/request?worker=w0"]


async def test_charts_mark_what_happened(view: View) -> None:
    """Charts have marks for updates, pauses and starts, those of one worker without those of other workers."""
    said = [presence(worker=f"w{i}", uptime_s=600.0 * i) for i in range(1, 4)]
    async with view(*said) as (_, page):
        await page.until(EVENTS, lambda found: len(found) > 1)
        marks = "const [marks] = await Promise.all([import('/assets/day.js')]); return marks.chartMarks(arguments[0])"
        all_marks = await page.run(marks, None)
        assert [each["text"] for each in all_marks] == ["w3 started", "w2 started", "w1 started"]
        assert [each["text"] for each in await page.run(marks, "w2")] == ["w2 started"]
