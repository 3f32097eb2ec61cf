"""Fixtures that any test may use; tests/conftest.py loads them."""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.fleet import StartServed
    from tests.support.real_fleet import RealWorkers


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """One real NATS server for the whole run; tests keep apart by their fleet's name."""
    # Here, so that tests without a server need not import what starts one.
    from tests.support.nats_server import running_server

    with running_server() as url:
        yield url


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give a fleet's name of this test's own; what the common server has of it is deleted afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    if "nats_url" in request.fixturenames:
        # They set storage aside, of which the server has only so much.
        asyncio.run(_delete_queues(request.getfixturevalue("nats_url"), name))


@pytest.fixture
def one_worker(nats_url: str, fleet: str) -> "StartServed":
    """Starts a worker and a client of it: `async with ... as (rb, worker, engine)`."""
    from tests.support.fleet import served

    return functools.partial(served, nats_url, fleet)


async def _delete_queues(url: str, fleet: str) -> None:
    from rollbus.bus.nats.jetstream import ApiError, ask
    from tests.support.connections import opened

    async with opened(url) as connection:
        for stream in (await ask(connection, "STREAM.NAMES", {"subject": f"rb.v1.{fleet}.>"}))["streams"] or ():
            await ask(connection, f"STREAM.DELETE.{stream}")
        with contextlib.suppress(ApiError):  # no test has made the bucket
            await ask(connection, "STREAM.PURGE.KV_rollbus", {"filter": f"$KV.rollbus.{fleet}.>"})
        with contextlib.suppress(ApiError):  # this one has no objects
            await ask(connection, f"STREAM.DELETE.OBJ_rollbus-{fleet}")


@pytest.fixture(scope="session", autouse=True)
def patient_pings() -> Iterator[None]:
    """Clients of this process wait for workers' answers to a ping as patiently as tests wait for anything."""
    from rollbus.bus.client import presence_watcher
    from tests.support.patience import patient

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(presence_watcher, "PING_WAIT_S", patient(presence_watcher.PING_WAIT_S))
        yield


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of this process wait for prefill workers and direct workers until these answer, and have a long lease.

    On a busy machine that takes longer than a client should wait, and another worker does the work. A server that does
    not get to its disk for seconds hears of no client meanwhile.
    """
    from rollbus.bus.client import runtime
    from rollbus.bus.protocol.attempt import machine
    from tests.support.patience import SOON_S, UNHURRIED_LEASE_S

    monkeypatch.setattr(runtime, "LEASE_S", UNHURRIED_LEASE_S)
    monkeypatch.setattr(machine, "HAND_OVER_S", SOON_S)
    monkeypatch.setattr(machine, "PREFILL_WAIT_S", SOON_S)


@pytest.fixture(scope="session")
def tiny_moes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two tiny MoEs in float32, in which different kernels agree to 1e-4, with different weights."""
    from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe

    folder = tmp_path_factory.mktemp("models")
    first, second = (make_tiny_moe(folder / f"tiny-moe-{seed}", dtype="float32", seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def tiny_moe_float32(tiny_moes: tuple[Path, Path]) -> Path:
    """The first of them."""
    return tiny_moes[0]


@pytest.fixture(scope="session")
def real_worker(nats_url: str, tiny_moe_float32: Path) -> Iterator["RealWorkers"]:
    """One vLLM worker process for all tests that only send it requests."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moe_float32)
    try:
        yield workers
    finally:
        workers.stop()


@pytest.fixture
def real_fleet(real_worker: "RealWorkers") -> str:
    """The fleet of that worker, which serves: another one if it has died."""
    asyncio.run(real_worker.have(1))
    return real_worker.fleet


@pytest.fixture(scope="session")
def real_workers(nats_url: str, tiny_moes: tuple[Path, Path]) -> Iterator["RealWorkers"]:
    """Give a fleet whose workers tests start, update and kill. They start with the second tiny MoE, as version 1."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moes[1], version=1)
    try:
        yield workers
    finally:
        workers.stop()
