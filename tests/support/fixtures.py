"""Fixtures that any test may use; tests/conftest.py loads them."""

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
def fleet() -> str:
    """Return a fleet's name of this test's own."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def tiny_moe_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny MoE in float32, in which different kernels agree to 1e-4."""
    path = tmp_path_factory.mktemp("models") / "tiny-moe"
    make = [sys.executable, "-m", "workers.engines.vllm.tiny_moe", "--output", str(path), "--dtype", "float32"]
    subprocess.run(make, check=True)
    return path
