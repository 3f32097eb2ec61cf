"""After its weights are replaced, an engine equals one that started with them, or it reports a failure."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.stream.engine_step import RequestStep
from rollbus.schemas.errors import ControlCode, ControlError, EngineDead, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.engine import VllmEngine
from tests.engine.support import prompt, rows_here
from tests.support.checkpoints import make_tiny_lora, merge_tiny_lora
from tests.support.requests import TOLERANCE, expert_sets
from tests.support.vllm_engine import Engines, Result, RunningEngine

pytestmark = pytest.mark.vllm


REQUESTS = [
    GenerateRequest(
        prompt_token_ids=prompt(60, seed=700 + number),
        sampling=SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True),
    )
    for number in range(4)
]
LONG = replace(REQUESTS[0], sampling=SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))


@pytest.fixture(scope="session")
def fresh(engines: Engines) -> dict[str, list[Result]]:
    """Return the results of `REQUESTS` from engines that have only their start weights."""
    return {"moe": engines.get("moe").generate(*REQUESTS), "moe2": engines.get("reloaded").generate(*REQUESTS)}


def run(running: RunningEngine, call: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """Call a method of the engine, which must return without a reader of its steps."""
    return running.call(call(*arguments))


def refused(running: RunningEngine, call: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> ControlError:
    """Return the error with which the engine rejects a call."""
    with pytest.raises(ControlError) as caught:
        run(running, call, *arguments)
    return caught.value


def is_same(results: list[Result], expected: list[Result]) -> bool:
    """Return True if tokens and expert sets are equal, and log probabilities are equal within the tolerance."""
    return all(
        mine.token_ids == theirs.token_ids
        and bool(np.abs(mine.logprobs - theirs.logprobs).max() < TOLERANCE)
        and np.array_equal(expert_sets(mine.rows), expert_sets(theirs.rows))
        for mine, theirs in zip(results, expected, strict=True)
    )


def where(running: RunningEngine) -> set[str]:
    """Return the model's folder in the worker processes, from the user's own extension, and in this process."""
    llm = running.engine._launch.llm
    return {*run(running, llm.collective_rpc, "user_says"), llm.vllm_config.model_config.model}


def changed_copy(model: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a checkpoint with changed tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.proves("P19")
def test_loaded_weights_are_those_of_a_fresh_engine(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path]
) -> None:
    """Loading other weights, the same again, and the first ones gives the results of engines that started with them."""
    load = reloaded.engine.load_weights
    assert not is_same(fresh["moe"], fresh["moe2"])

    for name in ("moe", "moe", "moe2"):
        run(reloaded, load, models[name])

        assert is_same(reloaded.generate(*REQUESTS), fresh[name])
        assert where(reloaded) == {str(models[name])}


def test_the_reload_of_vllm_alone_gives_other_results(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path]
) -> None:
    """The reload of vLLM reports success but computes other results, so the worker's reload does more."""
    llm = reloaded.engine._launch.llm
    run(reloaded, llm.collective_rpc, "reload_weights", None, (), {"weights_path": str(models["moe"])})

    unmended = reloaded.generate(*(replace(request, cache_salt="unmended") for request in REQUESTS))
    run(reloaded, reloaded.engine.load_weights, models["moe2"])

    assert not is_same(unmended, fresh["moe"])
    assert is_same(reloaded.generate(*REQUESTS), fresh["moe2"])


def test_paused_streams_resume_with_new_weights(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path]
) -> None:
    """Paused streams resume with new weights. Prefixes cached under the old weights are not found, without a flush."""

    async def scenario() -> tuple[list[Result], list[int | None], list[Result]]:
        engine = reloaded.engine
        before = await reloaded.finish(cached := await reloaded.add(REQUESTS[0]))
        before |= await reloaded.finish(again := await reloaded.add(REQUESTS[0]))
        keys = [await reloaded.add(LONG) for _ in range(3)]
        results = {key: Result() for key in keys}
        pause: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as group:
            while not all(result.steps and result.last.finish_reason for result in results.values()):
                if pause is None and all(len(result.steps) > 3 for result in results.values()):
                    pause = group.create_task(change())
                for step in await reloaded.next():
                    results[step.key].steps.append(step)
        after = await reloaded.finish(new := await reloaded.add(REQUESTS[0]))
        await engine.load_weights(models["moe2"])
        cached_tokens = [(before | after)[key].steps[0].cached_tokens for key in (cached, again, new)]
        return [results[key] for key in keys], cached_tokens, [after[new]]

    async def change() -> None:
        await reloaded.engine.pause()
        await reloaded.engine.load_weights(models["moe"])
        await reloaded.engine.resume()

    streams, cached_tokens, after = reloaded.call(scenario())

    assert [len(stream.token_ids) for stream in streams] == [300] * 3
    assert [len(stream.rows) for stream in streams] == [rows_here(60 + 299)] * 3
    assert cached_tokens[1:] == [32, 0]
    assert is_same(after, fresh["moe"][:1])


