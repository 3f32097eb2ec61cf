"""Pure decisions of verl's adapter: options, sampling, rows, versions as steps. They need no verl."""

import itertools
from typing import Any

import numpy as np
import pytest

from rollbus import GenerateRequest, SamplingParams
from rollbus.bus.client.generation import Generation
from rollbus.integrations.verl.options import Options
from rollbus.integrations.verl.outputs import (
    SEPARATOR,
    RolloutFailed,
    Steps,
    merge_legs,
    output_fields,
    sampling_of,
    session_of,
)
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import InvalidRequest


def generation(versions: list[int], *, prompt: int = 3, start: int = 0, rows: int | None = None) -> Generation:
    """Return a generation with these versions of its tokens, and the number of rows that the row rule asks."""
    count = len(versions)
    request = GenerateRequest(prompt_token_ids=list(range(1, prompt + 1)), sampling=SamplingParams(max_tokens=9))
    number = max(prompt - start + count - 1, 0) if count else 0
    shape = (number if rows is None else rows, 2, 2)
    return Generation(
        request=request,
        request_id=request.request_id,
        child=0,
        prompt_len=prompt,
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        weight_versions=np.array(versions, np.int32),
        routed_experts=np.ones(shape, np.uint8),
        start=start,
        finish_reason=FinishReason.ABORT,
    )


def steps_of(**known: int) -> Steps:
    """Return steps with these versions: `v4=7` is step 7."""
    steps = Steps()
    for name, step in known.items():
        steps.add(int(name[1:]), step)
    return steps


def test_versions_become_steps_and_rows_keep_their_ids() -> None:
    """Tokens of two versions say both steps; rows are int16 from position 0; an abort says so."""
    found = output_fields(generation([4, 4, 6]), steps_of(v4=7, v5=8, v6=9), rows_dtype="int16", largest_id=15)
    assert found["extra_fields"] == {
        "global_steps": 9, "min_global_steps": 7, "max_global_steps": 9, "num_cached_tokens": None,
    }  # fmt: skip
    assert found["stop_reason"] == "aborted"
    assert found["routed_experts"].dtype == np.int16
    assert found["routed_experts"].shape == (5, 2, 2)
    assert found["log_probs"] == [-1.0] * 3


def test_a_request_aborted_before_its_first_token_has_the_latest_step_and_no_rows() -> None:
    """An aborted call without tokens has no rows, so that verl's client appends none."""
    found = output_fields(generation([]), steps_of(v4=7), rows_dtype="int16", largest_id=15)
    assert found["routed_experts"] is None
    assert found["token_ids"] == []
    assert found["extra_fields"]["global_steps"] == 7


@pytest.mark.parametrize(("rows", "start"), [(4, 0), (6, 0), (0, 0), (None, 1)])
def test_missing_rows_are_an_error(rows: int | None, start: int) -> None:
    """A hole in the rows is an error that says how many rows are needed. verl would fill it with zeros."""
    with pytest.raises(RolloutFailed, match="allowed: 5 rows from position 0"):
        output_fields(generation([4, 4, 4], rows=rows, start=start), steps_of(v4=7), rows_dtype="int16", largest_id=15)


def test_weights_of_another_trainer_are_an_error() -> None:
    """A version that this trainer did not publish has no step. Before the first publication no step is known."""
    with pytest.raises(RolloutFailed, match="version 5, which this trainer did not publish; published: 4 to 4"):
        output_fields(generation([4, 5]), steps_of(v4=7), rows_dtype=None, largest_id=None)
    found = output_fields(generation([5]), Steps(), rows_dtype=None, largest_id=None)
    assert found["extra_fields"]["global_steps"] is None


def test_a_resumed_sample_has_the_lowest_and_the_highest_step_of_its_calls() -> None:
    """Calls without tokens do not count, unless all are without."""
    legs = [
        (0, {"min_global_steps": 1, "max_global_steps": 1}),
        (2, {"min_global_steps": 2, "max_global_steps": 4}),
        (3, {"min_global_steps": 3, "max_global_steps": 3}),
    ]
    for order in itertools.permutations(legs):
        assert merge_legs(order) == {"min_global_steps": 2, "max_global_steps": 4}
    assert merge_legs(legs[:1]) == {"min_global_steps": 1, "max_global_steps": 1}
    assert merge_legs([(1, {"min_global_steps": None})]) == {}


def test_the_turns_of_a_sample_are_one_session() -> None:
    """The request id of verl, which the turns share, makes the session; two samples differ."""
    assert session_of(f"sample{SEPARATOR}turn 1") == session_of(f"sample{SEPARATOR}turn 2")
    assert session_of("sample") != session_of("another")


SETTINGS: dict[str, Any] = {"default_tokens": 8, "room": 20, "ignore_eos": False}


def test_sampling_is_that_of_verl() -> None:
    """The names and values of verl become those of rollbus; the length is within the context."""
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    found = sampling_of(asked, **SETTINGS)
    assert (found.temperature, found.top_p, found.logprobs, found.max_tokens) == (0.5, 0.9, 0, 8)
    assert sampling_of({"logprobs": False}, **SETTINGS).logprobs is None
    assert sampling_of({"max_new_tokens": 5}, **SETTINGS).max_tokens == 5
    assert sampling_of({"max_tokens": 100}, **SETTINGS).max_tokens == 20
    assert sampling_of({"max_tokens": 0}, **SETTINGS).max_tokens == 1
    assert asked["logprobs"] is True, "verl's own dict is unchanged"


@pytest.mark.parametrize(
    ("asked", "room", "message"),
    [
        ({"stop": ["</answer>"]}, 20, "sampling_params.stop is not supported"),
        ({"n": 2}, 20, "sampling_params.n is not supported"),
        ({"temperature": 9}, 20, "temperature"),
        ({}, 0, "prompt_ids leave 0 tokens of the context; allowed: at least 1"),
    ],
)
def test_wrong_sampling_is_named(asked: dict[str, object], room: int, message: str) -> None:
    """A parameter without a counterpart is an error, not silently dropped."""
    with pytest.raises(InvalidRequest, match=message):
        sampling_of(asked, default_tokens=8, room=room, ignore_eos=False)


def test_options_come_from_the_path_of_the_model() -> None:
    """Without options, the served name is the directory of verl's model, and its checkpoint is the path."""
    found = Options.parse({"vllm": {"x": 1}}, "/models/policy")
    assert (found.model, found.checkpoint, found.update, found.min) == ("policy", "/models/policy", "abort", None)
    assert Options.parse({"rollbus": {"min": 2, "update": "keep"}}, "/models/policy").min == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nats": "x"}, "engine_kwargs.rollbus.nats is no option; allowed: url, fleet"),
        ({"update": "wait"}, "engine_kwargs.rollbus.update is 'wait'; allowed: abort or keep"),
        ({"min": 0}, "engine_kwargs.rollbus.min"),
        ({"url": 4222}, "engine_kwargs.rollbus.url is"),
        ({"rows": "int4"}, "have the dtype 'int4'"),
        ({"update_timeout_s": "soon"}, "engine_kwargs.rollbus.update_timeout_s"),
        ("nats://x", "engine_kwargs.rollbus is"),
    ],
)
def test_wrong_options_are_named(options: object, message: str) -> None:
    """An unknown option or a wrong value is an error with the allowed ones."""
    with pytest.raises(InvalidRequest, match=message):
        Options.parse({"rollbus": options}, "/models/policy")
