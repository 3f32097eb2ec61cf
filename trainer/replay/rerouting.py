"""What one router returns while it is replayed.

A router is replayed by a change of its class: its parameters, hooks and name stay, and torch.compile, whose guards look
at classes, compiles it anew instead of running what it compiled before. The rows come through an operator that
torch.compile does not look into, so that it neither bakes their length into its code nor keeps them.
"""

import itertools
import sys
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from trainer.errors import ReplayError
from trainer.replay.formulas import Formula

__all__ = ["Rerouting", "is_rerouted", "reroute", "restore"]

_TICKET: Final = "_rollbus_replay"


@dataclass(slots=True)
class Rerouting:
    """One router in one block."""

    name: str
    rows: Tensor
    """i[B, T, K]: expert ids, -1 where the router's own choice stands."""
    called: int = 0
    """Calls in a forward pass."""
    checkpointed: int = 0
    """Those of them under a gradient checkpoint, which a backward pass will repeat."""
    recomputed: int = 0
    """Calls in a backward pass."""


_open: dict[int, Rerouting] = {}
_tickets = itertools.count()
_rerouted_classes: dict[type[nn.Module], type[nn.Module]] = {}
"""By the class before."""


@torch.library.custom_op("rollbus::replayed_experts", mutates_args=())
def _replayed_experts(own: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    """The expert ids i64[N, K] to compute with, where the router's own choice is `own` i64[N, K]."""
    rerouting = _open.get(int(ticket))
    if rerouting is None:
        raise ReplayError("a layer is recomputed after its replay has ended; call backward() inside the block")
    rows = rerouting.rows
    if own.shape[0] != rows.shape[0] * rows.shape[1]:
        has = f"{rows.shape[0]} sequences of {rows.shape[1]} tokens"
        raise ReplayError(f"{rerouting.name} was called with {own.shape[0]} tokens; the routed experts have {has}")
    if torch._C._current_graph_task_id() != -1:
        rerouting.recomputed += 1
    else:
        rerouting.called += 1
        rerouting.checkpointed += _in_checkpoint(grad)
    ids = rows.reshape(own.shape).to(own.device, own.dtype)
    return torch.where(ids < 0, own, ids)


@_replayed_experts.register_fake
def _(own: Tensor, ticket: Tensor, grad: bool) -> Tensor:
    return torch.empty_like(own)


def _in_checkpoint(grad: bool) -> bool:
    """Whether a checkpoint of torch.utils calls this and will call it again in a backward pass.

    Nothing that a checkpoint calls is told so; its frame on the stack is the only sign.
    """
    reentrant = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is reentrant:
            # It turns gradients off, as if there were none to compute; that there will be, its edges in the graph say.
            return bool(frame.f_locals["ctx"].next_functions)
        if grad and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _rerouted(base: type[nn.Module], formula: Formula) -> type[nn.Module]:
    if base in _rerouted_classes:
        return _rerouted_classes[base]

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = base.__call__(self, *args, **kwargs)
        if not isinstance(output, tuple) or len(output) != 3:
            raise ReplayError(f"a {base.__name__} returned no (logits, weights, ids); transformers >= 5 is needed")
        logits, weights, own = output
        ids = _replayed_experts(own, getattr(self, _TICKET), torch.is_grad_enabled())
        return logits, formula.weights(self, logits, ids).to(weights.dtype), ids

    body = {"__call__": call, "__module__": __name__, "__doc__": base.__doc__}
    return _rerouted_classes.setdefault(base, type(f"Rerouted{base.__name__}", (base,), body))


def is_rerouted(router: nn.Module) -> bool:
    """Whether a block replays this router now."""
    return _TICKET in vars(router)


def reroute(router: nn.Module, formula: Formula, rerouting: Rerouting) -> None:
    """Make a router use the rows, until `restore`."""
    number = next(_tickets)
    _open[number] = rerouting
    # A tensor, not a number: torch.compile would compile each layer of each block for its own number.
    setattr(router, _TICKET, torch.tensor(number))
    router.__class__ = _rerouted(type(router), formula)


def restore(router: nn.Module) -> None:
    """Make a router what it was before `reroute`."""
    del _open[int(getattr(router, _TICKET))]
    delattr(router, _TICKET)
    kind = type(router)
    if kind in _rerouted_classes.values():
        router.__class__ = kind.__bases__[0]
