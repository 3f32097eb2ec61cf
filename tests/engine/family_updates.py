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

from tests.engine.tiny_families import FAMILIES, HALF, make_family
from tests.support.checkpoints import make_tiny_lora

PROMPT = np.random.default_rng(5).integers(3, 500, 40).tolist()
NUM_TOKENS = 8
WITH_ADAPTERS = "llama-tied-biases"


def main(folder: Path) -> None:
    """Run all families."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm.model_executor.models import registry

    # vLLM inspects the class of each family in a new process, which takes eight seconds.
    registry._run_in_subprocess = lambda inspect: inspect()
    models = {
        (family, version): make_family(folder / family / str(version), family, seed=version)
        for family in FAMILIES
        for version in (0, 1)
    }
    results: dict[str, Any] = {}
    for family in FAMILIES:
        with engine(models[family, 0], dtype="bfloat16" if family in HALF else "float32") as llm:
            results[family] = update(llm, models[family, 0], models[family, 1])
            if family in FAULTS:
                results[family]["faults"] = plant_faults(llm, family, models[family, 0], models[family, 1])
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


def plant_faults(llm: Any, family: str, first: Path, second: Path) -> dict[str, Any]:
    """Load `first` with each fault of the family, and then `second` without one."""
    answers = {}
    for name, (planted, *_) in FAULTS[family].items():
        with planted(llm):
            answers[name] = call(llm, "rollbus_load_weights", path=str(first))
            if answers[name]["code"] is None:
                answers[name]["updated"] = difference(generate(llm), first)
        call(llm, "rollbus_load_weights", path=str(second))
    answers["repaired"] = {"updated": difference(generate(llm), second)}
    return answers


def model_of(llm: Any) -> Any:
    """Return vLLM's model."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def find(llm: Any, module: str, attribute: str) -> Any:
    """Return the module, or the first one inside of it, that has the attribute."""
    modules = model_of(llm).get_submodule(module).modules()
    return next(each for each in modules if getattr(each, attribute, None) is not None)


Fault = Callable[[Any], contextlib.AbstractContextManager[None]]
Change = Callable[[torch.Tensor], torch.Tensor]


def spoil(module: str, parameter: str, change: Change) -> Fault:
    """Return a fault: the kernel of a module gets other weights than those that were loaded."""

    @contextlib.contextmanager
    def planted(llm: Any) -> Iterator[None]:
        method = find(llm, module, parameter).quant_method

        def process(layer: Any) -> None:
            weight = getattr(layer, parameter).data
            weight.copy_(change(weight.clone()))
            type(method).process_weights_after_loading(method, layer)

        method.process_weights_after_loading = process
        try:
            yield
        finally:
            vars(method).pop("process_weights_after_loading", None)

    return planted


def spoil_after(module: str, attribute: str, change: Change) -> Fault:
    """Return a fault: after vLLM has processed all modules, a tensor of a module differs."""
    from rollbus.workers.engines.vllm.reload_checks import Probing

    process_sharing = Probing.process_sharing

    @contextlib.contextmanager
    def planted(llm: Any) -> Iterator[None]:

        def process(self: Probing) -> None:
            process_sharing(self)
            # Some copies are views of the weight, which stays right.
            tensor = getattr(find(llm, module, attribute), attribute)
            tensor.data = change(tensor.data.clone())

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Probing, "process_sharing", process)
            yield

    return planted


@contextlib.contextmanager
def keep_packed(llm: Any) -> Iterator[None]:
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
def keep_shared(llm: Any) -> Iterator[None]:
    """Restore vLLM's own behaviour: copies of a weight, as of a tied head, are not updated."""
    from rollbus.workers.engines.vllm.reload_checks import Probing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probing, "process_sharing", lambda _self: None)
        yield


def swap_rows(weight: torch.Tensor) -> torch.Tensor:
    """Swap two rows, or two experts."""
    return weight[[1, 0, *range(2, len(weight))]]


