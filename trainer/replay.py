"""Router replay: a Hugging Face mixture of experts computes with the experts that the sampler chose.

    with replay(model, batch.routed_experts):
        loss = loss_of(model(**batch.model_inputs()))
        loss.backward()

Each router that can be replayed returns `(logits, weights, ids)`. Its weights are a function of only its logits and
ids, its formula. transformers is never imported: routers are known by class name.

Replay changes the router's class. Its parameters, hooks and name stay. The guards of torch.compile check classes, so
torch.compile compiles the router again and does not run the earlier code. An opaque operator provides the rows, so that
torch.compile neither fixes their length in its code nor keeps them in memory.

Gradient checkpoints around a call compute it again in a backward pass. Replay detects them.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from .errors import ReplayError

_FILE: Final = torch.utils.checkpoint.__file__
_REENTRANT: Final = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_WATCHERS: Final = "_rollbus_watchers"
TRANSFORMERS: Final = "5.21.1"
"""Oldest tested release for replay. Some earlier releases, such as 5.5, return probabilities in place of logits."""
_ROW_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SUPPORTED = f"allowed: the routers of transformers >= {TRANSFORMERS} in rollbus.trainer.replay.SUPPORTED"
_TICKET: Final = "_rollbus_replay"
_CHECKED_TOKENS: Final = 256
_numbers = itertools.count()
# A CUDA graph would continue with the rows of its capture. Releases of torch without the tag make no CUDA graph of code
# with a CPU tensor, and a ticket is one.
_TAGS: Final[dict[str, Any]] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
_rerouted_classes: dict[type[nn.Module], type[nn.Module]] = {}
"""Replacement classes, by original class."""


@contextmanager
def replay(model: nn.Module, routed_experts: Tensor | None) -> Iterator[None]:
    """Make each router of `model` use the given experts inside the block, weighted by the router's own logits.

    Gradients flow into the router. Replay works with autograd, gradient checkpointing, mixed precision and
    torch.compile(dynamic=True). It restores the model at the end of the block, also after an error. With gradient
    checkpointing, call backward() inside the block, because it computes the layers again. Other models may be replayed
    at the same time. The same model may not, nor may another thread use it.

    Args:
        model: mixture of experts of transformers whose routers are in `SUPPORTED`. It may be wrapped by torch.compile,
            DDP or FSDP2.
        routed_experts: i[B, T, L, K] for inputs of B sequences with T tokens, preferably on the model's device. L
            counts all hidden layers, as in vLLM's rows, or only the layers with experts. A row of -1 leaves the choice
            to the router. The tensor is not copied and must not change until the block ends. None raises an error:
            train samples without routed experts outside the block.

    Raises:
        ReplayError: the model is not supported or is already replayed; the rows do not fit the model or the number of
            tokens; or at the end of the block, a router was never called, or a forward pass with checkpointing had no
            backward pass.
    """
    if routed_experts is None:
        raise ReplayError("there are no routed experts; to train without replay, call the model outside the block")
    routers = find_routers(model)
    check_rows(routed_experts, routers)
    for router in routers:
        if is_rerouted(router.module):
            raise ReplayError(f"{router.name} is being replayed; blocks for one model do not nest")
    layers = layer_of_rows(routers, routed_experts.shape[2])
    reroutings = [
        RouterPatch(router, routed_experts[:, :, layer]) for router, layer in zip(routers, layers, strict=True)
    ]
    try:
        for rerouting in reroutings:
            reroute(rerouting)
        yield
    finally:
        for rerouting in reroutings:
            restore(rerouting)
    _check_called(reroutings)
    _check_recomputed(model, reroutings)


def watch_checkpoints(grad: bool, on_recompute: Callable[[], None]) -> bool:
    """Call `on_recompute` before each recomputation of a torch.utils checkpoint around this call.

    A checkpoint passes no information to the code that it calls, so this function searches the stack for its frame.

    Args:
        grad: True if gradients are computed here. A reentrant checkpoint disables them; the edges of its context in the
            graph show that gradients will be computed.
        on_recompute: callback. The backward pass raises its errors.

    Returns:
        True if there is such a checkpoint.
    """
    found = False
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename == _FILE:
            if frame.f_code is _REENTRANT and (context := frame.f_locals["ctx"]).next_functions:
                _watchers(context).append(on_recompute)
                found = True
            elif grad and "gen" in frame.f_locals:
                _watchers(frame.f_locals["gen"].gi_frame.f_locals["new_frame"]).append(on_recompute)
                found = True
        frame = frame.f_back
    return found


def _watchers(checkpoint: Any) -> list[Callable[[], None]]:
    """Return the callbacks of this checkpoint. The list is shared, because a checkpoint may surround many calls."""
    watchers: list[Callable[[], None]] | None = getattr(checkpoint, _WATCHERS, None)
    if watchers is not None:
        return watchers
    watchers = []
    setattr(checkpoint, _WATCHERS, watchers)

    def notify(*_: Any) -> None:
        for watcher in watchers:
            watcher()

    if isinstance(checkpoint, torch.autograd.function.BackwardCFunction):
        checkpoint.register_prehook(notify)
        return watchers
    recompute = checkpoint.recompute_fn

    def recompute_and_notify(*inputs: Any) -> None:
        notify()
        recompute(*inputs)

    checkpoint.recompute_fn = recompute_and_notify
    return watchers


@dataclass(frozen=True, slots=True)
class Formula:
    """Computes the weights of chosen experts from a router's logits."""

    scores: Literal["softmax", "sigmoid", "softmax of chosen"]
    """Function of a logit: softmax over all experts, sigmoid, or softmax over the chosen experts."""
    renormalise: bool | None = None
    """True: divide by the sum over the chosen experts. None: use the router's `norm_topk_prob`."""
    epsilon: float = 0.0
    """Number added to that sum."""
    scaled: bool = False
    """True: multiply by the router's `routed_scaling_factor`."""

    def weights(self, router: nn.Module, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the weights f[N, K] of experts `ids` i64[N, K] for `logits` f[N, E], as `router` would compute them.

        The result is differentiable in the logits. The operations are those of the routers, so the router's own ids
        give its own weights bit for bit.
        """
        if self.scores == "softmax of chosen":
            chosen = logits.gather(1, ids)
            return torch.softmax(chosen, dim=-1, dtype=chosen.dtype)
        if self.scores == "softmax":
            scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        else:
            scores = logits.float().sigmoid()
        weights = scores.gather(1, ids)
        if router.norm_topk_prob if self.renormalise is None else self.renormalise:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total + self.epsilon if self.epsilon else total)
        return weights * cast(float, router.routed_scaling_factor) if self.scaled else weights


_BY_FORMULA: Final[dict[Formula, str]] = {
    Formula("softmax"): "FlexOlmoTopKRouter MellumTopKRouter OlmoeTopKRouter Qwen2MoeTopKRouter Qwen3MoeTopKRouter "
    "Qwen3NextTopKRouter Qwen3OmniMoeThinkerTextTopKRouter Qwen3OmniMoeTalkerTextTopKRouter Qwen4ExpTextTopKRouter",
    Formula("softmax", renormalise=True): "MiniMaxTopKRouter MixtralTopKRouter Qwen3OmniMoeTextTopKRouter "
    "Qwen3VLMoeTextTopKRouter Qwen3_5MoeTopKRouter",
    Formula("softmax", renormalise=False, scaled=True): "DeepseekOcr2TextTopkRouter DeepseekV2TopkRouter "
    "UnlimitedOcrTextTopkRouter",
    Formula("sigmoid", renormalise=True): "MiniMaxM2TopKRouter MiniMaxM3VLTopKRouter Step3p7TopKRouter",
    Formula("sigmoid", epsilon=1e-20, scaled=True): "AXK1TopkRouter BailingHybridTopkRouter DeepseekV32TopkRouter "
    "DeepseekV3TopkRouter Dots1TopkRouter Dots3NoteTextTopkRouter ExaoneMoeTopkRouter Glm4MoeLiteTopkRouter "
    "Glm4MoeTopkRouter Glm4vMoeTextTopkRouter Glm5NextTextTopkRouter GlmMoeDsaTopkRouter HYV4TopkRouter "
    "KimiLinearTopkRouter MiMoV2FlashTopkRouter NemotronHTopkRouter SolarOpenTopkRouter",
    Formula("softmax of chosen"): "GptOssTopKRouter GraniteMoeHybridTopKRouter GraniteMoeSWATopKRouter "
    "GraniteMoeSharedTopKRouter GraniteMoeTopKRouter",
}


SUPPORTED: Final[dict[str, Formula]] = {
    name: formula for formula, names in _BY_FORMULA.items() for name in names.split()
}
"""Formulas of the routers that can be replayed, by class name in transformers."""


def formula_of(kind: type[nn.Module]) -> Formula | None:
    """Return the formula of a router's class, or None for any other class.

    The class that defines `forward` decides, because FSDP and parametrizations put their own class before it.
    """
    return SUPPORTED.get(next(base for base in kind.__mro__ if "forward" in vars(base)).__name__)


@dataclass(frozen=True, slots=True)
class Router:
    """A router and its place in the model."""

    name: str
    """Path in the model, for example `model.layers.3.mlp.gate`."""
    module: nn.Module
    formula: Formula
    layer: int
    """Index among all hidden layers, with or without experts."""
    num_hidden_layers: int
    top_k: int
    num_experts: int


def find_routers(model: nn.Module) -> list[Router]:
    """Return the model's routers, sorted by layer.

    Raises:
        ReplayError: there is no router, a router is of an unknown kind, or there is not one router for each layer of
            one stack.
    """
    modules = dict(model.named_modules())
    routers: list[Router] = []
    stacks: set[str] = set()
    for name, module in modules.items():
        formula = formula_of(type(module))
        if formula is None:
            if type(module).__name__.endswith("Router"):
                raise ReplayError(f"{name} is a {type(module).__name__}, which cannot be replayed; {_SUPPORTED}")
            continue
        parts = name.split(".")
        prefixes = (".".join(parts[:i]) for i in range(1, len(parts)))
        stack = next((prefix for prefix in prefixes if isinstance(modules[prefix], nn.ModuleList)), None)
        if stack is None:
            raise ReplayError(f"{name} is in no nn.ModuleList of layers; a model as transformers builds it is needed")
        stacks.add(stack)
        top_k, num_experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
        if not isinstance(top_k, int) or not isinstance(num_experts, int):
            raise ReplayError(f"{name} has no integers top_k and num_experts; transformers >= {TRANSFORMERS} is needed")
        layer, num_hidden_layers = int(parts[stack.count(".") + 1]), len(list(modules[stack].children()))
        routers.append(Router(name, module, formula, layer, num_hidden_layers, top_k, num_experts))
    if not routers:
        raise ReplayError(f"{type(model).__name__} has no router that can be replayed; {_SUPPORTED}")
    if len({(router.top_k, router.num_experts) for router in routers}) > 1:
        raise ReplayError("the model's routers differ in top_k or in the number of experts; rows have one layout")
    layers_seen = [router.layer for router in routers]
    if len(stacks) > 1 or len(set(layers_seen)) < len(layers_seen):
        names = ", ".join(router.name for router in routers)
        raise ReplayError(f"rows have one layer for each of one stack of layers; the model has the routers {names}")
    return sorted(routers, key=lambda router: router.layer)


def layer_of_rows(routers: list[Router], num_layers: int) -> list[int]:
    """Return for each router its index among the `num_layers` layers of a row.

    vLLM's rows have every hidden layer, with zeros for layers without experts. Rows with only the layers that have
    experts are accepted too.

    Raises:
        ReplayError: `num_layers` matches neither form.
    """
    num_hidden_layers = routers[0].num_hidden_layers
    if num_layers == num_hidden_layers:
        return [router.layer for router in routers]
    if num_layers == len(routers):
        return list(range(len(routers)))
    raise ReplayError(
        f"rows have {num_layers} layers, the model has {num_hidden_layers}, of which {len(routers)} have experts"
    )


def check_rows(routed_experts: Tensor, routers: list[Router]) -> None:
    """Check rows i[B, T, L, K] against the model's routers. Layers without experts are not checked.

    Raises:
        ReplayError: the rows are wrong. The message gives the first place. A row that repeats an expert is wrong:
            otherwise zeros of missing rows would pass as expert 0.
    """
    given: object = routed_experts
    if not isinstance(given, Tensor) or given.ndim != 4 or given.dtype not in _ROW_DTYPES:
        found = f"a {type(given).__module__}.{type(given).__qualname__}"
        if hasattr(given, "dtype") and hasattr(given, "shape"):
            found += f" {list(given.shape)} of {given.dtype}"
        dtypes = ", ".join(str(dtype) for dtype in _ROW_DTYPES)
        raise ReplayError(f"routed experts are {found}; allowed: a tensor [batch, tokens, layers, top_k] of {dtypes}")
    layers = layer_of_rows(routers, routed_experts.shape[2])
    if routed_experts.shape[3] != routers[0].top_k:
        raise ReplayError(
            f"rows have {routed_experts.shape[3]} experts a layer; the model's top_k is {routers[0].top_k}"
        )
    if routed_experts.numel() == 0:
        return
    with_experts = routed_experts
    if len(layers) < routed_experts.shape[2]:
        with_experts = routed_experts.index_select(2, torch.tensor(layers, device=routed_experts.device))
    # One plane [B, T, L] for each of the top-k is a hundred times faster than sorting or reducing a short last axis.
    planes = with_experts.movedim(-1, 0).contiguous()
    lowest, highest = planes.amin(dim=0).long(), planes.amax(dim=0).long()
    own_choice = highest < 0
    repeats = torch.zeros_like(own_choice)
    for i, plane in enumerate(planes):
        for earlier in planes[:i]:
            repeats |= plane == earlier
    num_experts = routers[0].num_experts
    for wrong, allowed in (
        ((lowest < -1) | (highest >= num_experts), f"0 to {num_experts - 1}, or -1 for the router's own choice"),
        ((lowest < 0) & ~own_choice, "-1 for all of a row's experts, or for none"),
        (repeats & ~own_choice, "different experts"),
    ):
        if bool(wrong.any()):
            sequence, position, layer = wrong.nonzero()[0].cpu().numpy()
            ids = with_experts[sequence, position, layer].cpu().numpy()
            place = f"sequence {sequence}, position {position}, {routers[layer].name}"
            raise ReplayError(f"{place}: experts {ids}; allowed: {allowed}")


@dataclass(slots=True)
class RouterPatch:
    """One router in one replay block."""

    router: Router
    rows: Tensor
    """i[B, T, K]: expert ids; -1 keeps the router's own choice."""
    number: int = field(default_factory=lambda: next(_numbers))
    checked: bool = False
    """True if the formula has given the router's own weights for its own ids."""
    called: bool = False
    checkpointed: int = 0
    """Number of calls under a gradient checkpoint, which a backward pass will repeat."""
    pending: set[int] = field(default_factory=set)
    """Numbers of the checkpointed calls that no backward pass has repeated yet."""

    def check(self, logits: Tensor, weights: Tensor, own: Tensor) -> None:
        """Check that the formula gives the router's own weights f[N, K] for its `own` choice i64[N, K].

        Routers are identified only by class name, and the code of a class can change between releases.

        Raises:
            ReplayError: the weights differ.
        """
        logits, weights, own = logits[:_CHECKED_TOKENS], weights[:_CHECKED_TOKENS], own[:_CHECKED_TOKENS]
        by_formula = self.router.formula.weights(self.router.module, logits, own)
        # Compiled code may round differently from the formula. A wrong formula differs by far more.
        tolerance = max(1e-3, 16 * torch.finfo(logits.dtype).eps, 16 * torch.finfo(weights.dtype).eps)
        wrong = (by_formula.float() - weights.float()).abs() > tolerance * weights.float().abs().amax()
        if bool(wrong.any()):
            release = getattr(sys.modules.get("transformers"), "__version__", "not imported")
            raise ReplayError(
                f"{self.router.name} weighs its own choice of experts differently from the formula of "
                f"{type(self.router.module).__bases__[0].__name__} (transformers is {release}); "
                f"allowed: the routers of transformers >= {TRANSFORMERS} in rollbus.trainer.replay.SUPPORTED"
            )
        self.checked = True

    def count(self, grad: bool) -> None:
        """Count a call in a forward pass."""
        self.called = True
        call = self.checkpointed

        def on_recompute() -> None:
            if self.number not in _open:
                raise _ended_error(self.router.name)
            self.pending.discard(call)

        if watch_checkpoints(grad, on_recompute):
            self.checkpointed += 1
            self.pending.add(call)


_open: dict[int, RouterPatch] = {}
"""Routers in open blocks, by number."""


def _ended_error(name: str) -> ReplayError:
    return ReplayError(f"{name} is computed again after its replay block; call backward() inside the block")


@torch.library.custom_op("rollbus::replayed_experts", mutates_args=(), **_TAGS)
def _replay_experts(own: Tensor, logits: Tensor, weights: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    """Return the expert ids i64[N, K] to use. The router chose `own` i64[N, K] with `weights` f[N, K]."""
    rerouting = _open.get(int(ticket))
    if rerouting is None:
        raise _ended_error("a router")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise ReplayError("a CUDA graph would repeat the rows that it is captured with; replay without CUDA graphs")
    rows = rerouting.rows
    if own.shape[0] != rows.shape[0] * rows.shape[1]:
        has = f"{rows.shape[0]} sequences of {rows.shape[1]} tokens"
        raise ReplayError(
            f"{rerouting.router.name} was called with {own.shape[0]} tokens; the routed experts have {has}"
        )
    if not rerouting.checked:
        rerouting.check(logits, weights, own)
    if torch._C._current_graph_task_id() == -1:
        rerouting.count(grad)
    ids = rows.reshape(own.shape).to(own.device, own.dtype)
    return torch.where(ids < 0, own, ids)


@_replay_experts.register_fake
def _(own: Tensor, logits: Tensor, weights: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    return torch.empty_like(own)


def _reroute_class(base: type[nn.Module], router: Router) -> type[nn.Module]:
    if base in _rerouted_classes:
        return _rerouted_classes[base]
    formula = router.formula

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = base.__call__(self, *args, **kwargs)
        if not isinstance(output, tuple) or len(output) != 3:
            raise ReplayError(
                f"a {base.__name__} returned no (logits, weights, ids); transformers >= {TRANSFORMERS} is needed"
            )
        logits, weights, own = output
        ticket, grad = getattr(self, _TICKET), torch.is_grad_enabled()
        ids = _replay_experts(own, logits.detach(), weights.detach(), ticket, grad)
        return logits, formula.weights(self, logits, ids).to(weights.dtype), ids

    def reduce(self: nn.Module, _: Any) -> tuple[Any, ...]:
        # A copy or a file contains the original router, because it outlives the block. Protocol 1 permits another
        # class.
        parts: Any = base.__reduce_ex__(self, 1)
        make, (_, *args), state, *others = parts
        return make, (base, *args), {name: value for name, value in state.items() if name != _TICKET}, *others

    body = {"__call__": call, "__reduce_ex__": reduce, "__module__": __name__, "__doc__": base.__doc__}
    return _rerouted_classes.setdefault(base, type(f"Rerouted{base.__name__}", (base,), body))


def is_rerouted(router: nn.Module) -> bool:
    """Return True if a block replays this router now."""
    return _TICKET in vars(router)


def reroute(rerouting: RouterPatch) -> None:
    """Make a router use the rows until `restore`."""
    module = rerouting.router.module
    _open[rerouting.number] = rerouting
    # A tensor and not a number: torch.compile would compile each layer of each block for its own number.
    setattr(module, _TICKET, torch.tensor(rerouting.number, device="cpu"))
    module.__class__ = _reroute_class(type(module), rerouting.router)


def restore(rerouting: RouterPatch) -> None:
    """Restore a router to its state before `reroute`. This has no effect if `reroute` was not called."""
    _open.pop(rerouting.number, None)
    module = rerouting.router.module
    vars(module).pop(_TICKET, None)
    kind = type(module)
    if kind in _rerouted_classes.values():
        module.__class__ = kind.__bases__[0]


def _check_called(reroutings: list[RouterPatch]) -> None:
    """Reject a forward pass that skipped a router. Some fused kernels replace a whole block."""
    uncalled = [rerouting.router.name for rerouting in reroutings if not rerouting.called]
    if uncalled:
        raise ReplayError(
            f"{len(uncalled)} of {len(reroutings)} routers were not called inside the block, the first of them "
            f"{uncalled[0]}: call the model in the block; if you did, a fused kernel chose that layer's experts"
        )


def _check_recomputed(model: nn.Module, reroutings: list[RouterPatch]) -> None:
    """Reject the end of the block if a later backward pass would recompute a layer with other experts."""
    # The minimum over all routers: a backward pass does not recompute layers below the first trained parameter.
    pending = min((len(rerouting.pending) for rerouting in reroutings if rerouting.checkpointed), default=0)
    if pending and any(parameter.requires_grad for parameter in model.parameters()):
        forward = max(rerouting.checkpointed for rerouting in reroutings)
        raise ReplayError(
            f"{pending} of {forward} forward passes with gradient checkpointing had no backward pass inside the block; "
            "a later one would recompute the layers without these experts. Call backward() inside the block, or run "
            "forward passes without a backward pass under torch.no_grad()"
        )
