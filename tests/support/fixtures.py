"""Fixtures that any test may use; tests/conftest.py loads them."""

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


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
    from tests.support.connections import opened

    async with opened(url) as connection:
        jetstream = connection.jetstream()
        answer = await connection.request("$JS.API.STREAM.NAMES", f'{{"subject": "rb.v1.{fleet}.>"}}'.encode())
        for stream in json.loads(answer.data)["streams"] or ():
            await jetstream.delete_stream(stream)
        # Answered with an error where no test has made the bucket.
        await connection.request("$JS.API.STREAM.PURGE.KV_rollbus", f'{{"filter": "$KV.rollbus.{fleet}.>"}}'.encode())
        await connection.request(f"$JS.API.STREAM.DELETE.OBJ_rollbus-{fleet}")


@pytest.fixture(scope="session")
def tiny_moe_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny MoE in float32, in which different kernels agree to 1e-4."""
    path = tmp_path_factory.mktemp("models") / "tiny-moe"
    make = [sys.executable, "-m", "workers.engines.vllm.tiny_moe", "--output", str(path), "--dtype", "float32"]
    subprocess.run(make, check=True)
    return path
