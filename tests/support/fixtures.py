"""Fixtures that any test may use; tests/conftest.py loads them."""

import uuid
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """One real NATS server for the whole run; tests keep apart by their fleet's name."""
    # Here, so that tests without a server need not import what starts one.
    from tests.support.nats_server import running_server

    with running_server() as url:
        yield url


@pytest.fixture
def fleet() -> str:
    """Return a fleet's name of this test's own."""
    return f"test-{uuid.uuid4().hex[:12]}"
