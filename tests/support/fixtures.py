"""Fixtures that any test may use; tests/conftest.py loads them."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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


async def _delete_queues(url: str, fleet: str) -> None:
    from bus.jetstream import ApiError, ask
    from tests.support.connections import opened

    async with opened(url) as connection:
        for stream in (await ask(connection, "STREAM.NAMES", {"subject": f"rb.v1.{fleet}.>"}))["streams"] or ():
            await ask(connection, f"STREAM.DELETE.{stream}")
        with contextlib.suppress(ApiError):  # no test has made the bucket
            await ask(connection, "STREAM.PURGE.KV_rollbus", {"filter": f"$KV.rollbus.{fleet}.>"})
        with contextlib.suppress(ApiError):  # this one has no objects
            await ask(connection, f"STREAM.DELETE.OBJ_rollbus-{fleet}")


@pytest.fixture(scope="session")
def tiny_moes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make two tiny MoEs in float32, in which different kernels agree to 1e-4, with different weights."""
    from workers.engines.vllm.tiny_moe import make_tiny_moe

    folder = tmp_path_factory.mktemp("models")
    first, second = (make_tiny_moe(folder / f"tiny-moe-{seed}", dtype="float32", seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture(scope="session")
def tiny_moe_float32(tiny_moes: tuple[Path, Path]) -> Path:
    """The first of them."""
    return tiny_moes[0]


@pytest.fixture(scope="session")
def real_fleet(nats_url: str, tiny_moe_float32: Path) -> Iterator[str]:
    """One vLLM worker process for all tests that only send it requests; gives its fleet."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moe_float32)
    try:
        asyncio.run(workers.have(1))
        yield workers.fleet
    finally:
        workers.stop()


@pytest.fixture(scope="session")
def real_workers(nats_url: str, tiny_moes: tuple[Path, Path]) -> Iterator["RealWorkers"]:
    """Give a fleet whose workers tests start, update and kill. They start with the second tiny MoE, as version 1."""
    from tests.support.real_fleet import RealWorkers

    workers = RealWorkers(nats_url, tiny_moes[1], version=1)
    try:
        yield workers
    finally:
        workers.stop()
