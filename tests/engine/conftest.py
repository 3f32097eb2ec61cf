"""The engines of these tests: three configurations, started together and shared."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_engine import RunningEngine, running_engines
from workers.engines.vllm import VllmEngine
from workers.engines.vllm.tiny_moe import make_tiny_moe

TIGHT = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    # 64 blocks of 32 tokens, and prompts computed in parts: requests are preempted and prefilled in chunks.
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 256,
    # So that the engine core tells of preemptions.
    "disable_log_stats": False,
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny checkpoints: `moe`, and `dense` without experts, both in float32."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "moe": make_tiny_moe(folder / "moe", dtype="float32"),
        "dense": make_tiny_moe(folder / "dense", dtype="float32", dense=True),
    }


@pytest.fixture(scope="session")
def engines(models: dict[str, Path]) -> Iterator[list[RunningEngine]]:
    """Three engines on one machine, started at the same time."""

    def make() -> list[VllmEngine]:
        return [
            VllmEngine(models["moe"], engine_args=TIGHT, read="core"),
            VllmEngine(models["dense"], engine_args={"dtype": "float32"}, read="core"),
            VllmEngine(models["moe"], engine_args={"dtype": "float32"}, read="generate"),
        ]

    with running_engines(make) as running:
        yield running


@pytest.fixture(scope="session")
def moe(engines: list[RunningEngine]) -> RunningEngine:
    """Return an engine in float32 with little KV cache, whose step outputs are read."""
    return engines[0]


@pytest.fixture(scope="session")
def dense(engines: list[RunningEngine]) -> RunningEngine:
    """Return an engine whose model has no experts."""
    return engines[1]


@pytest.fixture(scope="session")
def fallback(engines: list[RunningEngine]) -> RunningEngine:
    """Return an engine that is read through `AsyncLLM.generate`."""
    return engines[2]
