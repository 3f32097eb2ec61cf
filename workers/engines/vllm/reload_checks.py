"""Compares the output of a model's modules after a load with the output that the loaded tensors give.

vLLM arranges a checkpoint's tensors in raw parameters, module by module. From them it derives the data of its kernels:
packed, quantized or copied weights (model_loader/reload/layerwise.py). This data is often not a parameter, so a
comparison of parameters does not verify it.

While vLLM loads, a `Probing` arranges the tensors of each module again, with the same loaders, in separate memory. From
these tensors it computes the expected output of the module; see `probes`. After the load, each module computes its
output for the same input with the kernel that requests use.
"""

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.attention import MLAAttention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise

from ....schemas.checks import list_names
from ....schemas.errors import ForeignError, foreign_code
from ....schemas.weights import Verified
from .probes import (
    ACTIVATIONS,
    difference,
    expect_experts,
    expect_linear,
    expect_maps,
    expert_inputs,
    linear_inputs,
    route_experts,
    spread,
)
from .reload_repairs import UNPACKED, Copies, copy_unpacked, find_copies, loader_of

logger = logging.getLogger(__name__)

REDUCED_FLOAT32 = 2.0**-10
"""Relative error of float32 products on devices that may compute them with fewer bits."""
NUM_IDS = 16
"""Number of compared rows of an embedding."""
NUM_DIMENSIONS = 3
"""Number of dimensions of a convolution's weight: `[channel, 1, width]`."""
WRAPPED = ".base_layer"
"""Suffix of a module's name inside of the wrapper that adds adapters to it."""
PACKED = "cpu_linear"
"""Attribute with the function that multiplies by the module's weight on a CPU. It has a packed copy of the weight."""
MAX_NAMED = 3
"""Maximum number of modules in an error message."""
MAX_REASON_CHARS = 100
PLAIN_METHODS = UnquantizedLinearMethod, UnquantizedEmbeddingMethod

Check = Callable[[], str]
"""Returns a description of how a module differs after a load; an empty string if it does not."""


class Unknown(Exception):
    """This code cannot compute the expected output of a module. The message gives the reason."""


class WrongOutput(Exception):
    """The output of a module differs from the output that its tensors in the checkpoint give."""