def change_row(weight: torch.Tensor) -> torch.Tensor:
    """Replace one row, of the second expert if there are experts."""
    rows = weight[1] if weight.dim() > 2 else weight
    rows[5] = rows[6]
    return weight


def put_nan(weight: torch.Tensor) -> torch.Tensor:
    """Replace one number by NaN."""
    weight.view(-1)[weight.numel() // 3] = torch.nan
    return weight


def scale(weight: torch.Tensor) -> torch.Tensor:
    """Scale a weight, or that of the second expert."""
    (weight[1] if weight.dim() > 2 else weight).mul_(1.05)
    return weight


def round_off(weight: torch.Tensor) -> torch.Tensor:
    """Round to a type with fewer bits."""
    return weight.to(torch.float16 if weight.dtype is torch.float32 else torch.float8_e4m3fn).to(weight.dtype)


def keep_old(weight: torch.Tensor) -> torch.Tensor:
    """Put other numbers of the same kind in place of the loaded ones."""
    return weight.roll(1, -1)


ATTENTION, MLP, EXPERTS = "model.layers.1.self_attn", "model.layers.1.mlp", "model.layers.0.mlp.experts"
FAULTS: dict[str, dict[str, tuple[Fault, str]]] = {
    "llama-tied-biases": {
        "old packed weight": (keep_packed, f"{ATTENTION}.o_proj"),
        "old tied head": (keep_shared, "lm_head"),
        "one row of a fused weight": (spoil(f"{ATTENTION}.qkv_proj", "weight", change_row), f"{ATTENTION}.qkv_proj"),
        "transposed": (spoil(f"{ATTENTION}.o_proj", "weight", torch.t), f"{ATTENTION}.o_proj"),
        "scaled": (spoil(f"{MLP}.gate_up_proj", "weight", scale), f"{MLP}.gate_up_proj"),
        "NaN": (spoil(f"{MLP}.down_proj", "weight", put_nan), f"{MLP}.down_proj"),
        "wrong dtype": (spoil(f"{MLP}.down_proj", "weight", round_off), f"{MLP}.down_proj"),
        "lost bias": (spoil(f"{ATTENTION}.o_proj", "bias", torch.zeros_like), f"{ATTENTION}.o_proj"),
        "old layer": (spoil("model.embed_tokens", "weight", keep_old), "model.embed_tokens"),
        "old norm": (
            spoil_after("model.layers.1.input_layernorm", "weight", keep_old),
            "model.layers.1.input_layernorm",
        ),
    },
    "qwen3_moe-padded": {
        "old packed weight": (keep_packed, f"{ATTENTION}.o_proj"),
        "swapped experts": (spoil(EXPERTS, "w2_weight", swap_rows), EXPERTS),
        "one row of one expert": (spoil(EXPERTS, "w2_weight", change_row), EXPERTS),
        "one expert scaled": (spoil(EXPERTS, "w13_weight", scale), EXPERTS),
        "NaN in one expert": (spoil(EXPERTS, "w13_weight", put_nan), EXPERTS),
        "wrong dtype": (spoil(EXPERTS, "w13_weight", round_off), EXPERTS),
    },
    "gpt_oss": {
        "swapped experts": (spoil(EXPERTS, "w13_weight", swap_rows), EXPERTS),
        "one row of one expert": (spoil(EXPERTS, "w2_weight", change_row), EXPERTS),
        "old layer": (spoil(EXPERTS, "w2_weight", keep_old), EXPERTS),
        "wrong dtype": (spoil("model.layers.1.attn.o_proj", "weight", round_off), "model.layers.1.attn.o_proj"),
    },
    "falcon_h1": {"old copies": (keep_shared, "model.layers.0.mamba")},
    "deepseek_v2": {
        "old copy": (spoil_after(ATTENTION, "W_UV", keep_old), ATTENTION),
        "old transposed copy": (spoil_after(ATTENTION, "W_UK_T", keep_old), ATTENTION),
        "one copy scaled": (spoil_after(ATTENTION, "W_UV", scale), ATTENTION),
    },
}
"""Faults by family and name, each with the module that the error must name."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
