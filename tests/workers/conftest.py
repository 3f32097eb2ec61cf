"""Workers that tests of one worker start in their own fleet on the common server."""

import functools

import pytest

from tests.workers import support


@pytest.fixture
def heard_worker(nats_url: str, fleet: str) -> support.StartHeard:
    """Starts a worker and a client by hand: `async with ... as (client, worker, engine)`."""
    return functools.partial(support.heard_worker, nats_url, fleet)


@pytest.fixture
def controlled_worker(nats_url: str, fleet: str) -> support.StartControlled:
    """Starts them with a controller by hand: `async with ... as (client, boss, worker, engine)`."""
    return functools.partial(support.controlled_worker, nats_url, fleet)