@dataclasses.dataclass(slots=True)
class _ProbedLoad:
    """The state of one load."""

    checks: list[tuple[str, Check]] = dataclasses.field(default_factory=list)
    """Module names with a comparison to run after the load."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Differences that were found until now."""
    unprobed: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reason for each module that was not probed, by module name."""
    num_equal: int = 0
    """Number of modules without a kernel whose parameters equal the loaded tensors."""
    loaded: set[Any] = dataclasses.field(default_factory=set)
    """Modules into which tensors were loaded."""
    covered: set[Any] = dataclasses.field(default_factory=set)
    """The loaded modules, and modules that share their weights or derive weights from them."""


class Probing:
    """Probes one model, once for each load.

    Args:
        model: model of vLLM, with loaded weights.
        is_quantized: True if some of its weights are quantized.
    """

    def __init__(self, model: Any, *, is_quantized: bool) -> None:
        self._model = model
        self._is_quantized = is_quantized
        self._original: Any = None
        self._names: dict[Any, str] = {}
        self._sharing: dict[Any, list[Any]] = {}
        self._latent: dict[Any, list[Any]] = {}
        self._convolutions: Copies | None = None
        """Copies of convolution weights, found before the first load, because they may differ after a failed load."""
        self._load = _ProbedLoad()

    def watch(self) -> None:
        """Compute the expected outputs of all modules that vLLM loads from now on, until `unwatch`."""
        self.unwatch()
        self._load = _ProbedLoad()
        self._names = {module: name.replace(WRAPPED, "") for name, module in self._model.named_modules()}
        self._sharing = _find_sharing(self._model)
        self._latent = _find_latent(self._model)
        if self._convolutions is None:
            self._convolutions = find_copies(self._model)
        self._original = layerwise._layerwise_process
        layerwise._layerwise_process = functools.partial(self._process, self._original)

    def unwatch(self) -> None:
        """Undo `watch`; no effect without a previous `watch`."""
        original, self._original = self._original, None
        if original is not None:
            layerwise._layerwise_process = original

    def process_sharing(self) -> None:
        """Process the modules that share the weights of another module, after that module has new weights.

        vLLM processes a module when tensors are loaded into it. A head that is tied to the embeddings receives no
        tensors. On a CPU its kernel has a packed copy of the weights, which would stay the old copy (layers/utils.py:
        dispatch_cpu_unquantized_gemm). This also updates the copies of convolution weights.
        """
        for module, others in self._sharing.items():
            method = getattr(module, "quant_method", None)
            # Other methods may change the weights in place, so a second run could damage them. Their probe detects
            # old copies.
            if module in self._load.loaded or not isinstance(method, PLAIN_METHODS):
                continue
            packed = next((other for other in others if other in self._load.loaded and hasattr(other, PACKED)), None)
            if packed is not None and hasattr(module, PACKED):
                # The packed copy has the same weight. Another copy would cost time and the same amount of memory.
                setattr(module, PACKED, getattr(packed, PACKED))
            else:
                method.process_weights_after_loading(module)
        copy_unpacked(self._convolutions or {})

    def verify(self, *, is_complete: bool) -> Verified:
        """Run the probe of each module. Return the counts of compared modules, and the reason for each other module.

        Args:
            is_complete: True if the load had to replace all weights of the model.

        Raises:
            WrongOutput: the outputs of modules differ; the message names the first modules.
        """
        load, probed = self._load, set()
        with torch.inference_mode():
            for name, check in load.checks:
                found = self._try(name, check)
                if found:
                    load.wrong.append(f"{name} {found}")
                elif found is not None:
                    probed.add(name)
        self._load = _ProbedLoad()
        empty = [module for module in self._names if module not in load.covered and _holds_weights(module)]
        names = sorted(self._names[module] for module in empty)
        # Some parameters of quantized models are in no checkpoint. vLLM's start also skips this check for them.
        if is_complete and load.loaded and not self._is_quantized:
            load.wrong.extend(f"{name} received no weights" for name in names)
        else:
            load.unprobed |= dict.fromkeys(names, "no tensor was loaded into it")
        if load.wrong:
            named = list_names(load.wrong, "; ", MAX_NAMED)
            raise WrongOutput(f"the output of modules differs from the output of the loaded tensors: {named}")
        unprobed = tuple(f"{name} ({reason})" for name, reason in sorted(load.unprobed.items()))
        return Verified(probed=len(probed - load.unprobed.keys()), equal=load.num_equal, unprobed=unprobed)

    def _process(self, original: Callable[..., None], layer: Any, info: Any) -> None:
        """Probe `layer` and call `original`, which is vLLM's `_layerwise_process`. It runs when `layer` is complete."""
        name = self._names.get(layer)
        raw = None
        if name is not None and info.loaded_weights:
            self._load.loaded.add(layer)
            self._load.covered.update((layer, *self._sharing.get(layer, ()), *self._latent.get(layer, ())))
            # The loader of vLLM may not support separate memory.
            raw = self._try(name, functools.partial(self._refer, layer, info))
        if getattr(layer, "quant_method", None) is not None:
            # vLLM allocates the module's memory next.
            raw = None
        original(layer, info)
        if name is not None and raw is not None:
            # A module without a kernel computes with its parameters.
            found = {key: difference(getattr(layer, key).data, tensor) for key, tensor in raw.items()}
            wrong = [f"{name}.{key} {different}" for key, different in found.items() if different]
            self._load.wrong.extend(wrong)
            self._load.num_equal += not wrong

    def _refer(self, layer: Any, info: Any) -> dict[str, Tensor]:
        """Add the comparisons of `layer` and of each module that computes with its weights. Return its raw tensors."""
        raw, absent = arrange(layer, info)
        method = getattr(layer, "quant_method", None)
        if "weight" in absent and isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
            # A linear module has no padding, so vLLM has left old weights in the rest of its memory.
            self._load.wrong.append(f"{self._names[layer]} received no values for {absent['weight']} of its weights")
            return raw
        for module in (layer, *self._sharing.get(layer, ())):
            if getattr(module, "quant_method", None) is not None:
                copies = (self._convolutions or {}).get(module, [])
                self._add_checks(module, functools.partial(make_checks, module, raw, absent, copies))
        for module in self._latent.get(layer, ()):
            self._add_checks(module, functools.partial(check_latent, module, raw))
        return raw

    def _add_checks(self, module: Any, make: Callable[[], list[Check]]) -> None:
        name = self._names[module]
        self._load.checks.extend((name, check) for check in self._try(name, make) or ())

    def _try(self, name: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work`; None if it fails. Then the module is one that was not probed."""
        try:
            with foreign_code(Unknown):
                return work()
        except Unknown as exc:
            self._load.unprobed[name] = str(exc)
        except ForeignError as exc:
            # A kernel of vLLM may not support a call outside of a request.
            logger.warning("weights.probe_failed module=%s", name, exc_info=True)
            self._load.unprobed[name] = str(exc).splitlines()[0][:MAX_REASON_CHARS]
        return None


def make_checks(
    module: Any, raw: dict[str, Tensor], absent: dict[str, int], copies: list[tuple[Any, str]]
) -> list[Check]:
    """Return the comparisons of a module that has a kernel.

    Args:
        module: module of vLLM.
        raw: raw parameters of the module.
        absent: number of elements without a value, by parameter.
        copies: buffers with copies of the weight of a convolution.

    Raises:
        Unknown: the expected output of the module cannot be computed.
    """
    weight, method = raw.get("weight"), module.quant_method
    if weight is not None and weight.dim() == NUM_DIMENSIONS and weight.shape[1] == 1:
        return [functools.partial(_check_convolution, module, weight, raw.get("bias"), copies)]
    if any(not name.endswith("bias") for name in absent):
        raise Unknown(f"{sum(absent.values())} of its weights received no values")
    if isinstance(module, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
        return [_check_experts(module, raw)]
    if not isinstance(method, PLAIN_METHODS) or not isinstance(module, (LinearBase, VocabParallelEmbedding)):
        raise Unknown(f"no comparison supports {type(method).__name__}")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise Unknown("its weight is not a floating-point matrix")
    checks = [_check_linear(module, weight, raw.get("bias"))]
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        indices = module.shard_indices
        ids = spread(indices.org_vocab_end_index - indices.org_vocab_start_index, NUM_IDS).to(weight.device)
        rows = weight[ids]
        checks.append(lambda: difference(method.embedding(module, ids), rows))
    return checks


def _check_linear(module: Any, weight: Tensor, bias: Tensor | None) -> Check:
    inputs, expected = linear_inputs(weight), expect_linear(weight, bias, step=_step(weight))

    def run() -> str:
        apply = module.quant_method.apply
        outputs = [apply(module, inputs[:-1], None), apply(module, inputs[-1:], None if bias is None else module.bias)]
        return expected.difference(torch.cat(outputs))

    return run


def _check_experts(module: Any, raw: dict[str, Tensor]) -> Check:
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
    w13 = raw["w13_weight"]
    top_k = 1 if module.apply_router_weight_on_input else min(module.top_k, len(w13))
    ids, weights = route_experts(len(w13), top_k)
    inputs, expected = expert_inputs(w13), expect_experts(raw, activation.join, ids, step=_step(w13))

    def run() -> str:
        local = torch.arange(len(ids)) if module.expert_map is None else _expert_ids(module.expert_map)
        output = method.apply(
            layer=module,
            x=inputs,
            topk_weights=weights.to(inputs.device),
            topk_ids=local[ids].to(inputs.device, method.topk_indices_dtype or torch.int32),
            shared_experts=None,
            shared_experts_input=None,
        )
        return expected.difference(output)

    return run


def _expert_ids(expert_map: Any) -> Any:
    """Return the expert ids in the model for the experts of this process, in their local order."""
    here = torch.nonzero(expert_map >= 0).flatten().cpu()
    return here[expert_map.cpu()[here].argsort()]


def check_latent(module: Any, raw: dict[str, Tensor]) -> list[Check]:
    """Return a comparison of latent attention's copies of a projection's weight with the projection's loaded tensor.

    See vLLM's layers/attention/mla_attention.py.

    Raises:
        Unknown: the weight is missing or quantized.
    """
    weight = raw.get("weight")
    if weight is None or not weight.is_floating_point() or weight.element_size() == 1:
        raise Unknown("the projection whose weight it copies is quantized")
    split = weight.T.reshape(module.kv_lora_rank, module.num_heads, module.qk_nope_head_dim + module.v_head_dim)
    keys, values = torch.split(split, [module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    expected = {"W_UK_T": expect_maps(keys.permute(1, 2, 0)), "W_UV": expect_maps(values.transpose(0, 1))}

    def run() -> str:
        for name, sums in expected.items():
            if not hasattr(module, name):
                raise Unknown("its kernel has separate copies of the weight")
            if different := sums.difference(expect_maps(getattr(module, name)).output):
                return f"{name} {different}"
        return ""

    return [run]


def _check_convolution(module: Any, weight: Tensor, bias: Tensor | None, copies: list[tuple[Any, str]]) -> str:
    """Return how the weights that kernels read differ from the loaded weights."""
    expected = weight.reshape(weight.shape[0], weight.shape[2])
    read = {f"its copy {name}": (parent._buffers[name], expected) for parent, name in copies}
    if hasattr(module, UNPACKED):
        read["its unpacked weight"] = getattr(module, UNPACKED), expected
        read["its packed weight"] = (
            module.weight.data.flatten(),
            _custom_ops.causal_conv1d_weight_pack(expected).flatten(),
        )
    else:
        read["its weight"] = module.weight.data.reshape(expected.shape), expected
    if bias is not None:
        read["its bias"] = module.bias.data, bias
    found = {what: difference(actual, given) for what, (actual, given) in read.items()}
    return next((f"{what} {different}" for what, different in found.items() if different), "")


def _step(weight: Tensor) -> float:
    return REDUCED_FLOAT32 if weight.dtype is torch.float32 and weight.device.type != "cpu" else 0.0


def arrange(layer: Any, info: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the raw parameters of `layer`, and the number of elements without a value, both by parameter name.

    The parameters are in separate memory and contain the tensors that were received for `layer`, as its loaders arrange
    them. Elements without a value are 0. The second map has only parameters with at least one such element.
    """
    given: dict[str, list[Any]] = {}
    for name, arguments in info.loaded_weights:
        given.setdefault(name, []).append(arguments)
    raw: dict[str, Tensor] = {}
    absent: dict[str, int] = {}
    with torch.no_grad():
        for name, loads in given.items():
            like = getattr(layer, name)
            # NaN marks elements that the loader does not write, if the dtype has it.
            fill = math.nan if _can_be_nan(like) else 0
            parameter: Any = torch.full(tuple(like.shape), fill, dtype=like.dtype, device=info.restore_device)
            # Loaders read the class and the attributes of the parameter.
            parameter.__class__, parameter.__dict__ = like.__class__, like.__dict__.copy()
            for arguments in loads:
                bound = copy.copy(arguments)
                bound.arguments = {**arguments.arguments, "param": parameter}
                loader_of(like)(*bound.args, **bound.kwargs)
            raw[name] = parameter.data
            tensors = [value for load in loads for value in load.arguments.values() if isinstance(value, Tensor)]
            # NaN marks an element without a value only if no received tensor contains NaN.
            if _has_nan(raw[name]) and not any(_has_nan(tensor) for tensor in tensors if not tensor.is_meta):
                absent[name] = int(raw[name].isnan().sum())
                raw[name].nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return raw, absent


def _has_nan(tensor: Tensor) -> bool:
    # The sum is NaN if any element is NaN. It takes a twentieth of the time of a check of each element. A sum of
    # infinities can be NaN too, so confirm it.
    return _can_be_nan(tensor) and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _find_sharing(model: Any) -> dict[Any, list[Any]]:
    """Return, for each module, the other modules that share its weight."""
    holders: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel():
            holders.setdefault(id(weight), []).append(module)
    return {
        module: [other for other in modules if other is not module]
        for modules in holders.values()
        for module in modules
        if len(modules) > 1
    }


def _find_latent(model: Any) -> dict[Any, list[Any]]:
    """Return, for each projection, the modules of multi-head latent attention that have copies of its weight."""
    found: dict[Any, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, MLAAttention):
            projection = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)
            found.setdefault(projection, []).append(module)
    return found


def _holds_weights(module: Any) -> bool:
    """True if a checkpoint has tensors for `module` itself."""
    if is_deferred_attention_layer(module):
        return False
    has_kernel = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and (has_kernel or any(parameter.numel() for parameter in own))