def test_an_incomplete_checkpoint_fails_and_a_good_checkpoint_repairs_the_weights(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path], tmp_path: Path
) -> None:
    """A checkpoint that lacks a tensor or does not fit leaves half-written weights. A good checkpoint repairs them."""

    def lacks_norm(tensors: dict[str, Any]) -> None:
        del tensors["model.norm.weight"]

    def does_not_fit(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.self_attn.k_proj.weight"] = tensors["model.layers.2.self_attn.k_proj.weight"][:32]

    load = reloaded.engine.load_weights
    for number, (change, message) in enumerate(((lacks_norm, "model.norm.weight"), (does_not_fit, ""))):
        error = refused(reloaded, load, changed_copy(models["moe"], tmp_path / str(number), change))

        assert error.code is ControlCode.HALF_WRITTEN
        assert message in error.message
        assert where(reloaded) == {str(models["moe2"])}
    run(reloaded, load, models["moe"])
    assert is_same(reloaded.generate(*REQUESTS), fresh["moe"])
    run(reloaded, load, models["moe2"])


def test_nan_of_a_broken_checkpoint_does_not_stay_in_the_kv_cache(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path], tmp_path: Path
) -> None:
    """After the next load, no request finds the NaN that a broken checkpoint has left in the KV cache."""

    def diverged(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"][:] = float("nan")

    run(reloaded, reloaded.engine.load_weights, changed_copy(models["moe"], tmp_path / "nan", diverged))
    failed = reloaded.generate(*REQUESTS)
    run(reloaded, reloaded.engine.load_weights, models["moe2"])

    assert [result.last.error for result in failed] == ["the engine computed NaN as a log probability"] * 4
    assert is_same(reloaded.generate(*REQUESTS), fresh["moe2"])


def test_an_unreadable_checkpoint_does_not_change_the_weights(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path], tmp_path: Path
) -> None:
    """A truncated file and an empty folder are rejected, and the weights do not change."""
    truncated = shutil.copytree(models["moe"], tmp_path / "truncated")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[:-100])
    (tmp_path / "empty").mkdir()

    for folder in (truncated, tmp_path / "empty", tmp_path / "nothing"):
        assert refused(reloaded, reloaded.engine.load_weights, folder).code is ControlCode.ENGINE_ERROR

    assert is_same(reloaded.generate(*REQUESTS), fresh["moe2"])


def test_transferred_weights_are_those_of_a_fresh_engine(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path]
) -> None:
    """Weights that arrive in parts through vLLM's transfer engine give the results of an engine started with them."""
    engine = reloaded.engine

    async def transfer(model: str) -> None:
        await engine.init_weight_transfer({"file": str(models[model] / "model.safetensors")})
        await engine.start_weight_update()
        for remainder in range(3):
            await engine.update_weight_chunk({"remainder": remainder, "of": 3})
        await engine.finish_weight_update()

    for name in ("moe", "moe2"):
        run(reloaded, transfer, name)

        assert is_same(reloaded.generate(*REQUESTS), fresh[name])


def test_an_incomplete_transfer_fails_and_a_later_load_repairs_the_weights(
    reloaded: RunningEngine, fresh: dict[str, list[Result]], models: dict[str, Path]
) -> None:
    """Parts before the start are rejected, and a part that fails ends the update.

    A later load cleans up after an incomplete transfer.
    """
    engine = reloaded.engine
    part = {"remainder": 0, "of": 2}
    run(reloaded, engine.init_weight_transfer, {"file": str(models["moe"] / "model.safetensors")})

    assert refused(reloaded, engine.update_weight_chunk, part).code is ControlCode.ENGINE_ERROR
    assert refused(reloaded, engine.finish_weight_update).code is ControlCode.ENGINE_ERROR
    run(reloaded, engine.start_weight_update)
    run(reloaded, engine.update_weight_chunk, part)
    error = refused(reloaded, engine.update_weight_chunk, {"unknown": 1})
    assert error.code is ControlCode.HALF_WRITTEN
    assert "unknown" in error.message
    assert refused(reloaded, engine.finish_weight_update).code is ControlCode.ENGINE_ERROR
    assert refused(reloaded, engine.init_weight_transfer, {"unknown": 1}).code is ControlCode.ENGINE_ERROR
    # The transfer stops without an error: the next load finds layers that wait for the rest.
    run(reloaded, engine.start_weight_update)
    run(reloaded, engine.update_weight_chunk, part)
    run(reloaded, engine.load_weights, models["moe2"])
    assert is_same(reloaded.generate(*REQUESTS), fresh["moe2"])
    # The same after the end of a transfer whose sender is gone, and without an open transfer.
    run(reloaded, engine.start_weight_update)
    run(reloaded, engine.update_weight_chunk, part)
    for _ in range(2):
        run(reloaded, engine.abandon_weight_update)
    assert refused(reloaded, engine.update_weight_chunk, part).code is ControlCode.ENGINE_ERROR
    run(reloaded, engine.load_weights, models["moe"])
    assert is_same(reloaded.generate(*REQUESTS), fresh["moe"])


