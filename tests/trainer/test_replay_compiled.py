"""Replay with torch.compile(dynamic=True).

The backend runs all stages of torch.compile, including the partitioner that chooses the recomputed operations, except
code generation. Code generation takes minutes on two cores, and it does not look into replay's operator.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from rollbus.trainer.errors import ReplayError
from rollbus.trainer.replay import replay
from tests.support.waits import in_trainers_run
from tests.trainer.models import build, difference, random_rows, run, tokens

pytestmark = [
    in_trainers_run,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch.compile reads the gradient of a layer's input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BACKEND = "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_lengths_and_blocks_share_one_graph() -> None:
    """Two graphs, with and without replay, serve all lengths and blocks; a wrong number of tokens is an error."""
    from torch._dynamo.utils import counters

    model = build(num_layers=1)
    compiled: Any = torch.compile(model, dynamic=True, backend=BACKEND)
    counters.clear()
    for num_tokens in (11, 13, 32):
        assert difference(run(model, num_tokens), run(compiled, num_tokens)) < 1e-5
        for seed in (0, 1):
            rows = random_rows(num_tokens, 1, seed=seed)
            with replay(model, rows):
                expected = run(model, num_tokens)
            with replay(compiled, rows):
                assert difference(expected, run(compiled, num_tokens)) < 1e-5
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    with pytest.raises(ReplayError, match="17 tokens"), replay(compiled, random_rows(11, 1)):
        run(compiled, 17)


def test_separately_compiled_layers_share_one_graph() -> None:
    """Separately compiled layers share one graph, although each layer has different rows."""
    from torch._dynamo.utils import counters

    model = build(num_layers=3)
    rows = random_rows(11, 3)
    with replay(model, rows):
        expected = run(model)
    counters.clear()
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend=BACKEND)
    with replay(model, rows):
        assert difference(expected, run(model)) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1


def test_compiled_code_recomputes_layers_with_the_given_experts() -> None:
    """Compiled code recomputes layers with the given experts inside the block, and raises an error after it."""
    rows = random_rows(11, 1)
    model = build(num_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with replay(model, rows):
        expected = run(model)
    compiled: Any = torch.compile(model, dynamic=True, backend=BACKEND)
    with replay(compiled, rows):
        assert difference(expected, run(compiled)) < 1e-5
    with replay(compiled, rows):
        loss = compiled(input_ids=tokens(11)).logits.sum()
    with pytest.raises(ReplayError, match=r"call backward\(\) inside the block"):
        loss.backward()
    with replay(compiled, rows):
        loss = compiled(input_ids=tokens(11)).logits.sum()
    with pytest.raises(ReplayError, match=r"call backward\(\) inside the block"), replay(compiled, rows.flip(1)):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_compiled_code_needs_its_backward_pass_in_the_block(reentrant: bool) -> None:
    """Replay detects a checkpoint around compiled code and requires its backward pass inside the block."""
    model = build(num_layers=1)
    rows = random_rows(11, 1)
    model.model.layers[0].mlp.compile(dynamic=True, backend=BACKEND)
    embedded = model.get_input_embeddings()(tokens(11)).detach().requires_grad_()

    def forward(embedded: Tensor) -> Any:
        return model(inputs_embeds=embedded).logits

    def gradient(*, checkpoint: bool) -> Tensor:
        embedded.grad = None
        if checkpoint:
            logits = torch.utils.checkpoint.checkpoint(forward, embedded, use_reentrant=reentrant)
        else:
            logits = model(inputs_embeds=embedded).logits
        logits.logsumexp(dim=-1).sum().backward()
        assert embedded.grad is not None
        return torch.clone(embedded.grad)

    with replay(model, rows):
        expected = gradient(checkpoint=False)
    with replay(model, rows):
        torch.testing.assert_close(gradient(checkpoint=True), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ReplayError, match="inside the block"), replay(model, rows):
        torch.utils.checkpoint.checkpoint(forward, embedded, use_reentrant=reentrant)
