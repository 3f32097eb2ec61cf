"""The sampler's experts for Megatron-Core's own `RouterReplay`, micro-batch by micro-batch.

    with replay(batch, layers=[0, 1, 2]) as replayed:
        loss = forward(...)
        replayed.begin_backward()
        loss.backward()

Megatron makes a `RouterReplay` for each router where `TransformerConfig.moe_enable_routing_replay` is set. It replaces
the chosen experts and takes the router's own scores of them, so that gradients reach the router. Read in megatron-core
0.16.1 and 0.19.2. Not replayed are fused routers (`moe_router_fusion`), sinkhorn and hash routing, and what drops
tokens (`moe_expert_capacity_factor`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from ..trainer.errors import ReplayError
from ..trainer.packing import MicroBatch

__all__ = ["Replayed", "feed", "replay"]


class Replayed:
    """The routers of this process, which replay."""

    def __init__(self, routers: Sequence[RouterReplay]) -> None:
        self._routers = routers

    def __repr__(self) -> str:
        """One line with a count."""
        return f"<Replayed routers={len(self._routers)}>"

    def begin_backward(self) -> None:
        """Replay once more, in the same order: layers that are recomputed in the backward pass ask again."""
        for router in self._routers:
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)


@contextmanager
def replay(
    batch: MicroBatch,
    *,
    layers: Sequence[int],
    routers: Sequence[RouterReplay] | None = None,
    tokens: torch.Tensor | slice | None = None,
) -> Iterator[Replayed]:
    """Have the routers of this process choose the sampler's experts inside of the block.

    Args:
        batch: one micro-batch; see `feed` for this and the other arguments.

    Raises:
        ReplayError: see `feed`.
    """
    routers = RouterReplay.global_router_replay_instances if routers is None else routers
    try:
        yield feed(batch, layers=layers, routers=routers, tokens=tokens)
    finally:
        for router in routers:
            router.clear_indices()
            router.clear_router_replay_action()


def feed(
    batch: MicroBatch,
    *,
    layers: Sequence[int],
    routers: Sequence[RouterReplay] | None = None,
    tokens: torch.Tensor | slice | None = None,
) -> Replayed:
    """Give the routers a micro-batch's experts for their next forward pass, where a schedule interleaves batches.

    Call it before each micro-batch's forward pass, in the order of the backward passes. At the end of a step call
    `clear_indices` and `clear_router_replay_action` of each router, as `replay` does.

    Args:
        batch: with routing. Where a token has no row, it gets the first K experts; the loss mask is off there.
        layers: for each router its place among the layers of the rows, which have all layers of the sampler's model
            that route. With pipeline parallelism: those of this rank.
        routers: in the order of `layers`; None: all that Megatron has made in this process, in that order. A second
            model in the process, as a reference model, adds its own.
        tokens: which tokens of the batch this rank computes, in its order, where sequence or context parallelism gives
            it a part: a slice, or i64[n] indices. None: all, in order.

    Raises:
        ReplayError: the batch has no routing, or there is another number of routers, or no such layer or token.
    """
    routers = RouterReplay.global_router_replay_instances if routers is None else routers
    if batch.routed_experts is None:
        raise ReplayError("the batch has no routing; allowed: one that was packed from samples with rows")
    if len(layers) != len(routers):
        raise ReplayError(f"layers has {len(layers)} entries for {len(routers)} routers; allowed: one for each")
    rows = batch.routed_experts[0]
    num_layers, top_k = rows.shape[1:]
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ReplayError(f"layers has {layer}; allowed: 0 to {num_layers - 1}, the layers of the rows")
    if tokens is not None:
        rows = _part(rows, tokens)
    # Indices for `gather`, which takes no smaller integers in every release of torch; -1 would be no index.
    chosen = torch.where(rows < 0, torch.arange(top_k, device=rows.device), rows.long())
    for layer, router in zip(layers, routers, strict=True):
        router.set_target_indices(chosen[:, layer].contiguous())
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return Replayed(routers)


def _part(rows: torch.Tensor, tokens: Any) -> torch.Tensor:
    if (
        isinstance(tokens, torch.Tensor)
        and tokens.numel()
        and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(rows)
    ):
        raise ReplayError(f"tokens has {int(tokens.min())} to {int(tokens.max())}; allowed: 0 to {len(rows) - 1}")
    return rows[tokens]
