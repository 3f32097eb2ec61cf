"""The formats that `bench.trainer` compares yield the same tensors."""

import pytest

pytest.importorskip("pybase64", reason="comes with vLLM")

from bench.trainer import (
    WAYS,
    differences,
    make_rollout,
)
from rollbus.trainer import MicroBatch

HTTP = [name for name in WAYS if not name.startswith("rollbus")]


@pytest.mark.parametrize(("num_tokens", "num_prompt"), [(2, 1), (40, 1), (40, 39), (900, 400)])
@pytest.mark.parametrize("ours", ["rollbus-streamed", "rollbus-merged"])
@pytest.mark.parametrize("theirs", HTTP)
def test_all_formats_yield_the_same_tensors(ours: str, theirs: str, num_tokens: int, num_prompt: int) -> None:
    """All formats yield the same tensors bit for bit, for all tested lengths."""
    rollout = make_rollout(num_tokens, num_prompt)
    batch, tensors = (WAYS[name].read(rollout.prompt, WAYS[name].write(rollout)) for name in (ours, theirs))
    assert isinstance(batch, MicroBatch)
    assert isinstance(tensors, dict)
    assert differences(batch, tensors) == []


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "loss_mask", "advantages", "logprobs", "routed_experts"])
def test_a_difference_in_any_tensor_is_detected(name: str) -> None:
    """The comparison finds a difference in any tensor."""
    rollout = make_rollout(40, 20)
    batch, tensors = (WAYS[way].read(rollout.prompt, WAYS[way].write(rollout)) for way in ("rollbus-merged", "json"))
    assert isinstance(batch, MicroBatch)
    assert isinstance(tensors, dict)
    tensor = tensors[name]
    tensor[0, 30] = ~tensor[0, 30] if name == "loss_mask" else tensor[0, 30] + 1
    assert name in differences(batch, tensors)
