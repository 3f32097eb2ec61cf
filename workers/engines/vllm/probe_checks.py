"""Compares each kind of module with the tensors that were loaded into it.

Each function creates its probe before the module is used. It returns a function that runs the module's own kernel and
compares the output.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["LinearProbe", "Unknown", "check_latent", "checks_of"]

REDUCED_FLOAT32 = 2.0**-10
"""Relative error of float32 products on devices that may compute them with fewer bits."""


class Unknown(Exception):
    """This code cannot compute the expected output of a module. The message gives the reason."""


class LinearProbe:
    """The probe of all modules that multiply by the same weight. It is computed when the first module needs it.

    Args:
        raw: raw parameters of these modules.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        self._weight, self._bias = raw.get("weight"), raw.get("bias")
        self._probe: Any = None

    def check(self, module: Any) -> Callable[[], str | None]:
        """Return the comparison of one of the modules.

        Raises:
            Unknown: the weight is not a floating-point matrix.
        """
        import torch

        from .probes import linear_probe

        weight, bias = self._weight, self._bias
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            raise Unknown("its weight is not a floating-point matrix")
        if self._probe is None:
            self._probe = linear_probe(weight, bias, weight.dtype, step=_step(weight))
        probe, has_bias = self._probe, bias is not None

        def run() -> str | None:
            apply = module.quant_method.apply
            if not has_bias:
                return probe.difference(apply(module, probe.inputs, None))  # type: ignore[no-any-return]
            plain, others = probe.inputs[: probe.num_plain], probe.inputs[probe.num_plain :]
            outputs = [apply(module, plain, None), apply(module, others, module.bias)]
            return probe.difference(torch.cat(outputs))  # type: ignore[no-any-return]

        return run


def checks_of(
    module: Any, raw: dict[str, Any], absent: dict[str, int], linear: LinearProbe
) -> list[Callable[[], str | None]]:
    """Return the comparisons of a module that has a kernel.

    Args:
        raw: raw parameters of the module.
        absent: number of elements without a value, by parameter.
        linear: probe of the same raw parameters.

    Raises:
        Unknown: the expected output of the module cannot be computed.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    method = module.quant_method
    if any(not name.endswith("bias") for name in absent):
        raise Unknown(f"{sum(absent.values())} of its weights received no values")
    if isinstance(module, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
        return [_check_experts(module, raw)]
    is_plain = isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod))
    if not is_plain or not isinstance(module, (LinearBase, VocabParallelEmbedding)):
        raise Unknown(f"no comparison supports {type(method).__name__}")
    checks = [linear.check(module)]
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        checks.append(_check_embedding(module, raw))
    return checks


def _check_embedding(module: Any, raw: dict[str, Any]) -> Callable[[], str | None]:
    from .probes import embedding_probe

    indices = module.shard_indices
    probe = embedding_probe(raw["weight"], indices.org_vocab_end_index - indices.org_vocab_start_index)
    return lambda: probe.difference(module.quant_method.embedding(module, probe.inputs))


def _check_experts(module: Any, raw: dict[str, Any]) -> Callable[[], str | None]:
    import torch

    from .probes import ACTIVATIONS, Experts, experts_probe, experts_routing

    method = module.quant_method
    activation = ACTIVATIONS.get(module.activation.value)
    if activation is None:
        raise Unknown(f"no comparison supports the activation {module.activation.value}")
    if method.is_monolithic:
        raise Unknown("its kernel selects the experts itself")
    if module.moe_config.moe_parallel_config.use_all2all_kernels:
        raise Unknown("its kernel communicates with other processes")
    if "w13_weight" not in raw or "w2_weight" not in raw:
        raise Unknown("some of its weights were not loaded")
    w13, w2 = raw["w13_weight"], raw["w2_weight"]
    top_k = 1 if module.apply_router_weight_on_input else min(module.top_k, len(w13))
    experts = Experts(w13=w13, w2=w2, w13_bias=raw.get("w13_bias"), w2_bias=raw.get("w2_bias"), activation=activation)
    probe = experts_probe(experts, top_k, w13.dtype, step=_step(w13))
    ids, weights = experts_routing(len(w13), top_k)

    def run() -> str | None:
        local = torch.arange(len(w13)) if module.expert_map is None else _globals(module.expert_map)
        output = method.apply(
            layer=module,
            x=probe.inputs,
            topk_weights=weights.to(probe.inputs.device),
            topk_ids=local[ids].to(probe.inputs.device, method.topk_indices_dtype or torch.int32),
            shared_experts=None,
            shared_experts_input=None,
        )
        return probe.difference(output)

    return run


def _globals(expert_map: Any) -> Any:
    """Return the expert ids in the model for the experts of this process, in their local order."""
    import torch

    here = torch.nonzero(expert_map >= 0).flatten().cpu()
    return here[expert_map.cpu()[here].argsort()]


def check_latent(module: Any, raw: dict[str, Any]) -> Callable[[], str | None]:
    """Return the comparison of latent attention's copies of a projection's weight with the projection's loaded tensor.

    See vLLM's layers/attention/mla_attention.py.

    Raises:
        Unknown: the weight is missing or quantized.
    """
    import torch

    from .probes import head_probes

    weight = raw.get("weight")
    if weight is None or not weight.is_floating_point() or weight.element_size() == 1:
        raise Unknown("the projection whose weight it copies is quantized")
    split = weight.T.reshape(module.kv_lora_rank, module.num_heads, module.qk_nope_head_dim + module.v_head_dim)
    keys, values = split.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    probes = {
        "W_UK_T": head_probes(keys.permute(1, 2, 0), weight.dtype),
        "W_UV": head_probes(values.transpose(0, 1), weight.dtype),
    }

    def run() -> str | None:
        for name, probe in probes.items():
            if not hasattr(module, name):
                raise Unknown("its kernel has separate copies of the weight")
            maps = getattr(module, name).to("cpu", torch.float64)
            difference = probe.difference(torch.bmm(probe.inputs, maps).flatten(0, 1))
            if difference is not None:
                return f"{name} {difference}"
        return None

    return run


def _step(weight: Any) -> float:
    import torch

    return REDUCED_FLOAT32 if weight.dtype is torch.float32 and weight.device.type != "cpu" else 0.0
