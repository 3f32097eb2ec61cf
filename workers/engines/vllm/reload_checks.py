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
from torch.utils._python_dispatch import TorchDispatchMode
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
    Experts,
    embedding_probe,
    experts_probe,
    experts_routing,
    head_probes,
    linear_probe,
    plain_difference,
)
from .reload_repairs import UNPACKED, Copies, copy_unpacked, find_copies, loader_of

logger = logging.getLogger(__name__)

REDUCED_FLOAT32 = 2.0**-10
"""Relative error of float32 products on devices that may compute them with fewer bits."""
NUM_DIMENSIONS = 3
"""Number of dimensions of a convolution's weight: `[channel, 1, width]`."""
WRAPPED = ".base_layer"
"""Suffix of a module's name inside of the wrapper that adds adapters to it."""
PACKED = "cpu_linear"
"""Attribute with the function that multiplies by the module's weight on a CPU. It has a packed copy of the weight."""
MAX_NAMED = 3
"""Maximum number of modules in an error message."""
MAX_REASON_CHARS = 100


class Unknown(Exception):
    """This code cannot compute the expected output of a module. The message gives the reason."""


class WrongOutput(Exception):
    """The output of a module differs from the output that its tensors in the checkpoint give."""


@dataclasses.dataclass(slots=True)
class _ProbedLoad:
    """The state of one load."""

    checks: list[tuple[str, Callable[[], str | None]]] = dataclasses.field(default_factory=list)
    """Module names with a comparison to run after the load. It returns a description of the difference, or None."""
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
            if module in self._load.loaded or not isinstance(
                method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
            ):
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
        load, self._load = self._load, _ProbedLoad()
        probed = self._run(load)
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
        return Verified(probed=len(probed), equal=load.num_equal, unprobed=unprobed)

    def _run(self, load: _ProbedLoad) -> set[str]:
        """Run the comparisons that wait for the end of the load. Return the names of the modules with equal output."""
        probed = set()
        with torch.inference_mode():
            for name, compare in load.checks:
                try:
                    with foreign_code(Unknown):
                        difference = compare()
                except Unknown as exc:
                    load.unprobed[name] = str(exc)
                except ForeignError as exc:
                    # The kernel of vLLM may not support a call outside of a request.
                    logger.warning("weights.probe_failed module=%s", name, exc_info=True)
                    load.unprobed[name] = _in_short(exc)
                else:
                    if difference is None:
                        probed.add(name)
                    else:
                        load.wrong.append(f"{name} {difference}")
        return probed - load.unprobed.keys()

    def _process(self, original: Callable[..., None], layer: Any, info: Any) -> None:
        """Probe `layer` and call `original`, which is vLLM's `_layerwise_process`. It runs when `layer` is complete."""
        name = self._names.get(layer)
        raw: dict[str, Any] | None = None
        absent: dict[str, int] = {}
        if name is not None and info.loaded_weights:
            try:
                with foreign_code():
                    raw, absent = arrange(layer, info)
            except ForeignError as exc:
                # The loader of vLLM may not support separate memory.
                logger.warning("weights.arrange_failed module=%s", name, exc_info=True)
                self._load.unprobed[name] = _in_short(exc)
            self._load.loaded.add(layer)
            self._load.covered.update((layer, *self._sharing.get(layer, ()), *self._latent.get(layer, ())))
            if raw is not None:
                self._refer(layer, raw, absent)
        original(layer, info)
        if name is not None and raw is not None and getattr(layer, "quant_method", None) is None:
            self._compare(layer, name, raw)

    def _refer(self, layer: Any, raw: dict[str, Any], absent: dict[str, int]) -> None:
        """Add the comparisons of `layer` and of each module that computes with its weights."""
        method = getattr(layer, "quant_method", None)
        if "weight" in absent and isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
            # A linear module has no padding, so vLLM has left old weights in the rest of its memory.
            self._load.wrong.append(f"{self._names[layer]} received no values for {absent['weight']} of its weights")
            return
        linear = LinearProbe(raw)
        for module in (layer, *self._sharing.get(layer, ())):
            if getattr(module, "quant_method", None) is not None:
                copies = (self._convolutions or {}).get(module, [])
                self._add_checks(module, functools.partial(checks_of, module, raw, absent, linear, copies))
        for module in self._latent.get(layer, ()):
            self._add_checks(module, functools.partial(check_latent, module, raw))

    def _add_checks(self, module: Any, make: Callable[[], list[Callable[[], str | None]]]) -> None:
        try:
            self._load.checks.extend((self._names[module], check) for check in make())
        except Unknown as exc:
            self._load.unprobed[self._names[module]] = str(exc)

    def _compare(self, layer: Any, name: str, raw: dict[str, Any]) -> None:
        """Compare the parameters of a module without a kernel with the loaded tensors."""
        differences = {key: plain_difference(getattr(layer, key).data, tensor) for key, tensor in raw.items()}
        wrong = [f"{name}.{key} {difference}" for key, difference in differences.items() if difference is not None]
        self._load.wrong.extend(wrong)
        self._load.num_equal += not wrong


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
    module: Any, raw: dict[str, Any], absent: dict[str, int], linear: LinearProbe, copies: list[tuple[Any, str]]
) -> list[Callable[[], str | None]]:
    """Return the comparisons of a module that has a kernel.

    Args:
        raw: raw parameters of the module.
        absent: number of elements without a value, by parameter.
        linear: probe of the same raw parameters.
        copies: buffers with copies of the weight of a convolution.

    Raises:
        Unknown: the expected output of the module cannot be computed.
    """
    convolution = check_convolution(module, raw, copies)
    if convolution is not None:
        return [convolution]
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

    indices = module.shard_indices
    probe = embedding_probe(raw["weight"], indices.org_vocab_end_index - indices.org_vocab_start_index)
    return lambda: probe.difference(module.quant_method.embedding(module, probe.inputs))


