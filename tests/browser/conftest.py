"""One browser for all tests, which one process runs (tests/conftest.py), and pages of a test's own fleet."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from selenium.webdriver import Chrome

from rollbus.frontend.http import Settings
from rollbus.schemas.presence import WorkerPresence
from tests.browser.announcer import announced
from tests.browser.page import Page, missing, opened, running_chromium
from tests.http.support import Http, http_before
from tests.support.fleet import synthetic_worker

View = Callable[..., AbstractAsyncContextManager[tuple[Http, Page]]]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Start a browser, or skip the tests if this machine has none."""
    if reason := missing():
        pytest.skip(reason)
    with running_chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def view(browser: Chrome, nats_url: str, fleet: str) -> View:
    """Return a function that serves workers and opens the page of their fleet."""

    @asynccontextmanager
    async def page_of(
        *workers: str | WorkerPresence, path: str = "", settings: Settings | None = None, **options: Any
    ) -> AsyncIterator[tuple[Http, Page]]:
        """Run synthetic workers of these names, and announce those that are given by their presence."""
        said = [each for each in workers if isinstance(each, WorkerPresence)]
        async with AsyncExitStack() as stack:
            for worker in workers:
                if isinstance(worker, str):
                    await stack.enter_async_context(synthetic_worker(nats_url, fleet, worker_id=worker))
            if said:
                await stack.enter_async_context(announced(nats_url, fleet, lambda _: said))
            http = await stack.enter_async_context(http_before(nats_url, fleet, settings))
            page = await stack.enter_async_context(opened(browser, f"{http.url}/{path}", **options))
            yield http, page

    return page_of
