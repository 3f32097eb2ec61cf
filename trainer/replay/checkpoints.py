"""Detects gradient checkpoints around a call, which compute the call again in a backward pass."""

import sys
from collections.abc import Callable
from typing import Any, Final

import torch.utils.checkpoint

__all__ = ["watch_checkpoints"]

_FILE: Final = torch.utils.checkpoint.__file__
_REENTRANT: Final = torch.utils.checkpoint.CheckpointFunction.forward.__code__
_WATCHERS: Final = "_rollbus_watchers"


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