def _check_experts(module: Any, raw: dict[str, Any]) -> Callable[[], str | None]:
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
    here = torch.nonzero(expert_map >= 0).flatten().cpu()
    return here[expert_map.cpu()[here].argsort()]


def check_latent(module: Any, raw: dict[str, Any]) -> list[Callable[[], str | None]]:
    """Return a comparison of latent attention's copies of a projection's weight with the projection's loaded tensor.

    See vLLM's layers/attention/mla_attention.py.

    Raises:
        Unknown: the weight is missing or quantized.
    """
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

    return [run]


def check_convolution(
    module: Any, raw: dict[str, Any], buffers: list[tuple[Any, str]]
) -> Callable[[], str | None] | None:
    """Return a function that compares the weights that kernels read with the loaded weights.

    None: `module` is not a convolution. The function returns a description of the first difference, or None.
    """
    weight = raw.get("weight")
    if weight is None or weight.dim() != NUM_DIMENSIONS or weight.shape[1] != 1:
        return None
    # Copy: the loaded tensors may be memory of the sender, which writes the next weights to it.
    expected = weight.reshape(weight.shape[0], weight.shape[2]).clone()
    bias = raw["bias"].clone() if isinstance(raw.get("bias"), torch.Tensor) else None

    def run() -> str | None:
        read = {f"its copy {name}": (parent._buffers[name], expected) for parent, name in buffers}
        if hasattr(module, UNPACKED):
            read["its unpacked weight"] = getattr(module, UNPACKED), expected
            packed = _custom_ops.causal_conv1d_weight_pack(expected)
            read["its packed weight"] = module.weight.data.flatten(), packed.flatten()
        else:
            read["its weight"] = module.weight.data.reshape(expected.shape), expected
        if bias is not None:
            read["its bias"] = module.bias.data, bias
        differences = ((what, plain_difference(actual, given)) for what, (actual, given) in read.items())
        return next((f"{what} {difference}" for what, difference in differences if difference is not None), None)

    return run


def _step(weight: Any) -> float:
    return REDUCED_FLOAT32 if weight.dtype is torch.float32 and weight.device.type != "cpu" else 0.0


