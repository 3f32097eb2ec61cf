"""Compare what a model's modules compute after a load with what the loaded tensors give.

vLLM arranges a checkpoint's tensors in raw parameters, module by module, and makes of them what its kernels read:
packed, quantized, copied (model_loader/reload/layerwise.py). What a kernel reads is often not a parameter any more, so
that a comparison of parameters says nothing about it. While vLLM loads, a `Probing` arranges each module's tensors once
more, with the same loaders and beside vLLM's memory (`arranging`), and computes from them what the module has to give
for a fixed input. When all is loaded, each module computes it, with the kernel that requests use.
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
"""How a module is called inside of the wrapper that adds adapters to it."""
PACKED = "cpu_linear"
"""The attribute in which a module keeps what multiplies by its weight on a CPU, with a packed copy of that."""
MAX_NAMED = 3
"""Modules that a message names."""
MAX_REASON_CHARS = 100


class WrongOutput(Exception):
    """A module does not compute what its weights in the checkpoint give."""


@dataclasses.dataclass(slots=True)
class _ProbedLoad:
    """What is known of one load."""

    checks: list[tuple[str, Callable[[], str | None]]] = dataclasses.field(default_factory=list)
    """Modules, and the comparison to be made when all is loaded: it returns the difference, or None."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Differences that were seen under way."""
    unprobed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why, by module."""
    num_equal: int = 0
    """Modules without a kernel of their own that are as loaded."""
    loaded: set[Any] = dataclasses.field(default_factory=set)
    """Modules that tensors were loaded into."""
    covered: set[Any] = dataclasses.field(default_factory=set)
    """Those, and modules whose weights are theirs or made of theirs."""


class Probing:
    """Probes one model, load by load.

    Args:
        model: of vLLM, with its weights loaded.
        is_quantized: some of its weights are.
    """

    def __init__(self, model: Any, *, is_quantized: bool) -> None:
        self._model = model
        self._is_quantized = is_quantized
        self._original: Any = None
        self._names: dict[Any, str] = {}
        self._sharing: dict[Any, list[Any]] = {}
        self._latent: dict[Any, list[Any]] = {}
        self._convolutions: Copies | None = None
        """Found before the first load, since after one that has failed they may differ."""
        self._load = _ProbedLoad()

    def watch(self) -> None:
        """Compute the references of what vLLM loads from now on, until `unwatch`."""
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
        """Undo `watch`; harmless where nothing is watched."""
        original, self._original = self._original, None
        if original is not None:
            from vllm.model_executor.model_loader.reload import layerwise

            layerwise._layerwise_process = original

    def process_sharing(self) -> None:
        """Process the modules whose weights are those of another module, once that one has new weights; copies too.

        vLLM processes a module when tensors are loaded into it. A head that is tied to the embeddings gets none. On a
        CPU its kernel has a packed copy of the weights, which then is that of before (layers/utils.py:
        dispatch_cpu_unquantized_gemm).
        """
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        for module, others in self._sharing.items():
            method = getattr(module, "quant_method", None)
            # Others may change the weights themselves, and would do so twice; the probe tells whether they need it.
            if module in self._load.loaded or not isinstance(
                method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
            ):
                continue
            packed = next((other for other in others if other in self._load.loaded and hasattr(other, PACKED)), None)
            if packed is not None and hasattr(module, PACKED):
                # Made of the same weight; to pack it once more would take time and as much memory again.
                setattr(module, PACKED, getattr(packed, PACKED))
            else:
                method.process_weights_after_loading(module)
        copy_unpacked(self._convolutions or {})

    def verify(self, *, is_complete: bool) -> Verified:
        """Have each module compute its probe; return what was compared, and why some modules were not.

        Args:
            is_complete: all weights of the model were to be loaded.

        Raises:
            WrongOutput: it names the first modules that give something else.
        """
        load, self._load = self._load, _ProbedLoad()
        probed = self._run(load)
        empty = [module for module in self._names if module not in load.covered and _holds_weights(module)]
        names = sorted(self._names[module] for module in empty)
        # Of quantized models some parameters are in no checkpoint; vLLM makes the same difference when it starts.
        if is_complete and load.loaded and not self._is_quantized:
            load.wrong.extend(f"{name} got no weights" for name in names)
        else:
            load.unprobed |= dict.fromkeys(names, "no tensor was loaded into it")
        if load.wrong:
            more = f"; and {len(load.wrong) - MAX_NAMED} more" if len(load.wrong) > MAX_NAMED else ""
            named = "; ".join(load.wrong[:MAX_NAMED])
            raise WrongOutput(f"what modules compute is not what the loaded tensors give: {named}{more}")
        unprobed = tuple(f"{name} ({reason})" for name, reason in sorted(load.unprobed.items()))
        return Verified(probed=len(probed), equal=load.num_equal, unprobed=unprobed)

    def _run(self, load: _ProbedLoad) -> set[str]:
        """Compare what was put off until all is loaded; returns the modules that give what they have to."""
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
                    # A kernel of vLLM was called outside of a request.
                    logger.warning("weights.probe_failed module=%s", name, exc_info=True)
                    load.unprobed[name] = _in_short(exc)
                else:
                    if difference is None:
                        probed.add(name)
                    else:
                        load.wrong.append(f"{name} {difference}")
        return probed - load.unprobed.keys()

    def _process(self, original: Callable[..., None], layer: Any, info: Any) -> None:
        """Stand in for `original`, vLLM's `_layerwise_process`: all tensors of `layer` have come."""
        from .arranging import arrange

        name = self._names.get(layer)
        raw: dict[str, Any] | None = None
        absent: dict[str, int] = {}
        if name is not None and info.loaded_weights:
            try:
                with foreign_code():
                    raw, absent = arrange(layer, info)
            except ForeignError as exc:
                # A loader of vLLM was given other memory than it was made for.
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
        """Note what `layer`, and each module that computes with its weights, has to give."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        method = getattr(layer, "quant_method", None)
        if "weight" in absent and isinstance(layer, LinearBase) and isinstance(method, UnquantizedLinearMethod):
            # No padding: vLLM has left the rest of its memory as it was.
            self._load.wrong.append(f"{self._names[layer]} got no values for {absent['weight']} of its weights")
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
        """Compare a module that vLLM uses as it was loaded."""
        from .probes import plain_difference

        differences = {key: plain_difference(getattr(layer, key).data, tensor) for key, tensor in raw.items()}
        wrong = [f"{name}.{key} {difference}" for key, difference in differences.items() if difference is not None]
        self._load.wrong.extend(wrong)
        self._load.num_equal += not wrong


def _in_short(exc: ForeignError) -> str:
    return str(exc).splitlines()[0][:MAX_REASON_CHARS]


def _find_sharing(model: Any) -> dict[Any, list[Any]]:
    """Return, by module, the others that have the same weight."""
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
    """Return, by the projection whose weight they have copies of, the modules of multi-head latent attention."""
    from vllm.model_executor.layers.attention import MLAAttention

    found: dict[Any, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, MLAAttention):
            projection = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)
            found.setdefault(projection, []).append(module)
    return found


def _holds_weights(module: Any) -> bool:
    """True if a checkpoint's tensors belong into `module` itself."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    if is_deferred_attention_layer(module):
        return False
    has_kernel = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return bool(own) and (has_kernel or any(parameter.numel() for parameter in own))
