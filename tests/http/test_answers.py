"""The JSON of `/inference/v1/generate` for handmade results."""

import asyncio
import base64
import dataclasses
import json
import math
from typing import Any

import httpx
import msgspec
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
from tests.http.support import CHAT, COMPLETIONS, Http, Talk, by_bus, byte_level, rows_of
from tests.support.fleet import presence, until_idle

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


def test_chunks_that_come_together_are_one_update() -> None:
    """The tokens of several chunks equal those of the chunks one after another, with rows, scores and recomputed KV."""
    rows = np.arange(4, dtype="u1").reshape(4, 1, 1)
    chunks = [
        rollbus.Chunk(
            request_id="r",
            attempt=0,
            child=0,
            chunk_index=at,
            weight_version=3 + at // 2,
            token_ids_data=np.array([at] * size, "<i4").tobytes(),
            logprobs_data=np.array([-at] * size, "<f4").tobytes(),
            routed_experts=rollbus.RoutedExperts.from_rows(rows[at : at + 1], 1 + at),
            worker_id=f"w{at}",
            kv_recomputed=at == 2,
        )
        for at, size in enumerate((1, 2, 1, 3))
    ]
    for first in range(4):
        at_once = Tokens.of_chunks(chunks[first:], WANTED)
        joined = Tokens.joined([Tokens.of_chunks([each], WANTED) for each in chunks[first:]])
        for name in ("ids", "weight_versions", "rows"):
            assert np.array_equal(getattr(at_once, name), getattr(joined, name))
        assert np.array_equal(at_once.scores.logprobs, joined.scores.logprobs)
        for name in ("kv_from", "start", "first_worker", "worker", "masks", "of_prompt"):
            assert getattr(at_once, name) == getattr(joined, name)
    assert (Tokens.of_chunks(chunks, WANTED).kv_from, Tokens.of_chunks(chunks, WANTED).start) == (3, 1)


def test_a_cut_keeps_only_a_recomputation_before_its_end() -> None:
    """A recomputation of the KV after a stop string is not in the answer, whose samples could have no span of it."""
    tokens = Tokens.of_generation(dataclasses.replace(RESULT), WANTED)
    size = len(tokens.ids)
    for kv_from, kept, expected in ((-1, 1, -1), (None, 1, None), (0, 1, 0), (1, 1, None), (size, size, size)):
        cut = msgspec.structs.replace(tokens, kv_from=kv_from).cut(kept, 1000)
        assert (cut.kv_from, len(cut.ids), len(cut.weight_versions)) == (expected, kept, kept)


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
    writer = AnswerWriter(shape=GENERATE, target=TARGET, tokenizer=None, requests=[WANTED], options=options, names=dict)
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


# Stop strings on `POST /inference/v1/generate`, which has no text, and prompt logprobs on all routes.


PATH = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8]
ENDLESS = SyntheticConfig(vocab_size=262, eos_token_id=300, max_model_len=65_536)
"""Every token is text, and no token ends a response."""


async def ask(http: Http, **sampling: Any) -> httpx.Response:
    """Send a request for tokens, as a stream if `stream` is set."""
    stream = sampling.pop("stream", False)
    return await http.client.post(PATH, json={"token_ids": PROMPT, "sampling_params": sampling, "stream": stream})


def one(answer: httpx.Response) -> dict[str, Any]:
    """Return the only choice, joined from the events if the response is a stream."""
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        (choice,) = answer.json()["choices"]
        return {**choice, "rows": rows_of(choice["routed_experts"])}
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "token_ids": [token_id for part in parts for token_id in part["token_ids"]],
        "logprobs": {"content": [entry for part in parts for entry in part["logprobs"]["content"]]},
        "rows": np.concatenate([rows_of(part["routed_experts"]) for part in parts if part["routed_experts"]]),
        "finish_reason": parts[-1]["finish_reason"],
    }