def test_the_workers_own_request_runs_beside_a_full_batch(reloaded: RunningEngine) -> None:
    """Beside `max_num_seqs` requests, one more runs immediately. Of two more requests, one waits."""
    assert reloaded.engine.capabilities.max_num_seqs == 4

    async def scenario() -> tuple[set[str], dict[str, Result]]:
        batch = [await reloaded.add(replace(LONG, cache_salt=str(number))) for number in range(4)]
        own = await reloaded.add(REQUESTS[1])
        waits = await reloaded.add(replace(REQUESTS[2], cache_salt="waits"))
        results = {key: Result() for key in (*batch, own, waits)}
        beside: set[str] = set()
        while not all(result.steps and result.last.finish_reason for result in results.values()):
            for step in await reloaded.next():
                if step.key == waits and not results[waits].steps:
                    beside = {key for key, result in results.items() if result.steps and not result.last.finish_reason}
                results[step.key].steps.append(step)
        return beside, {"own": results[own], "batch": results[batch[0]]}

    beside, results = reloaded.call(scenario())

    assert len(beside) <= 4
    assert results["own"].last.finish_reason is not None
    assert len(beside) == 4


def test_the_workers_own_request_does_not_wait_for_the_kv_of_others(moe: RunningEngine) -> None:
    """A request of the worker runs before those that wait until others end and free their KV."""
    long = replace(LONG, sampling=replace(LONG.sampling, max_tokens=30), cache_salt="held")

    async def scenario() -> set[str]:
        # The cache has room for four of the prompts.
        keys = [await moe.add(replace(long, prompt_token_ids=prompt(480, seed=number))) for number in range(8)]
        await moe.engine.add("/own/1", replace(REQUESTS[1], sampling=replace(LONG.sampling, max_tokens=2)))
        seen: dict[str, RequestStep] = {}
        while "/own/1" not in seen or seen["/own/1"].finish_reason is None:
            seen |= {step.key: step for step in await moe.next()}
        return seen.keys() & set(keys[5:])

    assert moe.call(scenario(), timeout_s=60.0) == set()


def test_calls_of_features_outside_of_the_capabilities_are_rejected(
    moe: RunningEngine, reloaded: RunningEngine
) -> None:
    """Capabilities state the features of this engine and machine, and calls of other features are rejected."""
    capabilities = reloaded.engine.capabilities
    assert capabilities.weight_updates
    assert capabilities.weight_transfer
    assert not moe.engine.capabilities.weight_transfer
    assert (capabilities.max_loras, capabilities.sleep, capabilities.data_parallel_size) == (0, False, 1)
    assert capabilities.signature == moe.engine.capabilities.signature
    assert "float32" in capabilities.signature

    for call, arguments in (
        (moe.engine.start_weight_update, ()),
        (moe.engine.init_weight_transfer, ({},)),
        (moe.engine.load_lora, ("a", Path("a"), 1)),
        (moe.engine.sleep, (1,)),
        (moe.engine.wake, ()),
    ):
        assert refused(moe, call, *arguments).code is ControlCode.UNSUPPORTED


# LoRA adapters: requests use a loaded adapter exactly, and never a replaced or unloaded one.


PROMPT = prompt(70, seed=900)
BASE = GenerateRequest(
    prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=16, temperature=0.0, logprobs=0, ignore_eos=True)
)


@pytest.fixture(scope="session")
def adapters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return three adapters for the model `dense`."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_tiny_lora(folder / name, models["dense"], seed=seed) for seed, name in enumerate(("a", "b", "c"))
    }


