"""Fixtures that serve a test's own fleet over HTTP: `async with serve() as http`."""

import functools
from pathlib import Path

import pytest

from rollbus.bus.client import presence
from tests.http.support import Control, Serve, Talk, control_http, http_before, http_service, talking

PING_WAIT_S = 0.15


@pytest.fixture(autouse=True)
def near_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for answers to a ping: the workers run in this process. Each scrape and each read sends one."""
    if request.node.get_closest_marker("vllm") is None:
        monkeypatch.setattr(presence, "PING_WAIT_S", PING_WAIT_S)


@pytest.fixture
def serve(nats_url: str, fleet: str) -> Serve:
    """Return `http_service` for this test's fleet."""
    return functools.partial(http_service, nats_url, fleet)


@pytest.fixture
def serve_fleet(nats_url: str, fleet: str) -> Serve:
    """Return `http_before` for this test's fleet."""
    return functools.partial(http_before, nats_url, fleet)


@pytest.fixture
def talk(nats_url: str, fleet: str, tmp_path: Path) -> Talk:
    """Return `talking` for this test's fleet."""
    return functools.partial(talking, nats_url, fleet, tmp_path)


@pytest.fixture
def control(nats_url: str, fleet: str, tmp_path: Path) -> Control:
    """Return `control_http` for this test's fleet."""
    return functools.partial(control_http, nats_url, fleet, tmp_path)
