"""Compares the output of a model's modules after a load with the output that the loaded tensors give.

vLLM arranges a checkpoint's tensors in raw parameters, module by module. From them it derives the data of its kernels:
packed, quantized or copied weights (model_loader/reload/layerwise.py). This data is often not a parameter, so a
comparison of parameters does not verify it.

While vLLM loads, a `Probing` arranges the tensors of each module again, with the same loaders, in separate memory
(`arranging`). From these tensors it computes the expected output of the module for a fixed input. After the load, each
module computes its output for this input with the kernel that requests use.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from ....schemas.foreign_code import ForeignError, foreign_code
from ....schemas.weights import Verified
from .convolutions import Copies, check_convolution, copy_unpacked, find_copies
from .probe_checks import LinearProbe, Unknown, check_latent, checks_of

__all__ = ["Probing", "WrongOutput"]

logger = logging.getLogger(__name__)

WRAPPED = ".base_layer"
"""Suffix of a module's name inside of the wrapper that adds adapters to it."""
PACKED = "cpu_linear"
"""Attribute with the function that multiplies by the module's weight on a CPU. It has a packed copy of the weight."""
MAX_NAMED = 3
"""Maximum number of modules in an error message."""
MAX_REASON_CHARS = 100


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
        from vllm.model_executor.model_loader.reload import layerwise

        self._original = layerwise._layerwise_process
        layerwise._layerwise_process = functools.partial(self._process, self._original)

    def unwatch(self) -> None:
        """Undo `watch`; no effect without a previous `watch`."""
        original, self._original = self._original, None
        if original is not None:
            from vllm.model_executor.model_loader.reload import layerwise

            layerwise._layerwise_process = original

    def process_sharing(self) -> None:
        """Process the modules that share the weights of another module, after that module has new weights.

        vLLM processes a module when tensors are loaded into it. A head that is tied to the embeddings receives no
        tensors. On a CPU its kernel has a packed copy of the weights, which would stay the old copy (layers/utils.py:
        dispatch_cpu_unquantized_gemm). This also updates the copies of convolution weights.
        """
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

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
            more = f"; and {len(load.wrong) - MAX_NAMED} more" if len(load.wrong) > MAX_NAMED else ""
            named = "; ".join(load.wrong[:MAX_NAMED])
            raise WrongOutput(f"the output of modules differs from the output of the loaded tensors: {named}{more}")
        unprobed = tuple(f"{name} ({reason})" for name, reason in sorted(load.unprobed.items()))
        return Verified(probed=len(probed), equal=load.num_equal, unprobed=unprobed)

    def _run(self, load: _ProbedLoad) -> set[str]:
        """Run the comparisons that wait for the end of the load. Return the names of the modules with equal output."""
        import torch

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
        from .arranging import arrange

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
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        method = getattr(layer, "quant_method", None)
        if "weight" in absent and isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
            # A linear module has no padding, so vLLM has left old weights in the rest of its memory.
            self._load.wrong.append(f"{self._names[layer]} received no values for {absent['weight']} of its weights")
            return
        linear = LinearProbe(raw)
        for module in (layer, *self._sharing.get(layer, ())):
            if getattr(module, "quant_method", None) is None:
                continue
            convolution = check_convolution(module, raw, (self._convolutions or {}).get(module, []))
            if convolution is not None:
                self._load.checks.append((self._names[module], convolution))
                continue
            try:
                checks = checks_of(module, raw, absent, linear)
            except Unknown as exc:
                self._load.unprobed[self._names[module]] = str(exc)
                continue
            self._load.checks.extend((self._names[module], check) for check in checks)
        for module in self._latent.get(layer, ()):
            try:
                self._load.checks.append((self._names[module], check_latent(module, raw)))
            except Unknown as exc:
                self._load.unprobed[self._names[module]] = str(exc)

    def _compare(self, layer: Any, name: str, raw: dict[str, Any]) -> None:
        """Compare the parameters of a module without a kernel with the loaded tensors."""
        from .probes import plain_difference

        differences = {key: plain_difference(getattr(layer, key).data, tensor) for key, tensor in raw.items()}
        wrong = [f"{name}.{key} {difference}" for key, difference in differences.items() if difference is not None]
        self._load.wrong.extend(wrong)
        self._load.num_equal += not wrong


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
    from vllm.model_executor.layers.attention import MLAAttention

    found: dict[Any, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, MLAAttention):
            projection = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)
            found.setdefault(projection, []).append(module)
    return found


def _holds_weights(module: Any) -> bool:
    """True if a checkpoint has tensors for `module` itself."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if is_deferred_attention_layer(module):
        return False
    has_kernel = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and (has_kernel or any(parameter.numel() for parameter in own))
