"""Fixtures of the trainer tests: workers of small models in float32, and environments from PyPI."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.integrations.environments import FIXTURES, download_source, teach_tool_calls
from tests.support.real_fleet import RealWorkers


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint without experts, so that sampler and trainer compute the same values."""
    return make_tiny_moe(tmp_path_factory.mktemp("policy") / "policy", dtype="float32", dense=True)


@pytest.fixture
def policy_workers(nats_url: str, policy: Path, tmp_path: Path) -> Iterator[RealWorkers]:
    """VLLM workers of `policy` in their own fleet."""
    workers = RealWorkers(nats_url, policy, version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def callers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two float32 checkpoints with experts, whose tokenizer has Qwen3's tokens for tool calls."""
    folder = tmp_path_factory.mktemp("callers")
    first, second = (make_tiny_moe(folder / f"caller-{seed}", dtype="float32", seed=seed) for seed in (0, 1))
    for checkpoint in (first, second):
        teach_tool_calls(checkpoint)
    return first, second


@pytest.fixture(scope="session")
def caller_workers(
    nats_url: str, callers: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealWorkers]:
    """VLLM workers of a fleet that starts with the first of `callers`.

    Tests kill some workers and update all of them.
    """
    workers = RealWorkers(nats_url, callers[0], version=0, cache=tmp_path_factory.mktemp("cache"))
    yield workers
    workers.stop()


@pytest.fixture
def updated_workers(nats_url: str, callers: tuple[Path, Path], tmp_path: Path) -> Iterator[RealWorkers]:
    """VLLM workers with the first of `callers` that only one test uses, which may publish any version."""
    workers = RealWorkers(nats_url, callers[0], version=0, cache=tmp_path / "cache")
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def tool_environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of environments with tools in the source release of verifiers on PyPI."""
    return download_source(tmp_path_factory.mktemp("source")) / FIXTURES
