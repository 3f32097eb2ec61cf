"""Replay with gradient checkpointing, which computes layers a second time in the backward pass."""

import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from rollbus.trainer.errors import ReplayError
from rollbus.trainer.replay import replay
from tests.trainer.models import build, difference, random_rows, run, tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]
both_kinds = pytest.mark.parametrize("reentrant", [False, True])
ROWS = random_rows(11, 3)


def checkpointed(*, reentrant: bool) -> Any:
    """Return a model that checkpoints its layers."""
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    # Reentrant checkpoints compute no gradients if no input requires a gradient.
    model.enable_input_require_grads()
    return model


def loss_of(model: Any) -> Any:
    """Return a loss that depends on each layer."""
    return model(input_ids=tokens(11)).logits.logsumexp(dim=-1).sum()


@both_kinds
def test_recomputed_layers_use_the_given_experts_both_times(reentrant: bool) -> None:
    """Recomputed layers use the given experts both times."""
    model = build()
    with replay(model, ROWS):
        expected = run(model)
    assert difference(expected, run(model)) > 1e-3
    model = checkpointed(reentrant=reentrant)
    with replay(model, ROWS):
        assert difference(expected, run(model)) == 0


@both_kinds
def test_backward_after_the_block_is_refused(reentrant: bool) -> None:
    """A replay block raises an error if it ends between a checkpointed forward pass and its backward pass."""
    model = checkpointed(reentrant=reentrant)
    with pytest.raises(ReplayError, match=r"Call backward\(\) inside the block"), replay(model, ROWS):
        loss_of(model)
    block = replay(model, ROWS)
    block.__enter__()
    kept = loss_of(model)
    loss_of(model).backward()
    with pytest.raises(ReplayError, match=r"1 of 2 forward passes .* no backward pass"):
        block.__exit__(None, None, None)
    del kept


@both_kinds
def test_a_backward_pass_counts_for_its_forward_pass_only(reentrant: bool) -> None:
    """Repeated recomputation for one forward pass does not hide the missing backward pass of another forward pass."""
    model = checkpointed(reentrant=reentrant)
    embedded = model.get_input_embeddings()(tokens(11)).detach().requires_grad_()

    def again() -> None:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()

    def nested() -> None:
        checkpoint = torch.utils.checkpoint.checkpoint
        logits = checkpoint(lambda given: model(inputs_embeds=given).logits, embedded, use_reentrant=reentrant)
        logits.sum().backward()

    for step in (again, nested):
        with replay(model, ROWS):
            step()
        block = replay(model, ROWS)
        block.__enter__()
        kept = loss_of(model)
        step()
        with pytest.raises(ReplayError, match="1 of 2 forward passes"):
            block.__exit__(None, None, None)
        del kept


@both_kinds
def test_late_backward_is_refused_after_any_end(reentrant: bool) -> None:
    """After an exception has ended a block, a late backward pass fails instead of using other experts."""
    model = checkpointed(reentrant=reentrant)
    block = replay(model, ROWS)
    block.__enter__()
    loss = loss_of(model)
    assert not block.__exit__(KeyError, KeyError("x"), None)
    with pytest.raises(ReplayError, match=r"after its replay block; call backward\(\) inside the block"):
        loss.backward()


@both_kinds
def test_a_checkpoint_around_the_model_counts_like_checkpoints_of_its_layers(reentrant: bool) -> None:
    """A checkpoint around the whole model counts like a checkpoint of the model's layers."""
    model = build()
    embedded = model.get_input_embeddings()(tokens(11)).detach().requires_grad_()

    def forward(embedded: Tensor) -> Any:
        return model(inputs_embeds=embedded).logits

    with pytest.raises(ReplayError, match="inside the block"), replay(model, ROWS):
        torch.utils.checkpoint.checkpoint(forward, embedded, use_reentrant=reentrant)
    with replay(model, ROWS):
        torch.utils.checkpoint.checkpoint(forward, embedded, use_reentrant=reentrant).sum().backward()


def test_without_checkpoints_backward_may_come_later() -> None:
    """Without checkpointing a block may end before the backward pass, because nothing is recomputed."""
    model = build()
    with replay(model, ROWS):
        expected = run(model)
    model.zero_grad()
    with replay(model, ROWS):
        loss = loss_of(model)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, expected[name])


@both_kinds
def test_passes_without_gradients_need_no_backward(reentrant: bool) -> None:
    """Forward passes under `no_grad` or of a frozen model need no backward pass, also in training mode."""
    model = checkpointed(reentrant=reentrant)
    with replay(model, ROWS), torch.no_grad():
        loss_of(model)
    model.disable_input_require_grads()
    model.requires_grad_(False)
    with replay(model, ROWS):
        loss_of(model)


def test_a_block_does_not_wait_for_frozen_lower_layers() -> None:
    """A block does not wait for the recomputation of frozen lower layers, which never occurs."""
    model = checkpointed(reentrant=False)
    model.disable_input_require_grads()
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    with replay(model, ROWS):
        loss_of(model).backward()
    assert model.model.layers[1].mlp.gate.weight.grad.abs().max() > 0


def test_an_exception_in_the_block_is_raised_unchanged() -> None:
    """An exception in the block is raised unchanged, without an error about the missing backward pass."""
    model = checkpointed(reentrant=False)
    with pytest.raises(ZeroDivisionError), replay(model, ROWS):
        loss_of(model).div_(1 // 0)
