"""The block inside of which a model's routers use given experts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import ReplayError
from .rerouting import RouterPatch, is_rerouted, reroute, restore
from .routers import check_rows, find_routers, layer_of_rows

__all__ = ["replay"]


@contextmanager
def replay(model: nn.Module, routed_experts: Tensor | None) -> Iterator[None]:
    """Inside, each router of `model` uses the given experts and weighs them by its own logits, with gradients into it.

    Args:
        model: a mixture of experts of transformers whose routers are in `SUPPORTED`; wrapped by torch.compile, DDP or
            FSDP2 is fine.
        routed_experts: i[B, T, L, K] for inputs of B sequences and T tokens, best on the model's device. L counts all
            hidden layers, as vLLM's rows do, or those with experts alone. A row of -1 leaves the choice to the router.
            It is not copied: leave it alone until the block ends. None, for samples without routing, is refused: what
            is to be trained without replay belongs outside of the block.

    Works under autograd, gradient checkpointing, mixed precision and torch.compile(dynamic=True), and restores the
    model however the block ends. With gradient checkpointing, backward() belongs inside the block: it computes the
    layers again. Other models may be replayed at the same time, this one not, nor from another thread.

    Raises:
        ReplayError: the model is not supported or is replayed already; the rows are not the model's, or not as many as
            the tokens it is called with; at the end of the block, a router was never called, or a pass with
            checkpointing still waits for its backward pass.
    """
    if routed_experts is None:
        raise ReplayError("there are no routed experts; without replay, call the model outside of the block")
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


def _check_called(reroutings: list[RouterPatch]) -> None:
    """Refuse a pass that went around a router, which some fused kernels do with a whole block."""
    uncalled = [rerouting.router.name for rerouting in reroutings if not rerouting.called]
    if uncalled:
        raise ReplayError(
            f"{len(uncalled)} of {len(reroutings)} routers were not called inside the block, the first of them "
            f"{uncalled[0]}: call the model in the block; if you did, a fused kernel chose that layer's experts"
        )


def _check_recomputed(model: nn.Module, reroutings: list[RouterPatch]) -> None:
    """Refuse to leave a pass behind whose backward pass would recompute another routing."""
    # The least of all routers: a backward pass does not recompute layers below which nothing is trained.
    pending = min((len(rerouting.pending) for rerouting in reroutings if rerouting.checkpointed), default=0)
    if pending and any(parameter.requires_grad for parameter in model.parameters()):
        forward = max(rerouting.checkpointed for rerouting in reroutings)
        raise ReplayError(
            f"{pending} of {forward} forward passes with gradient checkpointing had no backward pass inside the block; "
            "a later one would recompute the layers without their routing. Call backward() inside the block, or run "
            "what needs no backward pass under torch.no_grad()"
        )
