"""Forward passes of transformers over sampled tokens: `python -m rollbus.trainer.reference JOB RESULT`.

`rollbus prove` runs this program, because only the trainer's side imports torch and transformers. It reads a job and
writes a result (`schemas/reference.py`). An error is one line on stderr and exit code 1.

A model that does not fit the memory of the GPU stays in the memory of the machine, and each layer is moved to the GPU
for its own computation. Without a GPU the model computes on the CPU.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import numpy as np
import torch
import transformers
from torch import Tensor, nn

from ..schemas.options import memory_bytes
from ..schemas.reference import (
    ABOVE,
    MAX_FILE_BYTES,
    MAX_TOKENS,
    RANKS,
    ReferenceJob,
    ReferencePass,
    ReferenceResult,
    ReferenceSequence,
    TokenScores,
    decode,
    encode,
)
from .errors import ReplayError
from .replay import Router, check_rows, find_routers, layer_of_rows, replay

CHUNK: Final = 128
"""Positions whose probabilities over the vocabulary are in memory at once: 80 MB with 150,000 tokens."""
NUM_ROUNDED: Final = 24
"""Sequences that are computed with less precise routers too. They show the cause of a difference, not its size."""
ROOM: Final = 1.15
"""Memory that a model needs, by the size of its weights: activations and the logits of one sequence come on top."""


class ReferenceRefused(ValueError):
    """The reference cannot compute this job. The message has the reason."""


def main(job_path: Path, result_path: Path) -> None:
    """Run the job of a file and write the result to another."""
    if job_path.stat().st_size > MAX_FILE_BYTES:
        raise ReferenceRefused(f"the job is larger than {MAX_FILE_BYTES} bytes")
    job = decode(job_path.read_bytes(), ReferenceJob)
    num_layers = next((each.rows.shape[1] for each in job.sequences if each.rows is not None), 0)
    end = time.monotonic() + job.seconds
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    passes: list[ReferencePass] = []
    layers: list[int] = []
    refusal: str | None = None
    misfit: str | None = None
    facts = _check_checkpoint(job.folder)
    for dtype in job.dtypes:
        if passes and time.monotonic() > end:
            break
        model, device = load(job.folder, dtype, is_needed=not passes)
        if model is None:
            break
        routers: list[Router] = []
        if num_layers and refusal is misfit is None:
            try:
                routers = find_routers(model)
            except ReplayError as exc:
                refusal = str(exc)
        if routers:
            try:
                layers = layer_of_rows(routers, num_layers)
                for sequence in job.sequences:
                    if sequence.rows is not None:
                        check_rows(torch.from_numpy(sequence.rows.copy())[None], routers)
            except ReplayError as exc:
                routers, misfit = [], str(exc)
        scores: list[TokenScores] = []
        for number, sequence in enumerate(job.sequences):
            if scores and time.monotonic() > end:
                break
            rounds = number < NUM_ROUNDED and not passes
            scores.append(score(model, sequence, routers, layers, rounds=rounds))
        passes.append(ReferencePass(dtype=dtype, device=device, sequences=scores))
        del model
        # Memory that PyTorch keeps counts as used when the next model is placed.
        torch.cuda.empty_cache()
    result = ReferenceResult(
        release=transformers.__version__,
        passes=passes,
        layers=layers if misfit is None else [],
        routing_refusal=refusal,
        misfit=misfit,
        facts=facts,
    )
    result_path.write_bytes(encode(result))


def _check_checkpoint(folder: str) -> dict[str, str]:
    """Return facts of the configuration that explain differences.

    Raises:
        ReferenceRefused: the weights are quantized.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ReferenceRefused(f"the checkpoint is quantized ({method}): transformers would compute with other kernels")
    text = config.get_text_config()
    names = ("tie_word_embeddings", "norm_topk_prob", "scoring_func", "final_logit_softcapping", "sliding_window")
    return {name: str(getattr(text, name)) for name in names if getattr(text, name, None) is not None}


