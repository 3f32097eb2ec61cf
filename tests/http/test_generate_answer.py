"""The JSON of `/inference/v1/generate` for handmade results."""

import asyncio
import base64
import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbus
from rollbus.frontend.http.answers import AnswerChoice
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.generate import GENERATE
from rollbus.frontend.http.openai.requests import Options
from rollbus.frontend.http.requests import RequestTarget
from rollbus.frontend.http.tokens import ENCODED_BYTES, Tokens, routed_experts_json
from rollbus.frontend.http.writer import AnswerWriter
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.support.presences import presence

MODEL = SyntheticConfig().capabilities
TARGET = RequestTarget(worker=presence(capabilities=MODEL), capabilities=MODEL, lora=None)
WANTED = rollbus.GenerateRequest(
    prompt_token_ids=[1, 2, 3], sampling=rollbus.SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1)
)
RESULT = rollbus.Generation(
    request=WANTED,
    request_id=WANTED.request_id,
    child=0,
    prompt_len=3,
    token_ids=np.array([7, 8], np.int32),
    logprobs=np.array([-0.5, -3.0], np.float32),
    weight_versions=np.zeros(2, np.int32),
    routed_experts=np.zeros((4, 4, 4), np.uint8),
    start=0,
    finish_reason=rollbus.FinishReason.LENGTH,
    top_token_ids=np.array([[7], [9]], np.int32),
    top_logprobs=np.array([[-0.5], [-0.25]], np.float32),
    prompt_logprobs=np.array([-1.0, -math.inf], np.float32),
    prompt_top_token_ids=np.array([[2], [4]], np.int32),
    prompt_top_logprobs=np.array([[-1.0], [-0.125]], np.float32),
)


def answer(**changes: Any) -> Any:
    """Return the response of the result with some fields changed."""
    choice = AnswerChoice(0, WANTED, None, keep=True)
    choice.add(Tokens.of_generation(dataclasses.replace(RESULT, **changes), WANTED))
    options = Options(
        text=False,
        stops=(),
        include_stop=False,
        skip_special_tokens=True,
        top_logprobs=1,
        token_ids=False,
        as_token_ids=True,
        extra=frozenset(),
        routed_experts=True,
        as_json=routed_experts_json,
        usage=False,
        continuous_usage=False,
    )
    writer = AnswerWriter(shape=GENERATE, target=TARGET, tokenizer=None, requests=[WANTED], options=options, names={})
    return json.loads(b"".join(asyncio.run(writer.answer_json([choice]))))


def test_the_sampled_token_comes_first_among_its_top_logprobs() -> None:
    """The sampled token comes first among its top logprobs. Prompt logprobs have known ranks and a number for -inf."""
    body = answer()

    assert [
        (entry["token"], entry["logprob"], [top["token"] for top in entry["top_logprobs"]])
        for entry in body["choices"][0]["logprobs"]["content"]
    ] == [("token_id:7", -0.5, ["token_id:7"]), ("token_id:8", -3.0, ["token_id:8"])]
    assert body["prompt_logprobs"] == [
        None,
        {"2": {"logprob": -1.0, "rank": 1, "decoded_token": None}},
        {
            "3": {"logprob": -9999.0, "rank": None, "decoded_token": None},
            "4": {"logprob": -0.125, "rank": 1, "decoded_token": None},
        },
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": RESULT.logprobs[:1]},
        {"logprobs": None},
        {"logprobs": np.array([-0.5, np.nan], np.float32)},
        {"top_logprobs": RESULT.top_logprobs[:1]},
        {"prompt_logprobs": RESULT.prompt_logprobs[:1]},
        {"prompt_logprobs": None},
        {"prompt_logprobs": np.array([-0.5, np.inf], np.float32)},
        {"routed_experts": None},
        {"routed_experts": np.zeros((3, 4, 4), np.uint8)},
    ],
)
def test_results_that_do_not_match_their_tokens_give_502(changes: dict[str, Any]) -> None:
    """Results that do not match their tokens give 502 before the first byte."""
    with pytest.raises(HttpError) as error:
        answer(**changes)
    assert (error.value.status, error.value.code) == (502, "protocol_error")


def test_a_completion_without_tokens_is_valid() -> None:
    """A completion without tokens has empty lists and rows of the model's shape."""
    empty = dict.fromkeys(("logprobs", "top_token_ids", "top_logprobs", "routed_experts", "prompt_logprobs"))
    body = answer(token_ids=np.empty(0, np.int32), finish_reason=rollbus.FinishReason.ABORT, **empty)

    (choice,) = body["choices"]
    assert (choice["token_ids"], choice["logprobs"], choice["finish_reason"]) == ([], {"content": []}, "abort")
    assert choice["routed_experts"] == {"data": "", "shape": [0, 4, 4], "start": 0, "dtype": "uint8"}
    assert body["prompt_logprobs"] is None


def test_a_response_of_several_blocks_is_complete() -> None:
    """A response with more tokens than one block holds is complete."""
    count = 2500
    body = answer(
        token_ids=np.arange(count, dtype=np.int32),
        routed_experts=np.zeros((count + 2, 4, 4), np.uint8),
        logprobs=-np.arange(count, dtype=np.float32),
        top_token_ids=np.arange(count, dtype=np.int32)[:, None] + 1,
        top_logprobs=-np.arange(count, dtype=np.float32)[:, None],
    )

    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-float(i) for i in range(count)]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in body["choices"][0]["token_ids"]]


@given(
    rows=st.one_of(st.integers(0, 40), st.sampled_from([ENCODED_BYTES // 4 + step for step in (-1, 0, 1)])),
    dtype=st.sampled_from(["u1", "<u2"]),
    start=st.integers(0, 2**22),
)
def test_routed_experts_are_the_base64_of_their_bytes(rows: int, dtype: str, start: int) -> None:
    """Routed experts are one object with its data first, without blanks, little-endian, in one or more pieces."""
    array = np.arange(rows * 4, dtype=np.int64).astype(dtype).reshape(rows, 2, 2)
    data = b"".join(routed_experts_json(array, start))

    name = {"u1": "uint8", "<u2": "uint16"}[dtype]
    encoded = base64.b64encode(array.tobytes()).decode()
    assert data.decode() == f'{{"data":"{encoded}","shape":[{rows},2,2],"start":{start},"dtype":"{name}"}}'
