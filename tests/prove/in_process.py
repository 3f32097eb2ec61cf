"""Prove models of several families in this process, sound ones and ones with faults that were put in on purpose.

    python -m tests.prove.in_process FOLDER CASE...

A case is `FAMILY:FAULT:SEED`. The engine runs the faulty model, and the reference the sound one. The program writes the
outcomes to `FOLDER/outcomes.json`. An engine in this process starts in a second or two.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from rollbus.bus import GenerateRequest
from rollbus.frontend.cli.prove.agreement import judge_agreement
from rollbus.frontend.cli.prove.evidence import Evidence, add_reference, collect
from rollbus.frontend.cli.prove.routing import judge_routing
from rollbus.frontend.cli.prove.stage import Budget, FleetInUse, Proof
from rollbus.schemas.presence import Capabilities, RoutedExpertsInfo, WorkerPresence, WorkerState
from rollbus.schemas.reference import ReferenceJob, ReferenceResult, decode, encode
from tests.engine.family_updates import engine, model_of, reference_process
from tests.engine.tiny_families import HALF, make_family

ROUNDS = int(os.environ.get("ROLLBUS_PROVE_ROUNDS", "2"))


class InProcessClient:
    """The part of a client that collects answers, over vLLM's own `LLM`."""

    def __init__(self, llm: Any, **sampling: Any) -> None:
        self._llm = llm
        self._sampling = sampling
        """Sampling parameters that replace those of all requests: left on by mistake."""

    async def complete_many(self, requests: Sequence[GenerateRequest], *, max_in_flight: int) -> AsyncIterator[Any]:
        """Yield the answers."""
        for start in range(0, len(requests), max_in_flight):
            batch = requests[start : start + max_in_flight]
            for request, output in zip(batch, self._generate(batch), strict=True):
                first, *others = [self._answer(request, output, each) for each in output.outputs]
                first.siblings = tuple(others)
                yield first

    def _generate(self, requests: Sequence[GenerateRequest]) -> list[Any]:
        from vllm import SamplingParams

        params, prompts = [], []
        for request in requests:
            wanted = msgspec.to_builtins(request.sampling)
            params.append(SamplingParams(**{"logprobs": 0, **wanted, **self._sampling}, detokenize=False))
            salt = {} if request.cache_salt is None else {"cache_salt": request.cache_salt}
            prompts.append({"prompt_token_ids": np.asarray(request.prompt_token_ids).tolist(), **salt})
        outputs: list[Any] = self._llm.generate(prompts, params, use_tqdm=False)
        return outputs

    def _answer(self, request: GenerateRequest, output: Any, one: Any) -> SimpleNamespace:
        ids = output.prompt_token_ids
        top = [
            sorted(known.items(), key=lambda each: each[1].rank)[: request.sampling.logprobs] for known in one.logprobs
        ]
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = np.array(
                [known[token].logprob for known, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)], "f4"
            )
        return SimpleNamespace(
            request=request,
            request_id=request.request_id,
            error=None,
            siblings=(),
            prompt_len=len(ids),
            token_ids=np.array(one.token_ids, "i4"),
            logprobs=np.array([known[token].logprob for known, token in zip(one.logprobs, one.token_ids, strict=True)]),
            top_token_ids=np.array([[token for token, _ in known] for known in top], "i4"),
            top_logprobs=np.array([[found.logprob for _, found in known] for known in top], "f4"),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=output.num_cached_tokens,
            weight_versions=np.zeros(1, "i4"),
            start=0,
            routed_experts=None if one.routed_experts is None else np.asarray(one.routed_experts),
        )


def proof_of(llm: Any, folder: Path, scratch: Path, seed: int, /, **sampling: Any) -> Proof:
    """Return a run of the command over the engine."""
    config = llm.llm_engine.model_config
    experts = config.get_num_experts()
    routing = None
    if experts:
        layers, top_k = config.get_total_num_hidden_layers(), int(config.hf_text_config.num_experts_per_tok)
        routing = RoutedExpertsInfo(num_layers=layers, top_k=top_k, num_experts=experts, dtype="u1")
    capabilities = Capabilities(
        engine="vllm",
        engine_version="0.30.0",
        max_model_len=config.max_model_len,
        vocab_size=config.get_vocab_size(),
        max_num_seqs=8,
        max_logprobs=20,
        dtype=str(config.dtype).removeprefix("torch."),
        routed_experts=routing,
        logprobs_mode=str(config.logprobs_mode),
    )
    worker = WorkerPresence(
        worker="w", incarnation="i", model="m", state=WorkerState.SERVING, weight_version=0, in_flight=0, free_slots=8,
        uptime_s=1.0, lease_s=5.0, capabilities=capabilities,
    )  # fmt: skip
    rb: Any = InProcessClient(llm, **sampling)
    return Proof(
        args=argparse.Namespace(seed=seed, reference="hf", dtype=None),
        model="m",
        folder=folder,
        is_own=False,
        scratch=scratch,
        budget=Budget(3600.0, ()),
        shared=FleetInUse(rb=rb, server="", fleet="default", workers=(worker,)),
    )


async def prove(proof: Proof) -> dict[str, Any]:
    """Return the outcomes of both stages."""
    proof.budget.begin(1.0)
    await collect(proof)
    evidence: Evidence = await add_reference(proof)
    outcomes = {"agreement": judge_agreement(evidence, proof.dtype)}
    if proof.fleet.engine.routed_experts is not None:
        outcomes["routing"] = judge_routing(evidence, proof.dtype)
    return {name: {"verdict": outcome.verdict, **msgspec.to_builtins(outcome)} for name, outcome in outcomes.items()}