def arrange(layer: Any, info: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the raw parameters of `layer`, and the number of elements without a value, both by parameter name.

    The parameters contain the tensors that were received for `layer`. Do not write to them: a parameter that equals one
    received tensor without a change is that tensor itself. Other parameters have separate memory. Elements without a
    value are 0. The second map has only parameters with at least one such element.
    """
    given: dict[str, list[Any]] = {}
    for name, arguments in info.loaded_weights:
        given.setdefault(name, []).append(arguments)
    raw: dict[str, Tensor] = {}
    absent: dict[str, int] = {}
    with torch.no_grad():
        for name, loads in given.items():
            like = getattr(layer, name)
            whole = _whole(like, loads, info.restore_device)
            if whole is not None:
                raw[name] = whole
                continue
            raw[name] = _filled(like, loads, info.restore_device)
            tensors = [value for load in loads for value in load.arguments.values() if isinstance(value, Tensor)]
            # NaN marks an element without a value only if no received tensor contains NaN.
            if _has_nan(raw[name]) and not any(_has_nan(tensor) for tensor in tensors if not tensor.is_meta):
                absent[name] = int(raw[name].isnan().sum())
                raw[name].nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return raw, absent


def _filled(like: Any, loads: list[Any], device: Any) -> Tensor:
    """Return a parameter like `like` in new memory, filled by its loader.

    Elements that the loader does not write are NaN, or 0 if the dtype has no NaN.
    """
    fill = math.nan if _can_be_nan(like) else 0
    parameter = _as(like, torch.full(tuple(like.shape), fill, dtype=like.dtype, device=device))
    for arguments in loads:
        _load(like, parameter, arguments)
    arranged: Tensor = parameter.data
    return arranged


def _whole(like: Any, loads: list[Any], device: Any) -> Tensor | None:
    """Return the received tensor that equals the whole parameter; None: several tensors, or the loader changes it."""
    if len(loads) != 1:
        return None
    parameter = _as(like, torch.empty(tuple(like.shape), dtype=like.dtype, device="meta"))
    with _Writes() as writes:
        _load(like, parameter, loads[0])
    if len(writes.copies) != 1 or writes.has_others:
        return None
    target, source = writes.copies[0]
    is_all = target.untyped_storage()._cdata == parameter.untyped_storage()._cdata
    is_all &= (target.shape, target.stride(), target.storage_offset()) == (like.shape, parameter.stride(), 0)
    is_same = source.device.type == torch.device(device).type
    is_same &= (source.shape, source.dtype) == (like.shape, like.dtype)
    return source if is_all and is_same else None


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the writes into tensors without memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Tensor, Tensor]] = []
        """Target and source of each copy."""
        self.has_others = False
        """True if an operation other than a copy wrote to a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Record the write of a torch function, then call the function. torch calls this for each of its functions."""
        target = args[0] if args else None
        # Loaders also fill the part beyond the end of a tensor. That part may be empty; ignore writes to it.
        is_nothing = isinstance(target, Tensor) and not target.numel()
        if func._schema.is_mutable and not is_nothing:
            if func is torch.ops.aten.copy_.default:
                self.copies.append((args[0], args[1]))
            else:
                self.has_others = True
        return func(*args, **kwargs or {})


def _as(like: Any, tensor: Any) -> Any:
    """Give `tensor` the class and the attributes of the parameter `like`, because loaders read them."""
    tensor.__class__ = like.__class__
    tensor.__dict__ = like.__dict__.copy()
    return tensor


def _load(like: Any, parameter: Any, arguments: Any) -> None:
    """Call the loader of `like` with the recorded `arguments`, but with `parameter` as its target."""
    bound = copy.copy(arguments)
    bound.arguments = {**arguments.arguments, "param": parameter}
    loader_of(like)(*bound.args, **bound.kwargs)


def _has_nan(tensor: Tensor) -> bool:
    # The sum is NaN if any element is NaN. It takes a twentieth of the time of a check of each element. A sum of
    # infinities can be NaN too, so confirm it.
    return _can_be_nan(tensor) and bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _can_be_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def _in_short(exc: ForeignError) -> str:
    return str(exc).splitlines()[0][:MAX_REASON_CHARS]


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
