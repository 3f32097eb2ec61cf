"""What slime's samples have after an answer, and the request, version and settings that are made from its values."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollbus.bus.client.generation import Generation
from rollbus.bus.protocol.stream.result_arrays import TokenMasks
from rollbus.integrations.slime import samples
from rollbus.integrations.slime.connection import Settings, read_settings
from rollbus.integrations.slime.weights import check_arguments, rank_of, version_of
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.request import GenerateRequest
from tests.integrations.slime_standin import Sample, Status, arguments

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": None, "stop_token_ids": None}
OF_TEXT = {"skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False}
ARGS = arguments("none")


def answer(request: GenerateRequest, new: list[int], reason: str = "stop", version: int = 3, **more: Any) -> Generation:
    """Return the answer of an engine to a request."""
    start = request.routed_experts_prompt_start
    rows = np.arange((request.prompt_len - start + len(new) - 1) * 16, dtype=np.uint8).reshape(-1, 4, 4) % 16
    fields: dict[str, Any] = {
        "request": request,
        "request_id": request.request_id,
        "child": 0,
        "prompt_len": request.prompt_len,
        "token_ids": np.array(new, np.int32),
        "logprobs": -np.arange(len(new), dtype=np.float32),
        "weight_versions": np.full(len(new), version, np.int32),
        "routed_experts": rows if request.return_routed_experts else None,
        "start": start,
        "finish_reason": FinishReason(reason),
        "worker_ids": ("w0",),
    }
    return Generation(**{**fields, **more})


def ask(args: Namespace, sample: Any, **params: Any) -> GenerateRequest:
    """Return the request for the rest of a sample."""
    sampling = samples.sampling_of({**PARAMS, **params}, sample.response_length)
    tokens = samples.prompt_of(sample, lambda text: [ord(letter) for letter in text])
    return samples.request_of(args, sample, sampling, tokens, Settings(), evaluation=False)


def test_the_first_answer_fills_a_sample() -> None:
    """Tokens, mask, log probabilities, rows in int32, versions and status are those of the answer."""
    sample = Sample(prompt="abc", group_index=7, metadata={"source": "mine"})
    request = ask(ARGS, sample)
    generation = answer(request, [5, 6], weight_versions=np.array([3, 4], np.int32), cached_tokens=2)

    samples.fill(ARGS, sample, generation, "xy")

    assert (request.group_id, request.return_routed_experts, request.return_sampling_mask) == ("slime-7", True, False)
    assert (sample.tokens, sample.response, sample.response_length) == ([97, 98, 99, 5, 6], "xy", 2)
    assert (sample.loss_mask, sample.rollout_log_probs, sample.status) == ([1, 1], [0.0, -1.0], Status.COMPLETED)
    assert sample.rollout_routed_experts.dtype == torch.int32
    assert sample.rollout_routed_experts.tolist() == generation.routed_experts.tolist()
    assert sample.weight_versions == ["3", "4"]
    assert sample.metadata == {
        "source": "mine",
        "rollbus": {"weight_versions": [3, 4], "attempts": 1, "workers": ["w0"]},
    }
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (2, 3)


def test_an_aborted_sample_continues_with_the_rows_that_are_missing() -> None:
    """The next request has the tokens so far, the rest of the length and the first missing row.

    Rows join without a gap.
    """
    sample = Sample(prompt="abc")
    samples.fill(ARGS, sample, answer(ask(ARGS, sample), [5, 6], "abort"), "xy")
    assert sample.status is Status.ABORTED
    first = sample.rollout_routed_experts

    request = ask(ARGS, sample, min_new_tokens=3)
    samples.fill(ARGS, sample, answer(request, [8], "length", version=4), "z")

    assert list(request.prompt_token_ids) == [97, 98, 99, 5, 6]
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (6, 1)
    assert (request.routed_experts_prompt_start, request.group_id) == (4, None)
    assert (sample.tokens[3:], sample.response, sample.status) == ([5, 6, 8], "xyz", Status.TRUNCATED)
    assert (sample.loss_mask, sample.weight_versions) == ([1, 1, 1], ["3", "4"])
    assert sample.metadata["rollbus"]["weight_versions"] == [3, 3, 4]
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
    assert torch.equal(sample.rollout_routed_experts[:4], first)


def test_an_agent_may_append_tokens_of_a_tool_between_two_answers() -> None:
    """Appended tokens keep mask 0, have no version, and get the rows of the next answer."""
    sample = Sample(prompt="abc")
    samples.fill(ARGS, sample, answer(ask(ARGS, sample), [5, 6]), "xy")
    sample.tokens += [7, 7, 7]
    sample.response_length += 3
    sample.loss_mask += [0, 0, 0]
    sample.rollout_log_probs += [0.0, 0.0, 0.0]

    request = ask(ARGS, sample)
    samples.fill(ARGS, sample, answer(request, [9], version=4), "z")

    assert request.routed_experts_prompt_start == 4
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.metadata["rollbus"]["weight_versions"] == [3, 3, -1, -1, -1, 4]
    assert sample.rollout_routed_experts.shape == (8, 4, 4)


def test_with_top_p_each_token_gets_the_ids_from_which_it_was_sampled() -> None:
    """The ids and offsets of two answers are joined in slime's form; an evaluation asks for none."""
    args = arguments("none", rollout_top_p=0.9, use_rollout_routing_replay=False)
    sample = Sample(prompt="abc")
    first = TokenMasks(np.array([2, 1], np.int32), np.array([5, 1, 6], np.int32))
    second = TokenMasks(np.array([3], np.int32), np.array([8, 2, 3], np.int32))

    samples.fill(args, sample, answer(ask(args, sample), [5, 6], "abort", sampling_mask=first), "")
    samples.fill(args, sample, answer(ask(args, sample), [8], sampling_mask=second), "")

    assert sample.rollout_top_p_token_ids.tolist() == [5, 1, 6, 8, 2, 3]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3, 6]
    assert sample.rollout_routed_experts is None
    assert not samples.needs_masks(args, evaluation=True)


