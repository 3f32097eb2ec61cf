"""Replay rejects invalid rows and models, and leaves models unchanged."""

import functools
import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rollbus.trainer.errors import ReplayError
from rollbus.trainer.replay import replay
from tests.trainer.models import build, difference, moe_blocks, random_rows, router_of, run, seen, tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a model, which each test leaves unchanged."""
    return build(num_layers=2)


def changed(place: tuple[int, int, int], ids: list[int], *, dtype: torch.dtype = torch.int16) -> Tensor:
    """Return rows for 5 tokens with one changed row."""
    rows = random_rows(5, 2).to(dtype)
    rows[place] = torch.tensor(ids, dtype=dtype)
    return rows


FAULTS: dict[str, tuple[Tensor, str]] = {
    "dimensions": (torch.zeros(5, 2, 3, dtype=torch.int16), "[5, 2, 3] of torch.int16; allowed: a tensor [batch, "),
    "dtype": (torch.zeros(1, 5, 2, 3), "[1, 5, 2, 3] of torch.float32; allowed: a tensor [batch, "),
    "unsigned": (
        random_rows(5, 2).to(torch.uint16),
        "of torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64",
    ),
    "numpy": (cast(Tensor, random_rows(5, 2).numpy()), "are a numpy.ndarray [1, 5, 2, 3] of int16; allowed: a tensor"),
    "layers": (random_rows(5, 3), "rows have 3 layers, the model has 2, of which 2 have experts"),
    "top_k": (random_rows(5, 2)[..., :2], "rows have 2 experts a layer; the model's top_k is 3"),
    "too high": (
        changed((0, 3, 1), [0, 8, 2]),
        "position 3, model.layers.1.mlp.gate: experts [0 8 2]; allowed: 0 to 7",
    ),
    "too high for bytes": (
        changed((0, 0, 0), [0, 255, 2], dtype=torch.uint8),
        "experts [  0 255   2]; allowed: 0 to 7",
    ),
    "too low": (changed((0, 4, 0), [-2, -2, -2]), "position 4, model.layers.0.mlp.gate: experts [-2 -2 -2]; allowed"),
    "mixed": (
        changed((0, 1, 0), [0, -1, 2]),
        "experts [ 0 -1  2]; allowed: -1 for all of a row's experts, or for none",
    ),
    "zeros": (
        changed((0, 2, 1), [0, 0, 0]),
        "position 2, model.layers.1.mlp.gate: experts [0 0 0]; allowed: different",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_rows_that_do_not_fit_the_model_are_rejected_with_their_position(model: Any, fault: str) -> None:
    """Rows of another model and rows that no router can have chosen are rejected with their position."""
    rows, message = FAULTS[fault]
    with pytest.raises(ReplayError, match=re.escape(message)), replay(model, rows):
        pass
    assert difference(run(model), run(model)) == 0


def test_a_batch_without_routed_experts_is_an_error(model: Any) -> None:
    """A batch without routed experts raises an error instead of using other experts than the worker."""
    with pytest.raises(ReplayError, match="no routed experts"), replay(model, None):
        pass


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_rows_of_any_integer_dtype_have_the_same_effect(model: Any, dtype: torch.dtype) -> None:
    """Rows of any integer dtype have the same effect."""
    rows = random_rows(11, 2)
    with replay(model, rows):
        expected = run(model)
    with replay(model, rows.to(dtype)):
        assert difference(expected, run(model)) == 0


def test_a_forward_pass_needs_as_many_rows_as_tokens(model: Any) -> None:
    """A forward pass with more or fewer tokens than rows is an error."""
    for batch, num_tokens in ((1, 10), (1, 12), (2, 11)):
        with (
            pytest.raises(ReplayError, match=f"called with {batch * num_tokens} tokens"),
            replay(model, random_rows(11, 2)),
        ):
            run(model, num_tokens, batch=batch)


def test_blocks_for_one_model_do_not_nest(model: Any) -> None:
    """A second block for the same model is rejected, and the first block continues to work."""
    rows = random_rows(11, 2)
    with replay(model, rows):
        expected = run(model)
        with pytest.raises(ReplayError, match="do not nest"), replay(model, rows.flip(1)):
            pass
        assert difference(expected, run(model)) == 0


def test_two_models_can_be_replayed_at_the_same_time(model: Any) -> None:
    """Two models, such as a policy and its reference, can be replayed at the same time."""
    other = build("mixtral")
    rows, other_rows = random_rows(11, 2), random_rows(11, 3)
    with replay(model, rows):
        expected = run(model)
    with replay(model, rows), replay(other, other_rows):
        run(other)
        assert difference(expected, run(model)) == 0


def test_a_model_is_restored_after_an_error(model: Any) -> None:
    """After an error in the block, the routers are the same objects with the same classes and state as before."""
    before, routers = run(model), [router_of(block) for block in moe_blocks(model)]
    classes, states = [type(router) for router in routers], [dict(vars(router)) for router in routers]
    with pytest.raises(ZeroDivisionError), replay(model, random_rows(11, 2)):
        run(model, 11 // 0)
    assert [router_of(block) for block in moe_blocks(model)] == routers
    assert [type(router) for router in routers] == classes
    assert [dict(vars(router)) for router in routers] == states
    assert difference(before, run(model)) == 0


def test_replay_does_not_show_in_checkpoints(model: Any) -> None:
    """A model saved inside a block has the same state dict keys as outside."""
    expected = model.state_dict()
    with replay(model, random_rows(11, 2)):
        assert model.state_dict().keys() == expected.keys()
        run(model)


def test_a_model_without_known_routers_is_rejected() -> None:
    """A dense model and a model with an unknown router are rejected with a reference to the supported routers."""

    class StrangeRouter(nn.Module):
        pass

    with pytest.raises(ReplayError, match=r"Linear has no router .* allowed: .* rollbus\.trainer\.replay\.SUPPORTED"):
        replay(nn.Linear(2, 2), random_rows(5, 2)).__enter__()
    model = build(num_layers=2)
    model.model.layers[1].mlp.gate = StrangeRouter()
    with pytest.raises(ReplayError, match=r"layers.1.mlp.gate is a StrangeRouter, .* allowed: .*SUPPORTED"):
        replay(model, random_rows(5, 2)).__enter__()


def test_a_router_subclass_with_its_own_forward_is_rejected(model: Any) -> None:
    """A router subclass with its own forward is rejected, because its formula is unknown."""
    router = router_of(moe_blocks(model)[0])
    kind = type(router)
    router.__class__ = type("AnotherRouter", (kind,), {"forward": kind.forward})
    try:
        with pytest.raises(ReplayError, match="AnotherRouter"):
            replay(model, random_rows(5, 2)).__enter__()
    finally:
        router.__class__ = kind


def test_a_model_with_two_stacks_of_layers_is_rejected() -> None:
    """A model with two stacks of layers is rejected, because it has no single row per layer."""
    both = nn.ModuleDict({"policy": build(num_layers=2), "reference": build(num_layers=2)})
    with pytest.raises(ReplayError, match="one stack of layers"):
        replay(both, random_rows(5, 2)).__enter__()


def test_a_block_without_a_call_of_each_router_is_an_error(model: Any) -> None:
    """A block that ends without a call of each router raises an error.

    Either the caller was wrong, or a kernel did the router's work.
    """
    with pytest.raises(ReplayError, match=r"2 of 2 routers were not called"), replay(model, random_rows(5, 2)):
        pass
    block = moe_blocks(model)[1]
    forward = block.forward
    block.forward = lambda hidden: hidden
    try:
        with pytest.raises(ReplayError, match=r"1 of 2 .* model.layers.1.mlp.gate"), replay(model, random_rows(11, 2)):
            run(model)
    finally:
        del block.forward
    assert block.forward == forward


def test_wrapped_routers_and_forwards_are_replayed(model: Any) -> None:
    """Routers with parametrized weights or an own forward of the instance (accelerate) are replayed as usual."""
    rows = random_rows(11, 2)
    with replay(model, rows):
        expected = run(model)["logits"]
    one, two = (router_of(block) for block in moe_blocks(model))
    parametrize.register_parametrization(one, "weight", nn.Identity())
    forward = two.forward
    two.forward = functools.partial(forward)
    try:
        with replay(model, rows):
            assert torch.equal(run(model)["logits"], expected)
    finally:
        del two.forward
        parametrize.remove_parametrizations(one, "weight")


def test_replay_works_in_mixed_precision(model: Any) -> None:
    """Under autocast and in bfloat16, replay of the own choice changes nothing, and given experts are used."""
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, False)):
        precise = build(num_layers=2).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            with seen(precise) as calls:
                expected = precise(input_ids=tokens(11)).logits
            rows = torch.stack([call["own_ids"] for call in calls], dim=1)[None]
            with replay(precise, rows):
                assert torch.equal(precise(input_ids=tokens(11)).logits, expected)
            with seen(precise) as calls, replay(precise, random_rows(11, 2)):
                precise(input_ids=tokens(11))
            assert torch.equal(calls[1]["ids"], random_rows(11, 2)[0, :, 1].long())
