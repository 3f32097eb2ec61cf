"""Changes the output of one router during replay.

Replay changes the router's class. Its parameters, hooks and name stay. The guards of torch.compile check classes, so
torch.compile compiles the router again and does not run the earlier code. An opaque operator provides the rows, so that
torch.compile neither fixes their length in its code nor keeps them in memory.
"""

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import ReplayError
from .checkpoints import watch_checkpoints
from .formulas import TRANSFORMERS
from .routers import Router

__all__ = ["RouterPatch", "is_rerouted", "reroute", "restore"]

_TICKET: Final = "_rollbus_replay"
_CHECKED_TOKENS: Final = 256
_numbers = itertools.count()
# A CUDA graph would continue with the rows of its capture. Releases of torch without the tag make no CUDA graph of code
# with a CPU tensor, and a ticket is one.
_TAGS: Final[dict[str, Any]] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


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
                raise _ended(self.router.name)
            self.pending.discard(call)

        if watch_checkpoints(grad, on_recompute):
            self.checkpointed += 1
            self.pending.add(call)


_open: dict[int, RouterPatch] = {}
"""Routers in open blocks, by number."""
_rerouted_classes: dict[type[nn.Module], type[nn.Module]] = {}
"""Replacement classes, by original class."""


def _ended(name: str) -> ReplayError:
    return ReplayError(f"{name} is computed again after its replay block; call backward() inside the block")


@torch.library.custom_op("rollbus::replayed_experts", mutates_args=(), **_TAGS)
def _replayed_experts(own: Tensor, logits: Tensor, weights: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    """Return the expert ids i64[N, K] to use. The router chose `own` i64[N, K] with `weights` f[N, K]."""
    rerouting = _open.get(int(ticket))
    if rerouting is None:
        raise _ended("a router")
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


@_replayed_experts.register_fake
def _(own: Tensor, logits: Tensor, weights: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    return torch.empty_like(own)


def _rerouted(base: type[nn.Module], router: Router) -> type[nn.Module]:
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
        ids = _replayed_experts(own, logits.detach(), weights.detach(), ticket, grad)
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
    module.__class__ = _rerouted(type(module), rerouting.router)


def restore(rerouting: RouterPatch) -> None:
    """Restore a router to its state before `reroute`. This has no effect if `reroute` was not called."""
    _open.pop(rerouting.number, None)
    module = rerouting.router.module
    vars(module).pop(_TICKET, None)
    kind = type(module)
    if kind in _rerouted_classes.values():
        module.__class__ = kind.__bases__[0]