def load(folder: str, dtype: str, *, is_needed: bool) -> tuple[Any, str]:
    """Return the model and its device, or (None, "") if it does not fit and is not needed.

    Raises:
        ReferenceRefused: it fits neither a GPU nor the memory of the machine, and is needed.
    """
    width = 4 if dtype == "float32" else 2
    num_bytes = ROOM * width * _num_parameters(folder)
    free = memory_bytes() or 0
    on_gpu = torch.cuda.is_available()
    fits_gpu = on_gpu and torch.cuda.mem_get_info()[0] > num_bytes
    if not fits_gpu and free < num_bytes:
        if is_needed:
            raise ReferenceRefused(
                f"the model needs {num_bytes / 1e9:.0f} GB in {dtype}, and this machine has {free / 1e9:.0f} GB free"
            )
        return None, ""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    if fits_gpu:
        return model.to("cuda"), torch.cuda.get_device_name()
    if not on_gpu:
        return model, "CPU"
    offload(model, "cuda")
    return model, f"{torch.cuda.get_device_name()}, layer by layer"


def _num_parameters(folder: str) -> int:
    """Return the number of parameters that the checkpoint has."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters())


def offload(model: nn.Module, device: str) -> None:
    """Keep the layers in the memory of the machine, and move each to the device while it computes."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()))
    inside = {id(parameter) for parameter in layers.parameters()}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in inside:
                tensor.data = tensor.data.to(device)
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, _: module.to(device) and None)
        layer.register_forward_hook(lambda module, _, __: module.to("cpu") and None)


def score(
    model: Any, sequence: ReferenceSequence, routers: Sequence[Router], layers: Sequence[int], *, rounds: bool
) -> TokenScores:
    """Return what the model computes for one sequence.

    Args:
        layers: index in the rows of each router's layer.
        rounds: also compute with less precise routers, for `TokenScores.rounded`.

    Raises:
        ReferenceRefused: the sequence has no or too many tokens, or its rows do not fit it.
    """
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
    if not 1 < len(ids) <= MAX_TOKENS or int(ids.min()) < 0:
        raise ReferenceRefused(f"a sequence has {len(ids)} tokens; allowed: 2 to {MAX_TOKENS}, with ids from 0")
    device = model.get_input_embeddings().weight.device
    inputs, targets = ids[None, :-1].to(device), ids[1:].to(device)

    def forward() -> Tensor:
        return cast(Tensor, model(input_ids=inputs, use_cache=False).logits[0])

    with torch.no_grad():
        if not routers or sequence.rows is None:
            return TokenScores(**_scores(forward(), targets))
        if len(sequence.rows) != len(ids) - 1:
            raise ReferenceRefused(f"a sequence of {len(ids)} tokens has {len(sequence.rows)} rows")
        rows = torch.from_numpy(sequence.rows.copy())
        with watching(routers) as seen:
            fields = _scores(forward(), targets)
        fields["misses"] = _misses(routers, seen, rows, layers)
        with replay(model, rows[None].to(device)):
            with watching(routers) as seen:
                fields["replayed"] = _chosen(forward(), targets)
            fields["others"] = _misses(routers, seen, rows, layers)
            rounded = []
            for computes in (False, True) if rounds else ():
                with rounding(routers, computes=computes):
                    rounded.append(_chosen(forward(), targets))
        return TokenScores(**fields, rounded=rounded)


@contextmanager
def rounding(routers: Sequence[Router], *, computes: bool) -> Iterator[None]:
    """Make routers less precise: they round their logits to bfloat16, or also compute them in it."""

    def watch(router: Router) -> Any:
        def hook(module: nn.Module, args: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, ids = output
            if computes:
                inputs = args[0].reshape(len(logits), -1).bfloat16()
                bias = cast(Tensor | None, getattr(module, "bias", None))
                weight = cast(Tensor, module.weight).bfloat16()
                logits = nn.functional.linear(inputs, weight, None if bias is None else bias.bfloat16())
            rounded = logits.bfloat16().to(output[0].dtype)
            return rounded, router.formula.weights(module, rounded, ids).to(weights.dtype), ids

        return hook

    with ExitStack() as hooks:
        for router in routers:
            hooks.callback(router.module.register_forward_hook(watch(router)).remove)
        yield


def _chosen(logits: Any, targets: Any) -> Any:
    parts = zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.cat([part.float().log_softmax(-1).gather(-1, ids[:, None]) for part, ids in parts])[:, 0].cpu().numpy()


def _scores(logits: Tensor, targets: Tensor) -> dict[str, Any]:
    parts: dict[str, list[Tensor]] = {}
    for start in range(0, len(targets), CHUNK):
        logprobs = logits[start : start + CHUNK].float().log_softmax(-1)
        chosen = logprobs.gather(-1, targets[start : start + CHUNK, None])
        more_likely = logprobs > chosen
        best, _ = logprobs.sort(dim=-1, descending=True)
        probabilities = best.exp()
        above = probabilities.cumsum(-1) - probabilities
        found = {
            "logprobs": chosen[:, 0],
            "ranks": more_likely.sum(-1),
            "above": (logprobs.exp() * more_likely).sum(-1),
            "above_tail": torch.stack([(probabilities * (above >= limit)).sum(-1) for limit in ABOVE], -1),
            "rank_tail": torch.stack([probabilities[:, rank:].sum(-1) for rank in RANKS], -1),
        }
        for name, tensor in found.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors).cpu().numpy() for name, tensors in parts.items()}