Tensors = dict[str, Any]
"""Tensors of a checkpoint by name."""


def scale_expert(tensors: Tensors) -> None:
    """Scale the output of one expert of the first layer with experts, as a wrong scale of a quantized kernel does."""
    names = [name for name in tensors if ".experts.1." in name and any(part in name for part in ("down_proj", ".w2."))]
    if names:
        tensors[min(names)].mul_(1.3)
    else:
        # All experts of a layer are one tensor.
        tensors[min(name for name in tensors if name.endswith("experts.down_proj"))][1].mul_(1.3)


def stale_layer(tensors: Tensors) -> None:
    """Leave the last layer at other weights of the same size."""
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    for name, tensor in tensors.items():
        if name.startswith(f"model.layers.{last}.") and tensor.dim() > 1 and "self_attn" in name:
            tensor.copy_(tensor.roll(1, -1))


def stale_head(tensors: Tensors) -> None:
    """Leave the head at other weights."""
    head = tensors.get("lm_head.weight")
    if head is None:
        # A tied head that did not get the new embedding.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0).clone()
    else:
        head.copy_(head * 0.8)


CHECKPOINTS: dict[str, Callable[[Tensors], None]] = {
    "scaled-expert": scale_expert,
    "stale-layer": stale_layer,
    "stale-head": stale_head,
}


SAMPLING: dict[str, dict[str, Any]] = {
    "top-p": {"top_p": 0.9},
    "top-p-processed": {"top_p": 0.9},
    "penalty": {"repetition_penalty": 1.2},
    "presence": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {77: 5.0}},
    "seed": {"seed": 7},
}
"""Sampling parameters that the engine applies to all requests, by fault."""


@contextlib.contextmanager
def bfloat16_routers(llm: Any) -> Iterator[None]:
    """Make all routers round their logits to bfloat16."""

    def rounded(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].bfloat16().to(output[0].dtype), *output[1:])
        return output.bfloat16().to(output.dtype)

    hooks = [
        module.register_forward_hook(rounded)
        for name, module in model_of(llm).named_modules()
        if name.endswith((".gate", ".router"))
    ]
    if not hooks:
        raise ValueError("the model has no router")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compute(job: Path, result: Path) -> None:
    """Run a job of the reference in this process."""
    from rollbus.trainer import reference

    reference.main(job, result)


async def run_pooled(job: ReferenceJob, folder: Path) -> ReferenceResult:
    """Run the reference in one process for all cases: an import of transformers takes seconds."""
    paths = folder / "job.msgpack", folder / "result.msgpack"
    paths[0].write_bytes(encode(job))
    await asyncio.wrap_future(reference_process().submit(compute, *paths))
    return decode(paths[1].read_bytes(), ReferenceResult)


def run_case(folder: Path, family: str, fault: str, seed: int) -> dict[str, Any]:
    """Prove one model."""
    sound = folder / f"{family}-{seed}"
    if not sound.exists():
        make_family(sound, family, seed=seed)
    served = sound
    if fault in CHECKPOINTS:
        served = change_checkpoint(sound, folder / f"{family}-{seed}-{fault}", CHECKPOINTS[fault])
    if fault == "stale-kv":
        served = folder / f"{family}-{seed + 1000}"
        make_family(served, family, seed=seed + 1000)
    has_experts = any(name in json.loads((sound / "config.json").read_text()) for name in EXPERTS)
    settings: dict[str, Any] = {
        "logprobs_mode": "processed_logprobs" if fault == "top-p-processed" else "raw_logprobs",
        "enable_prefix_caching": True,
        "block_size": 32,
        **({"enable_return_routed_experts": True} if has_experts else {}),
    }
    with engine(served, dtype="bfloat16" if family in HALF else "float32", **settings) as llm:
        if fault == "stale-kv":
            warm = proof_of(llm, sound, folder, seed)
            warm.budget.begin(1.0)
            asyncio.run(collect(warm))
            llm.collective_rpc("rollbus_load_weights", kwargs={"path": str(sound)})
        proof = proof_of(llm, sound, folder, seed, **SAMPLING.get(fault, {}))
        with bfloat16_routers(llm) if fault == "bf16-routers" else contextlib.nullcontext():
            outcomes = asyncio.run(prove(proof))
    return outcomes


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def change_checkpoint(folder: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """Return a copy of a checkpoint with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    if "lm_head.weight" in tensors:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return target


def main(folder: Path, cases: Sequence[str]) -> None:
    """Run the cases and write their outcomes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm.model_executor.models import registry

    from rollbus.frontend.cli.prove import evidence

    evidence.run_reference = run_pooled
    evidence.MAX_ROUNDS = ROUNDS  # type: ignore[misc]
    evidence.LENGTHS = (5, 33, 90)  # type: ignore[misc, assignment]
    # vLLM inspects the class of each family in a new process, which takes eight seconds.
    registry._run_in_subprocess = lambda inspect: inspect()
    outcomes: dict[str, Any] = {}
    for case in cases:
        family, fault, seed = case.split(":")
        outcomes[case] = run_case(folder, family, fault, int(seed))
        (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
