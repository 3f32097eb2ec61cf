"""An engine that cannot start reports the reason and leaves no process behind."""

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollbus.schemas.errors import EngineDead
from rollbus.workers.engines.vllm import launch as launch_module
from rollbus.workers.engines.vllm.capabilities import describe_engine, find_refusals
from rollbus.workers.engines.vllm.engine import VllmEngine
from rollbus.workers.engines.vllm.processes import Cores

pytestmark = pytest.mark.vllm


def engine_processes() -> set[int]:
    """Return the ids of this process's descendants that belong to an engine, without Python's own processes."""
    children = psutil.Process().children(recursive=True)
    python_runs = {forkserver._forkserver._forkserver_pid}  # type: ignore[attr-defined]
    return {child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())} - python_runs


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"max_modl_len": 5}, r"'max_modl_len' is unknown to vLLM \(did you mean max_model_len\?\)"),
        ({"model": "elsewhere"}, "'model': pass the model separately"),
        ({"logprobs_mode": "raw_logits"}, "allowed: processed_logprobs, raw_logprobs"),
        ({"return_sampling_mask": True}, "sampling distribution replay requires Model Runner V2"),
        ({"max_model_len": "long"}, "max_model_len"),
        ({"block_size": 16}, "'block_size' is 16; allowed on a CPU: multiples of 32"),
        ({"structured_outputs_config": {"backend": "auto"}}, "'structured_outputs_config.backend' is 'auto'"),
        ({"structured_outputs_config": {"bakend": "x"}}, r"'structured_outputs_config.bakend' .* mean backend\?"),
    ],
)
async def test_bad_engine_argument_is_named(models: dict[str, Path], engine_args: dict[str, Any], message: str) -> None:
    """An engine argument that vLLM rejects stops the start, with its name, before any engine process starts."""
    before = engine_processes()
    engine = VllmEngine(models["dense"], engine_args=engine_args)

    with pytest.raises(EngineDead, match=message):
        await engine.start()
    with pytest.raises(EngineDead):
        _ = engine.capabilities
    assert engine_processes() == before


def test_capabilities_follow_the_arguments(models: dict[str, Path]) -> None:
    """Capabilities do not count the slots that the worker adds. Dummy weights cannot be updated."""
    given = {"load_format": "dummy", "max_num_seqs": 7, "enable_lora": True, "max_loras": 3, "max_cpu_loras": 3}
    config = launch_module.engine_arguments(str(models["dense"]), given).create_engine_config()
    config.scheduler_config.max_num_seqs += launch_module.OWN_SLOTS

    capabilities = describe_engine(config)

    assert (capabilities.max_num_seqs, capabilities.max_loras) == (7, 3)
    assert (config.scheduler_config.max_num_seqs, config.lora_config.max_loras) == (8, 4)
    assert (capabilities.max_lora_rank, capabilities.world_size, capabilities.version_labels) == (16, 1, True)
    assert capabilities.weight_deltas
    assert not capabilities.weight_updates
    assert "'dummy'" in str(find_refusals(config).weight_updates)
    config.model_config.model = "organization/name"
    assert "local folder" in str(find_refusals(config).weight_updates)


def test_the_grammar_backend_is_fixed_at_the_start(models: dict[str, Path]) -> None:
    """The backend of structured outputs is xgrammar unless it is set, never the choice of a request, and announced."""
    path = str(models["dense"])
    chosen = {"structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True}}
    default = launch_module.engine_arguments(path, {"reasoning_parser": "qwen3"}).create_engine_config()
    guidance = launch_module.engine_arguments(path, chosen).create_engine_config()

    assert describe_engine(default).grammar_backend == "xgrammar"
    assert default.structured_outputs_config.reasoning_parser == "qwen3"
    assert describe_engine(guidance).grammar_backend == "guidance"
    assert guidance.structured_outputs_config.disable_any_whitespace


def test_the_limits_of_the_newer_model_runner_are_announced(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with vLLM's newer model runner announces the limits of its sampler; another engine has none."""
    config = launch_module.engine_arguments(str(models["dense"]), {}).create_engine_config()
    assert describe_engine(config).sampling_limits is None

    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    limits = describe_engine(config).sampling_limits

    assert (limits.allowed_token_ids, limits.logit_bias) == (1024, 1024)
    assert (limits.bad_words, limits.bad_words_tokens) == (128, 1024)
    # Of 128 ids, the sampler needs some for the end of a sequence.
    assert 120 <= limits.min_tokens_stop_ids < 128


@pytest.mark.parametrize(
    ("placement", "is_on_one_machine"),
    [
        ({"nnodes": 2, "world_size": 2}, False),
        ({"distributed_executor_backend": "ray", "world_size": 2}, False),
        ({"distributed_executor_backend": "ray"}, True),
        ({"distributed_executor_backend": "mp", "world_size": 2}, True),
    ],
)
def test_an_engine_on_several_machines_fetches_no_folders(
    models: dict[str, Path], placement: dict[str, Any], is_on_one_machine: bool
) -> None:
    """An engine fetches folders only if all its processes are on one machine.

    The test only sets fields of the configuration and starts no engine.
    """
    config = launch_module.engine_arguments(str(models["dense"]), {}).create_engine_config()
    for name, value in placement.items():
        setattr(config.parallel_config, name, value)

    assert describe_engine(config).weight_deltas is is_on_one_machine


async def test_replicas_of_experts_are_refused_by_name(models: dict[str, Path]) -> None:
    """An engine with replicas of a model with experts does not start, and the error states the alternative."""
    engine = VllmEngine(models["moe"], engine_args={"data_parallel_size": 2})

    with pytest.raises(EngineDead, match=r"'data_parallel_size' is 2: .* one worker for each replica"):
        await engine.start()
    await engine.close()


async def test_a_missing_model_stops_the_start_with_an_error(tmp_path: Path) -> None:
    """A missing model stops the start with an error. The engine can then be closed twice."""
    engine = VllmEngine(tmp_path / "nothing")

    with pytest.raises(EngineDead, match="nothing"):
        await engine.start()
    await engine.close()
    await engine.close()


@pytest.mark.routing
async def test_a_failed_load_in_the_engine_core_leaves_no_process(models: dict[str, Path]) -> None:
    """An engine core that fails during its load makes the start fail, and no process remains."""
    before = engine_processes()
    # A model without experts cannot return routed experts. vLLM detects this after it has loaded the model.
    engine = VllmEngine(models["dense"], engine_args={"enable_return_routed_experts": True})

    with pytest.raises(EngineDead, match="did not start"):
        await engine.start()
    assert engine_processes() == before


async def test_cancelled_start_leaves_no_process(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the start is cancelled while the engine core starts, no process of it remains."""
    before = engine_processes()
    loop = asyncio.get_running_loop()
    is_coming_up = asyncio.Event()

    class NotifyingCores(Cores):
        """Notifies the test when it is pickled for the engine core's process."""

        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            loop.call_soon_threadsafe(is_coming_up.set)
            return Cores, (self.num_threads, self.bound)

    monkeypatch.setattr(launch_module, "compute_in_core", lambda _args, _config: NotifyingCores(None, ()))
    engine = VllmEngine(models["dense"])

    async with asyncio.TaskGroup() as group:
        start = group.create_task(engine.start())
        await is_coming_up.wait()
        start.cancel()

    assert start.cancelled()
    assert engine_processes() == before
    assert not multiprocessing.active_children() or before
    await engine.close()