def a_stop(ids: list[int]) -> tuple[str, int]:
    """Return two characters that the text contains only from some token on, and the number of tokens up to there."""
    texts = [byte_level().token_bytes(token_id) for token_id in ids]
    for at in range(8, len(ids) - 1):
        stop = texts[at] + texts[at + 1]
        if stop.isascii() and b"".join(texts).find(stop) == len(b"".join(texts[:at])):
            return stop.decode(), at + 2
    raise AssertionError("no such text")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_answer_ends_with_the_token_that_completes_a_stop_string(talk: Talk, stream: bool) -> None:
    """Ids, logprobs and rows end with the token that completes the stop string, and the engine stops the request."""
    async with talk(ENDLESS) as (http, _):
        whole = await by_bus(http.rb, PROMPT, max_tokens=40, seed=1, logprobs=0)
        stop, kept = a_stop(whole.token_ids.tolist())
        asked: dict[str, Any] = {"seed": 1, "logprobs": 0, "max_tokens": 60_000, "stream": stream}
        found = one(await ask(http, **asked, stop=["nowhere", stop]))
        included = one(await ask(http, **asked, stop=stop, include_stop_str_in_output=True))
        late = one(await ask(http, **{**asked, "max_tokens": 40}, stop=stop, min_tokens=kept))
        await until_idle(http.engine, http.rb)

    assert (found["finish_reason"], found["token_ids"]) == ("stop", whole.token_ids[:kept].tolist())
    assert [entry["logprob"] for entry in found["logprobs"]["content"]] == whole.logprobs[:kept].tolist()
    assert np.array_equal(found["rows"], whole.routed_experts[: len(PROMPT) + kept - 1])
    assert included["token_ids"] == found["token_ids"]
    assert len(late["token_ids"]) > kept


async def test_a_stop_string_ends_only_its_own_sample(talk: Talk) -> None:
    """A stop string in one sample does not change the others, and the usage counts the remaining tokens."""
    async with talk(ENDLESS) as (http, _):
        whole = await by_bus(http.rb, PROMPT, max_tokens=40, seed=1, n=2, logprobs=0, prompt_logprobs=1)
        stop, kept = a_stop(whole.token_ids.tolist())
        asked = {"seed": 1, "logprobs": 0, "max_tokens": 40, "n": 2, "prompt_logprobs": 1}
        answer = (await ask(http, **asked, stop=stop)).json()
        plain = (await ask(http, **asked)).json()

    first, second = answer["choices"]
    assert (first["finish_reason"], len(first["token_ids"])) == ("stop", kept)
    other = whole.siblings[0].token_ids.tolist()
    assert second["token_ids"] == other[: len(second["token_ids"])]
    assert answer["usage"]["completion_tokens"] == kept + len(second["token_ids"])
    # Chunks carry prompt logprobs in parts.
    assert answer["prompt_logprobs"] == plain["prompt_logprobs"]
    assert len(answer["prompt_logprobs"]) == len(PROMPT)


async def test_prompt_logprobs_are_returned_as_in_vllm(talk: Talk) -> None:
    """Prompt logprobs are beside the choices of a chat and in each choice of a completion, with texts, as in vLLM."""
    async with talk() as (http, _):
        for path, body in (
            (CHAT, {"nvext": {"token_data": PROMPT}, "n": 2}),
            (CHAT, {"messages": [{"role": "user", "content": "the"}], "stop": "nowhere"}),
            (COMPLETIONS, {"prompt": [PROMPT, [9, 10]], "n": 2}),
        ):
            asked = {**body, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}
            answer = (await http.client.post(path, json=asked)).json()
            for shown in [answer] if path == CHAT else answer["choices"]:
                ids = shown["prompt_token_ids"]
                direct = await by_bus(http.rb, ids, max_tokens=1, prompt_logprobs=1)
                nothing, *positions = shown["prompt_logprobs"]
                assert nothing is None
                assert [position[str(i)]["logprob"] for i, position in zip(ids[1:], positions, strict=True)] == (
                    direct.prompt_logprobs.tolist()
                )
                assert all(
                    entry["decoded_token"].encode() == byte_level().token_bytes(int(token_id))
                    for position in positions
                    for token_id, entry in position.items()
                    if not entry["decoded_token"].startswith("bytes:")
                )
                tops = [{i: entry["rank"] for i, entry in position.items() if entry["rank"]} for position in positions]
                assert tops == [{str(i): 1} for (i,) in direct.prompt_top_token_ids.tolist()]
        none = (await http.client.post(CHAT, json={"nvext": {"token_data": PROMPT}, "max_tokens": 1})).json()
    assert none["prompt_logprobs"] is None
