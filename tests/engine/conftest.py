"""The engines of these tests: four configurations, started together and shared."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbus.workers.engines.vllm import feed
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.tiny_moe import make_tiny_moe
from tests.support.vllm_engine import Engines, RunningEngine, running_engines

OWN_PROCESS = {"distributed_executor_backend": "mp"}
"""The model runs in its own process, as with several processes. By default it runs in the engine core's process."""
SMALL_CACHE = {"kv_cache_memory_bytes": 1 << 28}
"""Space for 131,072 tokens. vLLM fills it with zeros when an engine starts."""
TIGHT = {
    "dtype": "float32",
    "max_model_len": 512,
    "block_size": 32,
    # 64 blocks of 32 tokens, and chunked prefill: requests are preempted and prefilled in chunks.
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 256,
    # With statistics, the engine core reports preemptions.
    "disable_log_stats": False,
}
LORAS = {
    "dtype": "float32",
    "block_size": 32,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    **SMALL_CACHE,
}
RELOADED = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 2048,
    # Long prompts take many steps.
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "weight_transfer_config": {"backend": "from-file"},
    "worker_extension_cls": "tests.engine.transfer_engine.UserExtension",
    **OWN_PROCESS,
    **SMALL_CACHE,
}
PREEMPTED = 3
"""vLLM's number for the event of a preemption (v1/engine/__init__.py: EngineCoreEventType)."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny checkpoints in float32: `moe` and `moe2` with experts, `dense` and `dense2` without experts."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "moe": make_tiny_moe(folder / "moe", dtype="float32"),
        "moe2": make_tiny_moe(folder / "moe2", dtype="float32", seed=1),
        "dense": make_tiny_moe(folder / "dense", dtype="float32", dense=True),
        "dense2": make_tiny_moe(folder / "dense2", dtype="float32", dense=True, seed=1),
    }


@pytest.fixture(scope="session")
def engines(models: dict[str, Path]) -> Iterator[Engines]:
    """Yield three engines, started together. Fixtures with a wider scope than a test request one here."""
    makers: dict[str, Callable[[], VllmEngine]] = {
        "moe": lambda: VllmEngine(models["moe"], engine_args=TIGHT),
        "dense": lambda: VllmEngine(models["dense"], engine_args=LORAS),
        "reloaded": lambda: VllmEngine(models["moe2"], engine_args=RELOADED),
    }
    with running_engines(makers) as running:
        yield running


@pytest.fixture
def moe(engines: Engines) -> RunningEngine:
    """Return an engine in float32 with little KV cache."""
    return engines.get("moe")


@pytest.fixture
def dense(engines: Engines) -> RunningEngine:
    """Return an engine whose model has no experts, and which accepts adapters."""
    return engines.get("dense")


@pytest.fixture
def reloaded(engines: Engines) -> RunningEngine:
    """Return an engine with the weights of `moe2`, for tests that replace and restore its weights."""
    return engines.get("reloaded")


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the engine's ids of preempted requests, which grows as the `moe` engine reports them."""
    seen: list[str] = []
    read = feed._output

    def spy(output: Any) -> Any:
        seen.extend(output.request_id for event in output.events or () if event.type == PREEMPTED)
        return read(output)

    monkeypatch.setattr(feed, "_output", spy)
    return seen
