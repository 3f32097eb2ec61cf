"""vLLM's forms beside those of rollbus: rendered requests, and routed experts as the base64 of a `.npy` file."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.http import Settings
from rollbus.frontend.http import tokens as routing_json
from rollbus.frontend.http.tokens import rows_json
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import CHAT, COMPLETIONS, CONFIG, Http, Serve, Talk, make_byte_level, rows_of, save

GENERATE = "/inference/v1/generate"
USER = {"role": "user", "content": "the"}
SAMPLING = {"max_tokens": 4, "temperature": 0.7, "seed": 3, "stop_token_ids": [7], "ignore_eos": True, "n": 2}


def read_npy(text: str) -> Any:
    """Decode routed experts as clients of vLLM do."""
    return np.load(io.BytesIO(base64.b64decode(text.encode("ascii"), validate=True)), allow_pickle=False)


async def post(http: Http, path: str, body: object) -> Any:
    """Post a request that succeeds, and return the answer."""
    answer = await http.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_rendered_request_generates_the_same_tokens(talk: Talk) -> None:
    """`/inference/v1/generate` accepts a rendered body and generates the tokens of the chat or the completion."""
    async with talk() as (http, _):
        asked = {**SAMPLING, "return_token_ids": True}
        for more in ({}, {"logprobs": True, "top_logprobs": 2, "priority": 3, "cache_salt": "a", "bad_words": ["zz"]}):
            chat = await post(http, CHAT, {"messages": [USER], **asked, **more})
            rendered = await post(http, f"{CHAT}/render", {"messages": [USER], **asked, **more})
            assert rendered["token_ids"] == chat["prompt_token_ids"]
            assert rendered["request_id"].startswith("chatcmpl-")
            assert (rendered["model"], rendered["features"]) == ("synthetic", None)
            generated = await post(http, GENERATE, rendered)
            assert [each["token_ids"] for each in generated["choices"]] == [
                each["token_ids"] for each in chat["choices"]
            ]
        assert rendered["priority"] == 3
        assert rendered["sampling_params"]["logprobs"] == 2
        whole = await post(http, f"{CHAT}/render", {"messages": [USER]})
        assert whole["sampling_params"]["max_tokens"] == (CONFIG.max_model_len or 0) - len(whole["token_ids"])
        texts = await post(http, COMPLETIONS, {"prompt": ["a", "b"], **asked})
        both = await post(http, f"{COMPLETIONS}/render", {"prompt": ["a", "b"], **asked})
        found = [choice["token_ids"] for body in both for choice in (await post(http, GENERATE, body))["choices"]]
        assert found == [choice["token_ids"] for choice in texts["choices"]]
        tools = {"messages": [USER], "tools": [{"function": {"name": "f", "x": 1}}]}
        with_tools = await post(http, f"{CHAT}/render", {**tools, "tool_choice": "none"})
        assert (await post(http, "/tokenize", tools))["tokens"] == with_tools["token_ids"]
        wrong = await http.client.post(f"{CHAT}/render", json={"messages": [USER], "temperature": 3})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")


async def test_a_rendered_request_is_accepted_as_it_is(talk: Talk) -> None:
    """A rendered request keeps the given fields, and its id is valid and unique, however long the given id is."""
    given = {"timeout_s": 9.0, "return_token_ids": True, "routed_experts_format": "npy"}
    async with talk() as (http, _):
        long = {"request_id": "r" * 512, "max_tokens": 2}
        chat = await post(http, f"{CHAT}/render", {"messages": [USER], **long, **given})
        assert {name: chat[name] for name in given} == given
        texts = await post(http, f"{COMPLETIONS}/render", {"prompt": ["a", "b"], **long})
        assert given.keys().isdisjoint(texts[0])
        ids = [body["request_id"] for body in (chat, *texts)]
        assert len(set(ids)) == 3
        answers = [await post(http, GENERATE, body) for body in (chat, *texts)]
        assert [answer["request_id"] for answer in answers] == ids
        assert isinstance(answers[0]["choices"][0]["routed_experts"], str)


async def test_a_rendered_request_is_one_of_vllm(talk: Talk) -> None:
    """VLLM's own model of the body accepts a rendered request."""
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    async with talk() as (http, _):
        body = {"messages": [USER], **SAMPLING, "stream": True, "stream_options": {"include_usage": True}}
        rendered = (await http.client.post(f"{CHAT}/render", json=body)).json()
    read = protocol.GenerateRequest.model_validate(rendered)
    assert (read.sampling_params.max_tokens, read.sampling_params.seed, read.stream) == (4, 3, True)


