"""Fixtures that start one worker in its own fleet on the shared server."""

import functools

import pytest

from tests.workers import support


@pytest.fixture
def heard_worker(nats_url: str, fleet: str) -> support.StartHeard:
    """Return a function that starts a worker and a hand client: `async with ... as (client, worker, engine)`."""
    return functools.partial(support.heard_worker, nats_url, fleet)


@pytest.fixture
def controlled_worker(nats_url: str, fleet: str) -> support.StartControlled:
    """Return a function that starts them with a controller: `async with ... as (client, boss, worker, engine)`."""
    return functools.partial(support.controlled_worker, nats_url, fleet)
