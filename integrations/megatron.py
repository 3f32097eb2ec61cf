"""Replays the sampler's experts with Megatron-Core's own `RouterReplay`, for each micro-batch.

    with replay(batch, layers=[0, 1, 2]) as replayed:
        loss = forward(...)
        replayed.begin_backward()
        loss.backward()

Megatron creates a `RouterReplay` for each router if `TransformerConfig.moe_enable_routing_replay` is set. It replaces
the chosen experts and uses the router's own scores for them, so gradients reach the router. This was checked in the
code of megatron-core 0.16.1 and 0.19.2. Not replayed are fused routers (`moe_router_fusion`), sinkhorn and hash
routing, and routers that drop tokens (`moe_expert_capacity_factor`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from ..trainer.errors import ReplayError
from ..trainer.packing import MicroBatch


class Replayed:
    """The replaying routers of this process."""

    def __init__(self, routers: Sequence[RouterReplay]) -> None:
        self._routers = routers

    def __repr__(self) -> str:
        """Return one line with the number of routers."""
        return f"<Replayed routers={len(self._routers)}>"

    def begin_backward(self) -> None:
        """Replay the experts again in the same order, for layers that the backward pass recomputes."""
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
    """Make the routers of this process choose the sampler's experts inside the block.

    Args:
        batch: one micro-batch. See `feed` for all arguments.

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
    """Give the routers the experts of a micro-batch for the next forward pass. For schedules that interleave batches.

    Call it before the forward pass of each micro-batch, in the order of the backward passes. At the end of a step, call
    `clear_indices` and `clear_router_replay_action` of each router, as `replay` does.

    Args:
        batch: micro-batch with routed experts. A token without a row gets the first K experts; the loss mask is off at
            such a token.
        layers: for each router, the index of its layer in the rows, which have all layers with experts of the sampler's
            model. With pipeline parallelism: the layers of this rank.
        routers: routers in the order of `layers`. None: all routers that Megatron has created in this process, in that
            order. A second model in the process, such as a reference model, adds its routers.
        tokens: tokens of the batch that this rank computes, in its order, with sequence or context parallelism: a
            slice, or i64[n] indices. None: all tokens in order.

    Raises:
        ReplayError: the batch has no routed experts, the number of routers differs, or a layer or token does not exist.
    """
    routers = RouterReplay.global_router_replay_instances if routers is None else routers
    if batch.routed_experts is None:
        raise ReplayError("the batch has no routed experts; allowed: a batch that was packed from samples with rows")
    if len(layers) != len(routers):
        raise ReplayError(f"layers has {len(layers)} entries for {len(routers)} routers; allowed: one for each")
    rows = batch.routed_experts[0]
    num_layers, top_k = rows.shape[1:]
    for layer in layers:
        if not 0 <= layer < num_layers:
            raise ReplayError(f"layers has {layer}; allowed: 0 to {num_layers - 1}, the layers of the rows")
    if tokens is not None:
        rows = _part(rows, tokens)
    # Indices for `gather`, which does not accept smaller integers in every torch release. -1 is no valid index.
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