@contextmanager
def watching(routers: Sequence[Router]) -> Iterator[list[Tensor]]:
    """Yield the choice of each router as scores f[N, experts], in which the largest are chosen, after a forward pass.

    The scores are those by which a router chooses: logits, or sigmoids with the correction of its bias.
    """
    seen: list[Tensor] = [torch.empty(0)] * len(routers)

    def watch(i: int) -> Any:
        def hook(_module: nn.Module, args: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
            bias = next((arg for arg in args[1:] if isinstance(arg, Tensor)), None)
            seen[i] = choice_scores(routers[i], output[0].float(), bias)

        return hook

    with ExitStack() as hooks:
        for i, router in enumerate(routers):
            hooks.callback(router.module.register_forward_hook(watch(i)).remove)
        yield seen


def choice_scores(router: Router, logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scores f[N, experts] by which a router chooses, on the scale of its logits where they are equal."""
    if router.formula.scores != "sigmoid":
        return logits
    bias = getattr(router.module, "e_score_correction_bias", bias)
    scores = logits.sigmoid()
    return scores if bias is None else scores + bias.float()


def _misses(routers: Sequence[Router], seen: Sequence[Tensor], rows: Tensor, layers: Sequence[int]) -> Any:
    by_layer = zip(routers, seen, layers, strict=True)
    return torch.stack([misses_of(router, scores.cpu(), rows[:, i]) for router, scores, i in by_layer], -1).numpy()


def misses_of(router: Router, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return by how much `chosen` i[N, K] misses the best set of the scores f[N, experts], f[N]; 0 for the best set.

    With groups, a router first chooses groups and then experts of these groups. Then the larger miss of both counts.
    A sigmoid is flat at its ends, so a difference of sigmoids is divided by their slope.
    """
    chosen = chosen.long()
    count = getattr(router.module, "num_group", None) or 1
    method = getattr(router.module, "topk_method", "groups")
    miss = torch.zeros(len(scores))
    if count > 1 and method != "greedy":
        size = scores.shape[1] // count
        grouped = scores.view(-1, count, size)
        by_group = grouped.topk(2, -1)[0].sum(-1) if router.formula.scores == "sigmoid" else grouped.amax(-1)
        kept = cast(int, router.module.topk_group)
        is_used = torch.zeros_like(by_group, dtype=torch.bool).scatter_(1, chosen // size, True)
        # Groups that the engine used come first, then the best of the others.
        best = torch.where(is_used, by_group + 1e6, by_group).topk(kept, -1).indices
        is_kept = torch.zeros_like(is_used).scatter_(1, best, True)
        threshold = by_group.topk(kept, -1)[0][:, -1]
        worst = torch.where(is_kept, by_group, torch.inf).amin(-1)
        miss = torch.clamp(threshold - worst, min=0) / 2
        scores = torch.where(is_kept.repeat_interleave(size, 1), scores, -torch.inf)
    threshold = scores.topk(chosen.shape[1], -1)[0][:, -1]
    picked = scores.gather(1, chosen)
    miss = torch.maximum(miss, torch.clamp(threshold - picked.amin(-1), min=0))
    if router.formula.scores == "sigmoid":
        miss = miss / SLOPE
    # An expert outside of all groups has no score.
    return miss.nan_to_num(posinf=1e9)


SLOPE: Final = 0.25
"""Largest slope of a sigmoid."""


def run() -> int:
    """Run the program and return its exit code."""
    try:
        main(*(Path(text) for text in sys.argv[1:3]))
    except (ReferenceRefused, ReplayError, msgspec.MsgspecError, OSError, ValueError, KeyError, ImportError) as exc:
        # Errors of transformers for a checkpoint that it does not know are some of these.
        sys.stderr.write(f"{str(exc).strip().partition(chr(10))[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
