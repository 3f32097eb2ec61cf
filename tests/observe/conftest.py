"""The exposition against which queries are checked."""

import asyncio

import pytest

from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import http_service
from tests.observe.exposed import worked_metrics


@pytest.fixture(scope="session")
def exposition(nats_url: str) -> str:
    """The `/metrics` text of a service with a worker after some requests."""

    async def scraped() -> str:
        config = SyntheticConfig(prefix_cache=True)
        async with http_service(nats_url, "observed", worker_id="w", config=config) as http:
            return await worked_metrics(http)

    return asyncio.run(scraped())
