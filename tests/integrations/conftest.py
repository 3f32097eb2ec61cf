"""Fixtures of the tests of trainers: workers of a small dense model in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.support.real_fleet import RealWorkers


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32 without experts: sampler and trainer then compute the same."""
    return make_tiny_moe(tmp_path_factory.mktemp("policy") / "policy", dtype="float32", dense=True)


@pytest.fixture
def policy_workers(nats_url: str, policy: Path, tmp_path: Path) -> Iterator[RealWorkers]:
    """VLLM workers of `policy`, in a fleet of their own."""
    workers = RealWorkers(nats_url, policy, version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()
