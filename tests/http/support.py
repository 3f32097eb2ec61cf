"""The HTTP service on a free port, with workers on the synthetic engine or a real engine."""

import base64
import contextlib
import functools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

import rollbus
from rollbus.frontend.http.app import ADMIN, DATA, OPEN
from rollbus.frontend.http.docs import document
from rollbus.frontend.http.server import listen, serving
from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from rollbus.workers.engines.synthetic.engine import SyntheticEngine
from tests.support.fleet import synthetic_worker
from tests.support.patience import HANGS_AFTER_S


@dataclass
class Http:
    """A running service."""

    url: str
    """The URL, without a slash at the end."""
    client: httpx.AsyncClient
    """An HTTP client with the URL of the service as its base."""
    rb: rollbus.Client
    """A client of the same fleet, separate from the service's client."""
    own: rollbus.Client
    """The service's client."""
    engine: SyntheticEngine | None = None
    """The engine of the only worker, if it is synthetic."""


@functools.cache
def _declared() -> dict[tuple[str, str], set[str]]:
    """Return the statuses in the OpenAPI document, by method and path."""
    paths = document(OPEN, DATA, ADMIN, Settings())["paths"]
    return {
        (method.upper(), path): set(operation["responses"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }


async def _check_declared(answer: httpx.Response) -> None:
    """Check for each response of any test that the OpenAPI document lists the status for the route."""
    path = re.sub(r"/(operations|models|requests)/.+$", r"/\1/{id}", answer.request.url.path)
    path = re.sub(r"/(loras|assets)/.+$", r"/\1/{name}", path)
    # Each GET route also has HEAD, which the document does not list.
    method = "GET" if answer.request.method == "HEAD" else answer.request.method
    statuses = _declared().get((method, path), {"404", "405"})
    status = str(answer.status_code)
    assert not statuses.isdisjoint({status, f"{status[0]}XX"}), (method, path, status)


@contextlib.asynccontextmanager
async def http_before(nats_url: str, fleet: str, settings: Settings | None = None) -> AsyncIterator[Http]:
    """Serve a fleet whose workers run elsewhere."""
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    settings = settings or Settings()
    async with (
        rollbus.connect(nats_url, fleet=fleet, tracing=settings.otel) as own,
        rollbus.connect(nats_url, fleet=fleet) as rb,
        serving(own, settings, listening),
        httpx.AsyncClient(
            base_url=url,
            # Tests that encode bodies themselves need this header. For other bodies, httpx sets it.
            headers={"Content-Type": "application/json"},
            timeout=HANGS_AFTER_S,
            event_hooks={"response": [_check_declared]},
        ) as client,
    ):
        yield Http(url, client, rb, own)


@contextlib.asynccontextmanager
async def http_service(
    nats_url: str,
    fleet: str,
    settings: Settings | None = None,
    *,
    config: SyntheticConfig | None = None,
    **worker: object,
) -> AsyncIterator[Http]:
    """Serve a fleet of one synthetic worker."""
    async with (
        synthetic_worker(nats_url, fleet, config=config, **worker) as (_, engine),  # type: ignore[arg-type]
        http_before(nats_url, fleet, settings) as http,
    ):
        for rb in (http.own, http.rb):
            await rb.fleet.wait_for_workers()
        http.engine = engine
        yield http


def noted_requests(monkeypatch: pytest.MonkeyPatch) -> list[rollbus.GenerateRequest]:
    """Return a list that records the requests to the bus that are not streamed."""
    wanted: list[rollbus.GenerateRequest] = []
    complete = rollbus.Client.complete

    async def note(client: rollbus.Client, request: rollbus.GenerateRequest, **options: Any) -> rollbus.Generation:
        wanted.append(request)
        return await complete(client, request, **options)

    monkeypatch.setattr(rollbus.Client, "complete", note)
    return wanted


async def by_bus(rb: rollbus.Client, prompt: list[int], start: int = 0, **sampling: Any) -> rollbus.Generation:
    """Return the generation of a prompt without HTTP."""
    request = rollbus.GenerateRequest(
        prompt_token_ids=prompt, sampling=rollbus.SamplingParams(**sampling), routed_experts_prompt_start=start
    )
    return await rb.complete(request)


def rows_of(routed: dict[str, Any]) -> np.ndarray:
    """Return the rows in a response."""
    data = base64.b64decode(routed["data"], validate=True)
    return np.frombuffer(data, routed["dtype"]).reshape(routed["shape"])