def expected(model: Path, adapter: Path | None, result: Result) -> tuple[list[int], np.ndarray]:
    """Return the tokens that transformers samples at each position of `result`, and their log probabilities."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        merge_tiny_lora(reference, adapter)
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *result.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.log_softmax(-1).max(-1)
    return best.indices.tolist(), best.values.numpy()


def is_as_expected(result: Result, model: Path, adapter: Path | None) -> bool:
    """Return True if the tokens are the most likely ones, with the expected log probabilities."""
    token_ids, logprobs = expected(model, adapter, result)
    return result.token_ids == token_ids and bool(np.abs(result.logprobs - logprobs).max() < TOLERANCE)


def unload_all(running: RunningEngine) -> None:
    """Unload all adapters of the engine."""
    for name in dict(running.engine.loras):
        running.call(running.engine.unload_lora(name))


def test_adapter_is_used_swapped_in_place_and_unloaded(
    dense: RunningEngine, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    """A request uses the latest version of the adapter that it names, without the prefix cache of older versions."""
    model, request = models["dense"], replace(BASE, lora="mine")
    engine = dense.engine

    dense.call(engine.load_lora("mine", adapters["a"], 1))
    first, plain = dense.generate(request, BASE)
    (again,) = dense.generate(request)
    assert engine.loras == {"mine": 1}
    dense.call(engine.load_lora("mine", adapters["b"], 2))
    (swapped,) = dense.generate(request)
    assert engine.loras == {"mine": 2}

    assert is_as_expected(first, model, adapters["a"])
    assert is_as_expected(plain, model, None)
    assert is_as_expected(swapped, model, adapters["b"])
    assert [result.steps[0].cached_tokens for result in (first, again, swapped)] == [0, 64, 0]
    dense.call(engine.unload_lora("mine"))
    dense.call(engine.unload_lora("mine"))
    assert engine.loras == {}
    with pytest.raises(InvalidRequest, match="'mine' is not loaded"):
        dense.generate(request)
    assert dense.call(engine._launch.llm.list_loras()) == []


def test_prompt_logprobs_are_refused(dense: RunningEngine) -> None:
    """Prompt log probabilities are rejected early: on a CPU, they would kill an engine that accepts adapters."""
    with pytest.raises(InvalidRequest, match=r"sampling\.prompt_logprobs"):
        dense.generate(replace(BASE, sampling=SamplingParams(max_tokens=1, prompt_logprobs=1)))


def test_load_that_fails_changes_nothing(
    dense: RunningEngine, models: dict[str, Path], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """An adapter that cannot be loaded, or that exceeds the maximum of adapters, changes nothing."""
    engine = dense.engine
    dense.call(engine.load_lora("mine", adapters["a"], 1))
    (tmp_path / "broken").mkdir()
    for file in adapters["b"].iterdir():
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes()[:-1000])

    for name, path in (("mine", tmp_path / "broken"), ("other", tmp_path / "broken"), ("other", tmp_path / "nothing")):
        with pytest.raises(ControlError, match="was not loaded") as caught:
            dense.call(engine.load_lora(name, path, 2))
        assert caught.value.code is ControlCode.ENGINE_ERROR
    assert engine.loras == {"mine": 1}
    assert is_as_expected(dense.generate(replace(BASE, lora="mine"))[0], models["dense"], adapters["a"])

    dense.call(engine.load_lora("other", adapters["b"], 1))
    with pytest.raises(ControlError, match="2 adapters are loaded, the maximum of this engine"):
        dense.call(engine.load_lora("third", adapters["c"], 1))
    assert engine.capabilities.max_loras == 2
    requests = (replace(BASE, lora="mine"), replace(BASE, lora="other"), replace(BASE, cache_salt="none"))
    for result, adapter in zip(dense.generate(*requests), ("a", "b", None), strict=True):
        assert is_as_expected(result, models["dense"], adapters[adapter] if adapter else None)
    unload_all(dense)


def test_new_weights_remove_the_adapters_until_they_are_loaded_again(
    dense: RunningEngine, models: dict[str, Path], adapters: dict[str, Path]
) -> None:
    """New weights remove the adapters. They can be loaded again before the streams that use them resume."""
    engine = dense.engine
    request = replace(BASE, lora="mine")
    long = replace(request, sampling=SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    dense.call(engine.load_lora("mine", adapters["a"], 1))

    async def change() -> None:
        await engine.pause()
        await engine.load_weights(models["dense2"])
        assert engine.loras == {}
        with pytest.raises(InvalidRequest):
            await dense.add(request)
        await engine.load_lora("mine", adapters["c"], 2)
        await engine.resume()

    async def scenario() -> Result:
        await dense.add(long)
        result = Result()
        async with asyncio.TaskGroup() as group:
            while not result.steps or result.last.finish_reason is None:
                result.steps.extend(await dense.next())
                if len(result.steps) == 3:
                    group.create_task(change())
        return result

    assert len(dense.call(scenario()).token_ids) == 200
    with_adapter, plain = dense.generate(request, BASE)
    assert is_as_expected(with_adapter, models["dense2"], adapters["c"])
    assert is_as_expected(plain, models["dense2"], None)
    dense.call(engine.load_weights(models["dense"]))
    assert engine.loras == {}
    assert is_as_expected(dense.generate(BASE)[0], models["dense"], None)


async def test_adapters_for_experts_on_a_cpu_are_refused(models: dict[str, Path]) -> None:
    """An engine on a CPU with experts and adapters does not start, because its first request would kill it."""
    engine = VllmEngine(models["moe"], engine_args={"enable_lora": True})

    with pytest.raises(EngineDead, match="does not support adapters for models with experts"):
        await engine.start()
