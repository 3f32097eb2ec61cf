"""Replay checks the model while it runs, and leaves no trace after the block."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollbus.trainer.errors import ReplayError
from rollbus.trainer.replay import replay
from tests.trainer.replay_models import build, difference, moe_blocks, random_rows, router_of, run, tokens

pytestmark = pytest.mark.slow
ROWS = random_rows(11, 2)


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a model, which each test leaves unchanged."""
    return build(num_layers=2)


@pytest.fixture
def doctored(model: Any) -> Iterator[Any]:
    """Return the model with a last router that returns probabilities as logits, as in transformers 5.0."""
    router = router_of(moe_blocks(model)[1])
    kind = type(router)

    def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = kind.forward(self, hidden)
        return logits.softmax(dim=-1), weights, ids

    router.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    yield model
    router.__class__ = kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_with_another_formula_is_rejected(doctored: Any, dtype: torch.dtype) -> None:
    """A router with a known class name and another formula is rejected instead of replayed with wrong weights."""
    import transformers

    message = rf"layers.1.mlp.gate weighs .* of Qwen3MoeTopKRouter \(transformers is {transformers.__version__}\)"
    with (
        pytest.raises(ReplayError, match=message),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
        replay(doctored, ROWS),
    ):
        doctored(input_ids=tokens(11))


def test_a_copy_made_inside_the_block_is_a_normal_model(model: Any) -> None:
    """A copy or saved file of a model made inside the block is a normal model, which can itself be replayed."""
    before = run(model)
    file = io.BytesIO()
    with replay(model, ROWS):
        expected = run(model)
        copied = copy.deepcopy(model)
        torch.save(model, file)
        assert difference(before, run(copied)) == 0
        with replay(copied, ROWS):
            assert difference(expected, run(copied)) == 0
        assert difference(expected, run(model)) == 0
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert difference(before, run(other)) == 0
        with replay(other, ROWS):
            assert difference(expected, run(other)) == 0


def test_the_default_device_does_not_affect_replay(model: Any) -> None:
    """The default device does not affect replay, and the model is restored."""
    before, given = run(model), tokens(11)
    with replay(model, ROWS):
        expected = model(input_ids=given).logits
    with torch.device("meta"), replay(model, ROWS), torch.device("cpu"):
        assert torch.equal(model(input_ids=given).logits, expected)
    assert difference(before, run(model)) == 0


def test_no_cuda_graph_captures_the_rows_of_a_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA graph captures the rows of a block.

    torch.compile excludes the operator from CUDA graphs, and any other capture raises an error.
    """
    assert torch.Tag.cudagraph_unsafe in torch.ops.rollbus.replayed_experts.default.tags
    with replay(model, ROWS):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(ReplayError, match="without CUDA graphs"):
                model(input_ids=tokens(11))
        run(model)
