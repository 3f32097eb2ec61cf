"""The page while many other viewers use the same service."""

import asyncio

import httpx
import pytest
from selenium.webdriver import Chrome

from tests.browser.page import opened
from tests.http.support import http_before
from tests.support.fleet import synthetic_worker
from tests.support.patience import SOON_S

pytestmark = pytest.mark.slow

VIEWERS = 50


async def test_fifty_streams_and_the_page_receive_a_new_worker(browser: Chrome, nats_url: str, fleet: str) -> None:
    """Each of fifty event streams and the page receive the presence of a worker that starts while all are open."""
    async with (
        synthetic_worker(nats_url, fleet, worker_id="w0"),
        http_before(nats_url, fleet) as http,
        httpx.AsyncClient(base_url=http.url, timeout=SOON_S, limits=httpx.Limits(max_connections=VIEWERS)) as client,
        opened(browser, f"{http.url}/") as page,
        asyncio.TaskGroup() as tasks,
    ):
        looking = asyncio.Semaphore(0)

        async def view() -> None:
            async with client.stream("GET", "/v1/rl/events") as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and '"w0"' in line:
                        looking.release()
                    if line.startswith("data:") and '"w1"' in line:
                        return

        viewers = [tasks.create_task(view()) for _ in range(VIEWERS)]
        for _ in viewers:
            await looking.acquire()
        await page.until_text("[data-testid=tile-workers-value]", "1 of 1")
        async with synthetic_worker(nats_url, fleet, worker_id="w1"):
            for viewer in viewers:
                await viewer
            await page.until_text("[data-testid=tile-workers-value]", "2 of 2")
