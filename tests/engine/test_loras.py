"""LoRA adapters: requests use a loaded adapter exactly, and never a replaced or unloaded one."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollbus.schemas.errors import ControlCode, ControlError, EngineDead, InvalidRequest
from rollbus.schemas.request import GenerateRequest
from rollbus.schemas.sampling import SamplingParams
from rollbus.workers.engines.vllm.engine import VllmEngine
from tests.engine.support import prompt
from tests.support.results import TOLERANCE
from tests.support.tiny_lora import make_tiny_lora, merge_tiny_lora
from tests.support.vllm_engine import Result, RunningEngine

pytestmark = pytest.mark.vllm

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
