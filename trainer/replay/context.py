"""The block in which a model's routers use given experts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import ReplayError
from .rerouting import RouterPatch, is_rerouted, reroute, restore
from .routers import check_rows, find_routers, layer_of_rows

__all__ = ["replay"]


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
