"""Update one model of each family in vLLM, in this process: `python -m tests.engine.family_updates FOLDER`.

The program writes the results that the tests need to `FOLDER/results.json`. An engine in this process starts in a
second or two; with its own processes it would need fifteen seconds.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_families import FAMILIES, HALF, make_family
from tests.support.tiny_lora import make_tiny_lora

PROMPT = np.random.default_rng(5).integers(3, 500, 40).tolist()
NUM_TOKENS = 8
BROKEN = ("llama-tied-biases", "qwen3_moe-padded")
"""Families whose kernels are broken on purpose."""
WITH_ADAPTERS = "llama-tied-biases"


def main(folder: Path) -> None:
    """Run all families."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    models = {
        (family, version): make_family(folder / family / str(version), family, seed=version)
        for family in FAMILIES
        for version in (0, 1)
    }
    results: dict[str, Any] = {}
    for family in FAMILIES:
        with engine(models[family, 0], dtype="bfloat16" if family in HALF else "float32") as llm:
            results[family] = update(llm, models[family, 0], models[family, 1])
            if family in BROKEN:
                results[family]["broken"] = break_kernels(llm, models[family, 0], models[family, 1])
    adapter = make_tiny_lora(folder / "adapter", models[WITH_ADAPTERS, 0], seed=3)
    with engine(models[WITH_ADAPTERS, 0], enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        call(llm, "rollbus_load_lora", name="adapter", number=1, path=str(adapter))
        results["adapters"] = update(llm, models[WITH_ADAPTERS, 0], models[WITH_ADAPTERS, 1])
    (folder / "results.json").write_text(json.dumps(results))


@contextlib.contextmanager
def engine(model: Path, *, dtype: str = "float32", **settings: Any) -> Iterator[Any]:
    """Yield an engine in this process, and clean up afterwards so that the next engine can start."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(
        str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        kv_cache_memory_bytes=1 << 26,
        worker_extension_cls="rollbus.workers.engines.vllm.extension.WorkerExtension",
        **settings,
    )
    call(llm, "rollbus_correct")
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def call(llm: Any, method: str, **options: Any) -> dict[str, Any]:
    """Call a method of the worker's extension."""
    answer: dict[str, Any] = llm.collective_rpc(method, kwargs=options)[0]
    llm.reset_prefix_cache()
    return answer


def generate(llm: Any) -> dict[str, Any]:
    """Return greedy tokens and their log probabilities."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False, ignore_eos=True)
    output = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0]
    tokens = list(output.token_ids)
    logprobs = [position[token].logprob for position, token in zip(output.logprobs, tokens, strict=True)]
    return {"token_ids": tokens, "logprobs": logprobs}


@functools.cache
def reference_process() -> ProcessPoolExecutor:
    """Return a process without vLLM: vLLM changes classes of transformers, and the reference needs the originals."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def reference_logprobs(model: Path, token_ids: list[int]) -> list[float]:
    """Return the log probabilities that transformers computes with `model` for tokens after the prompt."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    found: list[float] = logits.log_softmax(-1)[range(NUM_TOKENS), token_ids].tolist()
    return found


def difference(made: dict[str, Any], model: Path) -> float:
    """Return the largest difference between the log probabilities and those of transformers with `model`."""
    expected = reference_process().submit(reference_logprobs, model, made["token_ids"]).result()
    return float(np.abs(np.array(made["logprobs"]) - expected).max())


def update(llm: Any, first: Path, second: Path) -> dict[str, Any]:
    """Load `second` into an engine that was started with `first`."""
    before = generate(llm)
    answer = call(llm, "rollbus_load_weights", path=str(second))
    after = generate(llm)
    return {
        "started": difference(before, first),
        "updated": difference(after, second),
        "stale": difference(after, first),
        "answer": answer,
    }


def break_kernels(llm: Any, first: Path, second: Path) -> dict[str, Any]:
    """Load `first` with a wrong kernel for each breakage, and then `second` with correct kernels."""
    answers = {}
    for name, breaking in BREAKAGES.items():
        with breaking(llm):
            answers[name] = call(llm, "rollbus_load_weights", path=str(first))
        call(llm, "rollbus_load_weights", path=str(second))
    answers["repaired"] = {"updated": difference(generate(llm), second)}
    return answers


def model_of(llm: Any) -> Any:
    """Return vLLM's model."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


@contextlib.contextmanager
def keeps_packed(llm: Any) -> Iterator[None]:
    """Make a linear module keep its old packed weight."""
    layer = model_of(llm).get_submodule("model.layers.1.self_attn.o_proj")
    kept, method = layer.cpu_linear, layer.quant_method

    def process(layer: Any) -> None:
        type(method).process_weights_after_loading(method, layer)
        layer.cpu_linear = kept

    method.process_weights_after_loading = process
    try:
        yield
    finally:
        del method.process_weights_after_loading


@contextlib.contextmanager
def swaps_experts(llm: Any) -> Iterator[None]:
    """Make the kernel swap the second matrices of two experts."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    original = cpu_moe.cpu_prepack_moe_weight

    def pack(weight: torch.Tensor, isa: str) -> torch.Tensor:
        if weight.shape[1] > weight.shape[2]:
            weight = weight[[1, 0, *range(2, len(weight))]].contiguous()
        return torch.as_tensor(original(weight, isa))

    cpu_moe.cpu_prepack_moe_weight = pack
    try:
        yield
    finally:
        cpu_moe.cpu_prepack_moe_weight = original


@contextlib.contextmanager
def keeps_head(llm: Any) -> Iterator[None]:
    """Restore vLLM's own behaviour: a head that shares its weight is not processed again."""
    from rollbus.workers.engines.vllm.reload_checks import Probing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probing, "process_sharing", lambda _self: None)
        yield


BREAKAGES: dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]] = {
    "keeps packed": keeps_packed,
    "swaps experts": swaps_experts,
    "keeps head": keeps_head,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
