"""The results of replay for each model family."""

import copy
import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollbus.trainer.errors import ReplayError
from rollbus.trainer.replay import SUPPORTED, replay
from tests.trainer.models import (
    FAMILIES,
    NUM_EXPERTS,
    build,
    difference,
    moe_blocks,
    own_rows,
    random_rows,
    router_of,
    run,
    seen,
    tokens,
)

each_family = pytest.mark.parametrize("family", FAMILIES)


def naive_weights(family: str, router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Return the weights f[K] of one token from logits f[E] and ids i[K] by the family's published formula."""
    shares, each = logits.exp() / logits.exp().sum(), 1 / (1 + (-logits).exp())
    scale = float(getattr(router, "routed_scaling_factor", 1))
    match family:
        case "qwen3_moe" | "mixtral" | "gpt_oss" | "granitemoe":
            # Shares among all experts, renormalized, equal shares among the chosen experts.
            return shares[ids] / shares[ids].sum()
        case "qwen3_moe-plain" | "qwen2_moe" | "olmoe":
            return shares[ids]
        case "deepseek_v2":
            return shares[ids] * scale
        case "deepseek_v3" | "glm4_moe":
            return each[ids] / each[ids].sum() * scale
        case "minimax_m2":
            return each[ids] / each[ids].sum()
    raise AssertionError(family)


@pytest.mark.slow
@each_family
def test_own_routing_changes_nothing(family: str) -> None:
    """In float32, a model that replays its own choice has the same results in the forward and backward pass."""
    model = build(family)
    expected, rows = run(model, batch=2), own_rows(model, 11, batch=2)
    with replay(model, rows):
        assert difference(expected, run(model, batch=2)) < 1e-6
    with replay(model, rows.flip(-1).to(torch.int32)):
        assert difference(expected, run(model, batch=2)) < 1e-5
    assert difference(expected, run(model, batch=2)) == 0


@pytest.mark.proves("P23")
@pytest.mark.slow
@each_family
def test_given_experts_are_used(family: str) -> None:
    """Each layer's output is the sum over the given experts, weighted by the family's formula."""
    model = build(family)
    blocks = moe_blocks(model)
    rows = random_rows(5, len(blocks))
    with seen(model) as calls, replay(model, rows), torch.no_grad():
        model(input_ids=tokens(5))
    for layer, (block, call) in enumerate(zip(blocks, calls, strict=True)):
        for token in range(5):
            ids = rows[0, token, layer].long()
            weights = naive_weights(family, router_of(block), call["logits"][token].float(), ids)
            expected = torch.zeros(32)
            for expert, weight in zip(ids, weights, strict=True):
                alone = block.experts(call["input"][token][None], expert[None, None], torch.ones(1, 1))  # type: ignore[operator]
                expected += weight * alone[0].detach()
            torch.testing.assert_close(call["output"][token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.proves("P23")
@pytest.mark.slow
@each_family
def test_gradients_reach_the_routers(family: str) -> None:
    """A router's gradient equals the change of the loss when its weights move and the experts stay fixed."""
    model = build(family, experts_implementation="eager").double()
    routers = [router_of(block) for block in moe_blocks(model)]
    rows = random_rows(7, len(routers))

    def loss() -> Any:
        return model(input_ids=tokens(7)).logits.double().logsumexp(-1).sum()

    with replay(model, rows):
        loss().backward()
        for router in routers:
            weight: Any = router.weight
            assert weight.grad.abs().max() > 0
            # Along the gradient the loss changes most, far above the single-precision noise inside some routers. A
            # random
            # direction may be almost flat.
            step = weight.grad * (1e-2 / weight.grad.abs().max())
            slopes = []
            with torch.no_grad():
                for sign in (1, -2):
                    weight += sign * step
                    slopes.append(loss())
                weight += step
            moved = (slopes[0] - slopes[1]).item() / 2
            assert moved == pytest.approx(float((weight.grad * step).sum()), rel=5e-3)


@pytest.mark.slow
@each_family
def test_minus_one_leaves_the_choice_to_the_router(family: str) -> None:
    """A row of -1 lets the router choose; other rows use the given experts."""
    model = build(family)
    rows = random_rows(6, len(moe_blocks(model)))
    rows[0, 2:4] = -1
    with seen(model) as calls, replay(model, rows), torch.no_grad():
        model(input_ids=tokens(6))
    for layer, call in enumerate(calls):
        assert torch.equal(call["ids"][2:4], call["own_ids"][2:4])
        assert torch.equal(call["weights"][2:4], call["own_weights"][2:4])
        given = [0, 1, 4, 5]
        assert torch.equal(call["ids"][given], rows[0, given, layer].long())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_moe-plain"])
def test_rows_of_all_hidden_layers_equal_rows_of_the_layers_with_experts(family: str) -> None:
    """Rows of all hidden layers, as vLLM returns them, have the same effect as rows of the layers with experts only."""
    model = build(family)
    rows = random_rows(11, 2)
    with_experts = [0, 2] if family == "qwen3_moe-plain" else [1, 2]
    as_vllm = torch.zeros(1, 11, 3, rows.shape[3], dtype=torch.int16)
    as_vllm[:, :, with_experts] = rows
    with replay(model, rows):
        expected = run(model)
    with replay(model, as_vllm):
        assert difference(expected, run(model)) == 0
    assert difference(expected, run(model)) > 1e-3


@pytest.mark.slow
def test_every_supported_router_has_its_formula() -> None:
    """The formula of each supported router gives the same weights as the router itself."""
    import transformers

    sources = {path: path.read_text() for path in Path(transformers.__path__[0], "models").glob("*/modeling_*.py")}
    config = SimpleNamespace(
        hidden_size=16, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=2, topk_group=1, topk_method="greedy"
    )
    config.num_experts = config.num_local_experts = config.n_routed_experts = NUM_EXPERTS
    config.num_experts_per_tok = 3
    for name, formula in SUPPORTED.items():
        path = next(path for path, source in sources.items() if re.search(rf"^class {name}\(", source, re.MULTILINE))
        package = f"transformers.models.{path.parent.name}.{path.stem}"
        kind = getattr(__import__(package, fromlist=[name]), name)
        for config.norm_topk_prob in (True, False):
            router = kind(config)
            with torch.no_grad():
                for tensor in (*router.parameters(), *router.buffers()):
                    tensor.normal_()
                bias = [torch.randn(NUM_EXPERTS)] if name == "MiniMaxM2TopKRouter" else []
                for dtype in (torch.float32, torch.bfloat16):
                    hidden = torch.randn(9, 16, dtype=dtype)
                    logits, weights, ids = router.to(dtype)(hidden, *bias)
                    assert torch.equal(formula.weights(router, logits, ids).to(weights.dtype), weights), name


# Replay checks the model while it runs, and leaves no trace after the block.


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
