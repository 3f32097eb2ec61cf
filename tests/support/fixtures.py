"""Fixtures for all tests; tests/conftest.py loads them."""

import asyncio
import contextlib
import functools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import RUN

if TYPE_CHECKING:
    from tests.support.fleet import StartServed
    from tests.support.real_fleet import RealWorkers


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """Run one real NATS server for all tests; each test uses its own fleet name."""
    # Local import: tests without a server need not load it.
    from tests.support.nats_server import running_server

    with running_server() as url:
        yield url


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a fleet name for this test only, and delete the fleet's data on the shared server afterwards."""
    name = f"test-{os.environ[RUN]}-{uuid.uuid4().hex[:8]}"
    yield name
    if "nats_url" in request.fixturenames:
        # Queues reserve storage, which the server has only a limited amount of.
        asyncio.run(_delete_queues(request.getfixturevalue("nats_url"), name))


@pytest.fixture
def one_worker(nats_url: str, fleet: str) -> "StartServed":
    """Return a function that runs a worker and a client: `async with ... as (rb, worker, engine)`."""
    from tests.support.fleet import served

    return functools.partial(served, nats_url, fleet)


async def _delete_queues(url: str, fleet: str) -> None:
    from rollbus.bus.nats.jetstream import ApiError, ask
    from tests.support.nats_server import opened

    async with opened(url) as connection:
        # Some tests have a second fleet, with this one's name and an ending.
        for stream in (await ask(connection, "STREAM.NAMES"))["streams"] or ():
            if stream.startswith((f"rb~{fleet}", f"OBJ_rollbus-{fleet}", f"KV_rollbus-sessions-{fleet}")):
                await ask(connection, f"STREAM.DELETE.{stream}")
        with contextlib.suppress(ApiError):  # no test has created the bucket
            await ask(connection, "STREAM.PURGE.KV_rollbus", {"filter": f"$KV.rollbus.{fleet}.>"})


@pytest.fixture(scope="session", autouse=True)
def patient_pings() -> Iterator[None]:
    """Scale the ping wait of clients in this process by `$ROLLBUS_TEST_PATIENCE`.

    Thousands of tests have a new client, whose workers are near: its first wait is shorter. Workers in this process
    compare their start checkpoints with no other worker.
    """
    from rollbus.bus.client import presence
    from rollbus.workers.control import content
    from tests.support.waits import patient

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(presence, "PING_WAIT_S", patient(presence.PING_WAIT_S))
        patches.setattr(presence, "FIRST_WAIT_S", patient(0.1))
        patches.setattr(content, "LISTEN_S", 0.0)
        yield


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give clients of this process a long lease and long waits for prefill workers and direct workers.

    On a busy machine a worker may answer after the default waits, and another worker would serve the request. With the
    default lease, a server that waits for its disk for seconds would miss the presence of the client.
    """
    from rollbus.bus.client import runtime
    from rollbus.bus.protocol.attempt import machine
    from tests.support.waits import SOON_S, UNHURRIED_LEASE_S

    monkeypatch.setattr(runtime, "LEASE_S", UNHURRIED_LEASE_S)
    monkeypatch.setattr(machine, "HAND_OVER_S", SOON_S)
    monkeypatch.setattr(machine, "PREFILL_WAIT_S", SOON_S)


@pytest.fixture(scope="session")
def tiny_moes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two tiny MoEs with different weights in float32, in which different kernels agree to 1e-4."""
    from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

    folder = tmp_path_factory.mktemp("models")
    first, second = (make_tiny_moe(folder / f"tiny-moe-{seed}", dtype="float32", seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def tiny_moe_float32(tiny_moes: tuple[Path, Path]) -> Path:
    """Return the first of the two tiny MoEs."""
    return tiny_moes[0]


@pytest.fixture(scope="session")
def real_worker(nats_url: str, tiny_moe_float32: Path) -> Iterator["RealWorkers"]:
    """Run one vLLM worker process for all tests that only send requests."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moe_float32)
    try:
        yield workers
    finally:
        workers.stop()


@pytest.fixture
def real_fleet(real_worker: "RealWorkers") -> str:
    """Return the fleet of the shared vLLM worker, which serves; a dead worker is replaced first."""
    asyncio.run(real_worker.have(1))
    return real_worker.fleet


@pytest.fixture(scope="session")
def real_workers(nats_url: str, tiny_moes: tuple[Path, Path]) -> Iterator["RealWorkers"]:
    """Run the fleet whose workers tests start, update and kill; it starts with the second tiny MoE as version 1."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moes[1], version=1)
    try:
        yield workers
    finally:
        workers.stop()
