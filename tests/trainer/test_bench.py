"""The formats that `bench.trainer` compares yield the same tensors."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("pybase64", reason="comes with vLLM")

from bench.trainer import (
    MAX_TOKENS,
    WAYS,
    check_linear,
    differences,
    make_conversation,
    make_rollout,
    measure_conversations,
    peak_of,
    read_messages,
    stitch_and_pack,
    tensor_bytes,
    write_messages,
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


def test_streamed_rollouts_have_a_frame_per_token_and_merged_rollouts_few() -> None:
    """Streamed rollouts have at least a frame per token, and merged rollouts have fewer than 10 frames."""
    rollout = make_rollout(900, 400)
    assert len(WAYS["rollbus-streamed"].write(rollout)) >= 500
    assert len(WAYS["rollbus-merged"].write(rollout)) < 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_measured_peak_memory_includes_the_tensors(tmp_path: Path) -> None:
    """Messages pass through a file unchanged, and a separate process measures the peak memory of reading them."""
    rollout, way = make_rollout(8000, 7900), "rollbus-merged"
    messages = WAYS[way].write(rollout)
    write_messages(tmp_path / "messages", messages)
    assert list(read_messages(tmp_path / "messages")) == messages
    tensors = tensor_bytes(WAYS[way].read(rollout.prompt, messages))
    assert tensors < peak_of(way, messages, 7900) < 5 * tensors


def test_conversations_are_stitched_and_packed_whole() -> None:
    """Stitching and packing keep each prediction of a conversation."""
    batches = stitch_and_pack([make_conversation(index, 100) for index in range(5)])
    assert sum(int((batch.sample_indices >= 0).sum()) for batch in batches) == 5 * 99
    assert all(batch.input_ids.shape[1] <= MAX_TOKENS for batch in batches)
    found = measure_conversations(5, 100, rounds=1)
    assert found["batches"] == len(batches)


def test_the_linear_fit_has_an_error_only_for_times_that_are_not_linear() -> None:
    """The linear fit has no error for linear times, and a large error for times that grow quadratically."""
    sizes = [50.0, 100.0, 200.0, 400.0]
    straight = check_linear(sizes, [3 * size + 7 for size in sizes])
    assert straight["ms_per_mb"] == pytest.approx(3)
    assert straight["ms_at_0_mb"] == pytest.approx(7)
    assert straight["off_percent"] == pytest.approx(0, abs=1e-6)
    bent = check_linear(sizes, [size * size for size in sizes])
    assert isinstance(bent["off_percent"], float)
    assert bent["off_percent"] > 20