@pytest.mark.parametrize(
    ("changes", "args", "field"),
    [
        ({"routed_experts": None}, {}, "routed_experts"),
        ({"routed_experts": np.zeros((3, 4, 4), np.uint8)}, {}, "routed_experts"),
        ({"routed_experts": np.full((4, 4, 4), 16, np.uint8)}, {}, "routed_experts"),
        ({}, {"num_layers": 5}, "routed_experts"),
        ({"logprobs": None}, {}, "rollout_log_probs"),
        ({"sampling_mask": None}, {"rollout_top_p": 0.9}, "sampling_mask"),
    ],
)
def test_a_wrong_answer_leaves_the_sample_as_it_was(changes: dict[str, Any], args: dict[str, Any], field: str) -> None:
    """Missing or wrong rows, log probabilities and masks are errors, never zeros, and change nothing."""
    own, sample = arguments("none", **args), Sample(prompt="abc")
    request = ask(own, sample)

    with pytest.raises(InvalidRequest) as error:
        samples.fill(own, sample, answer(request, [5, 6], **changes), "xy")

    assert error.value.field == field
    assert sample == Sample(prompt="abc")


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ["a"]}, "stop"),
        ({"json_schema": "{}"}, "sampling_params.json_schema"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
        ({"max_new_tokens": 3}, "max_new_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
    ],
)
def test_wrong_sampling_parameters_are_rejected_by_name(params: dict[str, Any], field: str) -> None:
    """Stop strings, unknown names and lengths below the present response are rejected."""
    with pytest.raises(InvalidRequest) as error:
        samples.sampling_of({**PARAMS, **OF_TEXT, **params}, 4)

    assert error.value.field == field


def test_slimes_and_vimes_sampling_parameters_have_their_meaning() -> None:
    """Seeds, lengths and penalties get rollbus's names; at the whole length nothing is left to generate."""
    found = samples.sampling_of({**PARAMS, **OF_TEXT, "sampling_seed": 7, "min_new_tokens": 5}, 2)

    assert (found.max_tokens, found.min_tokens, found.seed, found.logprobs) == (6, 3, 7, 0)
    assert samples.sampling_of({**PARAMS, "seed": 3, "repetition_penalty": 1.1}, 0).seed == 3
    assert samples.sampling_of(PARAMS, 8) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"multimodal_inputs": {"images": ["a"]}}, "multimodal_inputs"),
        ({"tokens": [1, 2], "rollout_routed_experts": np.zeros((2, 4, 4), np.int32)}, "rollout_routed_experts"),
    ],
)
def test_samples_that_cannot_be_generated_are_rejected(changes: dict[str, Any], field: str) -> None:
    """Conversations, images and more rows than positions are rejected before a request."""
    with pytest.raises(InvalidRequest) as error:
        ask(ARGS, replace(Sample(), **changes))

    assert error.value.field == field


@pytest.mark.parametrize(
    ("folder", "present", "expected"),
    [
        ("/w/weight_v000012", 11, (12, None)),
        ("/w/weight_v000012/", 3, (12, None)),
        ("/w/weight_v000001", 50, (51, "1")),
        ("/w/weight_v000050", 50, (51, "50")),
    ],
)
def test_slimes_number_becomes_the_version_or_the_label(
    folder: str, present: int, expected: tuple[int, str | None]
) -> None:
    """A number above the fleet's version is the version. A later run counts from 1 again: its number is the label."""
    assert version_of(folder, present) == expected


@pytest.mark.parametrize(
    "folder", ["/w/step_3", "/w/weight_v", "/w/weight_v9223372036854775807x", "weight_v" + "9" * 18]
)
def test_folders_without_a_usable_number_are_rejected(folder: str) -> None:
    """Another name, or a number above the largest version, is an error."""
    with pytest.raises(InvalidRequest, match="version_dir"):
        version_of(folder, 0)


def test_arguments_for_the_fleet_are_checked(tmp_path: Path) -> None:
    """Unknown and wrong `rollbus_*` values are errors with the name; slime's own deltas are no checkpoints."""
    assert read_settings(Namespace(rollbus_fleet="f", rollbus_timeout_s=2, lr=1)) == Settings(fleet="f", timeout_s=2.0)
    for wrong in ({"rollbus_flet": "f"}, {"rollbus_nats": 3}, {"rollbus_timeout_s": 0}, {"rollbus_concurrency": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            read_settings(Namespace(**wrong))
    with pytest.raises(InvalidRequest, match="update_weight_mode"):
        check_arguments(arguments(tmp_path, update_weight_mode="delta"))
    assert (rank_of({}), rank_of({"RANK": "3"})) == (0, 3)