async def test_rows_are_an_npy_file_on_request(talk: Talk) -> None:
    """With `routed_experts_format`, each choice has the rows as a `.npy` file, streamed or not."""
    async with talk() as (http, _):
        tokens = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3, "ignore_eos": True, "seed": 1}}
        plain = (await http.client.post(GENERATE, json=tokens)).json()
        expected = rows_of(plain["choices"][0]["routed_experts"])
        npy = {"routed_experts_format": "npy"}
        found = (await http.client.post(GENERATE, json={**tokens, **npy})).json()
        assert np.array_equal(read_npy(found["choices"][0]["routed_experts"]), expected)
        text = (await http.client.post(GENERATE, json={**tokens, **npy, "stream": True})).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        parts = [read_npy(choice["routed_experts"]) for event in events for choice in event["choices"]]
        assert np.array_equal(np.concatenate(parts), expected)
        for path, prompt in ((CHAT, {"tokens": [5, 6, 7]}), (COMPLETIONS, {"prompt": [5, 6, 7]})):
            body = {**prompt, **tokens["sampling_params"]}  # type: ignore[dict-item]
            answer = (await http.client.post(path, json={**body, **npy})).json()
            assert np.array_equal(read_npy(answer["choices"][0]["routed_experts"]), expected)
            without = (await http.client.post(path, json={**body, **npy, "return_routed_experts": False})).json()
            assert "routed_experts" not in without["choices"][0]
        wrong = await http.client.post(GENERATE, json={**tokens, "routed_experts_format": "pickle"})
        assert wrong.json()["error"]["param"] == "routed_experts_format"


async def test_rows_are_npy_files_as_an_option_of_the_service(serve: Serve, tmp_path: Path) -> None:
    """With the option, all token routes have the rows as from vLLM's server. A request may ask for the object."""
    settings = Settings(routed_experts_npy=True, tokenizer=save(make_byte_level(), tmp_path))
    bodies: dict[str, dict[str, Any]] = {
        GENERATE: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2, "ignore_eos": True, "seed": 1}},
        CHAT: {"messages": [USER], "max_tokens": 2, "ignore_eos": True, "seed": 1},
        COMPLETIONS: {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True, "seed": 1},
    }
    async with serve(settings, config=CONFIG) as http:
        for path, body in bodies.items():
            (choice,) = (await http.client.post(path, json=body)).json()["choices"]
            rows = read_npy(choice["routed_experts"])
            other = await http.client.post(path, json={**body, "routed_experts_format": "object"})
            (choice,) = other.json()["choices"]
            assert np.array_equal(rows_of(choice["routed_experts"]), rows)


async def test_a_model_without_experts_has_no_rows(serve: Serve, tmp_path: Path) -> None:
    """Without experts, the option has no effect, and a request for rows is refused by the field's name."""
    settings = Settings(routed_experts_npy=True, tokenizer=save(make_byte_level(), tmp_path))
    config = SyntheticConfig(vocab_size=264, eos_token_id=262, num_experts=0)
    async with serve(settings, config=config) as http:
        body = {"prompt": [5], "max_tokens": 1}
        assert "routed_experts" not in (await http.client.post(COMPLETIONS, json=body)).json()["choices"][0]
        tokens = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
        for path, each in ((COMPLETIONS, body), (GENERATE, tokens)):
            refused = await http.client.post(path, json={**each, "routed_experts_format": "npy"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "routed_experts_format")


@pytest.mark.parametrize("dtype", ["u1", "<u2"])
def test_the_file_is_that_of_numpy(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """The string has the bytes of `numpy.save`, for any number of pieces."""
    monkeypatch.setattr(routing_json, "ENCODED_BYTES", 384)
    for num_rows in (0, 1, 40, 500):
        rows = np.arange(num_rows * 6).reshape(num_rows, 3, 2).astype(dtype)
        saved = io.BytesIO()
        np.save(saved, rows, allow_pickle=False)
        assert b"".join(rows_json("npy", npy=False)(rows, 0)) == b'"' + base64.b64encode(saved.getvalue()) + b'"'
