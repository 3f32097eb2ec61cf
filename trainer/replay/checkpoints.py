"""The gradient checkpoints around a call, which compute it a second time in a backward pass."""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch.utils.checkpoint

__all__ = ["watch_checkpoints"]

_FILE: Final = torch.utils.checkpoint.__file__
_REENTRANT: Final = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_WATCHERS: Final = "_rollbus_watchers"


def watch_checkpoints(grad: bool, on_recompute: Callable[[], None]) -> bool:
    """Have `on_recompute` called each time before a checkpoint of torch.utils around this call is computed again.

    Nothing that a checkpoint calls is told so; its frame on the stack is the only sign.

    Args:
        grad: whether gradients are computed here. A reentrant checkpoint turns them off; that there will be some, its
            edges in the graph say.
        on_recompute: what it raises, the backward pass raises.

    Returns:
        Whether there is such a checkpoint.
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
    """What is called before this checkpoint is computed again: one list, as it may be around many calls."""
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
