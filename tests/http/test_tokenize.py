"""`/tokenize` and `/detokenize`."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollbus.frontend.http.chat import SHORT_TEXT, Chat, encode_chat, encode_text
from rollbus.frontend.http.errors import HttpError
from rollbus.frontend.http.settings import Settings
from rollbus.frontend.tokenization import Tokenizer, load_tokenizer
from rollbus.schemas.errors import InvalidRequest
from tests.http.small_tokenizers import SPECIAL, byte_level, make_byte_level, save
from tests.http.support import http_service

USER = {"role": "user", "content": "the"}


@contextlib.asynccontextmanager
async def serving(nats_url: str, fleet: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a model whose tokenizer adds a special token at the start of texts."""
    from tokenizers import processors

    tokenizer = make_byte_level()
    tokenizer.add_special_tokens([SPECIAL])
    begin = (SPECIAL, tokenizer.token_to_id(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL} $A", special_tokens=[begin])
    async with http_service(nats_url, fleet, Settings(tokenizer=save(tokenizer, folder))) as http:
        yield http.client


async def post(client: httpx.AsyncClient, path: str, **body: object) -> Any:
    """Return the response to a valid request."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chat_text(**chat: Any) -> str:
    """Return the prompt of a chat as text."""
    ids = await encode_chat(byte_level(), Chat(**chat))
    return byte_level().decode(ids, skip_special_tokens=False)


async def test_the_tokens_of_a_text_decode_to_the_same_text(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A text has its special tokens unless the request disables them, and its tokens decode to the same text."""
    text = "the é 🙂"
    async with serving(nats_url, fleet, tmp_path) as client:
        plain = await post(client, "/v1/tokenize", prompt=text, add_special_tokens=False, return_token_strs=True)
        default = await post(client, "/tokenize", model="synthetic", prompt=text)
        back = await post(client, "/v1/detokenize", tokens=default["tokens"])
        (model,) = (await client.get("/v1/models")).json()["data"]
        nothing = await post(client, "/detokenize", tokens=[])
        half = await post(client, "/detokenize", tokens=plain["tokens"][:-1])

    assert list(plain) == ["count", "max_model_len", "tokens", "token_strs"]
    assert plain["token_strs"] == ["the", "Ġ", "Ã©", "Ġ", "ðŁ", "Ļ", "Ĥ"]
    assert (plain["count"], plain["max_model_len"]) == (7, model["max_model_len"])
    assert (len(default["tokens"]), default["tokens"][1:]) == (default["count"], plain["tokens"])
    assert default["token_strs"] is None
    assert back == {"prompt": f"{SPECIAL}{text}"}
    assert nothing == {"prompt": ""}
    assert half == {"prompt": "the é \ufffd"}


async def test_a_chat_has_the_text_of_its_template(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A chat has the text of its template, with special tokens around it only on request."""

    async def tokenized(**body: object) -> str:
        tokens = (await post(client, "/v1/tokenize", messages=[USER], **body))["tokens"]
        return str((await post(client, "/v1/detokenize", tokens=tokens))["prompt"])

    async with serving(nats_url, fleet, tmp_path) as client:
        assert await tokenized() == "<user>the<|end|><assistant>"
        assert await tokenized(add_generation_prompt=False) == "<user>the<|end|>"
        for flags in ({}, {"add_generation_prompt": False}):
            assert await tokenized(continue_final_message=True, **flags) == "<user>the"
        assert await tokenized(add_special_tokens=True) == "<|end|><user>the<|end|><assistant>"
        assert await tokenized(chat_template_kwargs={"opening": "e"}) == "<user>the<|end|><assistant>e"
        tool = {"type": "function", "function": {"name": "search"}}
        assert await tokenized(tools=[tool]) == "(search)<user>the<|end|><assistant>"


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": None}, "prompt"),
    ("tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
    ("tokenize", {"prompt": ["a"]}, "prompt"),
    ("tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
    ("tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ("tokenize", {"prompt": "a", "colour": 1}, "colour"),
    ("tokenize", {"prompt": "a", "add_special_tokens": 2}, "add_special_tokens"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"messages": [USER, {"content": "a"}]}, "messages[1].role"),
    ("tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages"),
    ("tokenize", {"messages": [USER], "chat_template": "a"}, "chat_template"),
    (
        "tokenize",
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (
        "tokenize",
        {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs.add_generation_prompt",
    ),
    (
        "tokenize",
        {"messages": [USER], "chat_template_kwargs": {"eos_token": ""}},
        "chat_template_kwargs.eos_token",
    ),
    ("tokenize", {"messages": [USER], "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": "the"}, "tokens"),
    ("detokenize", {"tokens": [0, 1, 400, 401]}, "tokens[2]"),
    ("detokenize", {"tokens": [2**31 - 1]}, "tokens[0]"),
    ("detokenize", {"tokens": [2**31]}, "tokens[0]"),
    ("detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("detokenize", {"tokens": [0.5]}, "tokens[0]"),
]


async def test_a_wrong_field_gives_400_with_its_name(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A wrong field gives 400 with its name."""
    async with serving(nats_url, fleet, tmp_path) as client:
        for path, body, param in WRONG:
            answer = await client.post(f"/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
            assert param in answer.json()["error"]["message"]


async def test_unknown_models_broken_json_and_missing_tokenizers_are_refused(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """An unknown model gives 404, half a surrogate is not JSON, and a missing tokenizer gives 501."""
    async with serving(nats_url, fleet, tmp_path) as client:
        unknown = await client.post("/v1/tokenize", json={"model": "other", "prompt": "a"})
        surrogate = await client.post("/v1/tokenize", content=rb'{"prompt": "\ud800"}')
    async with http_service(nats_url, fleet) as http:
        missing = await http.client.post("/v1/detokenize", json={"tokens": [1]})

    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    assert surrogate.status_code == 400
    assert (missing.status_code, missing.json()["error"]["code"]) == (501, "no_tokenizer")


async def test_messages_are_normalised_as_in_vllm() -> None:
    """As in vLLM, text parts are joined by line breaks and call arguments become objects.

    A missing content is empty.
    """
    parts = [{"type": "text", "text": "t"}, "h", {"type": "input_text", "text": "e"}]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": 7}', "{broken", "[1]", None, {"x": 8})
    ]
    assert await chat_text(messages=[{"role": "user", "content": parts}]) == "<user>t\nh\ne<|end|><assistant>"
    assert (
        await chat_text(messages=[{"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}])
        == '<assistant>[{"x": 7}][{}][{}][{}][{"x": 8}]<|end|><assistant>'
    )
    assert await chat_text(messages=[{"role": "tool"}], add_generation_prompt=False) == "<tool><|end|>"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": {}, "text": "a"}]}, "messages[0].content[0]"),
        ({"role": {}}, "messages[0].role"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "messages[0].tool_calls[0]"),
    ],
)
async def test_invalid_messages_are_refused_with_their_position(message: dict[str, Any], field: str) -> None:
    """Images and values of a wrong type are refused with their position."""
    with pytest.raises(InvalidRequest) as caught:
        await encode_chat(byte_level(), Chat(messages=[message]))
    assert caught.value.field == field


async def test_a_model_without_a_chat_template_gives_501(tmp_path: Path) -> None:
    """A model without a chat template gives 501."""
    tokenizer = load_tokenizer(save(make_byte_level(), tmp_path, chat_template=None))
    with pytest.raises(HttpError, match="no chat template") as caught:
        await encode_chat(tokenizer, Chat(messages=[USER]))
    assert caught.value.status == 501


async def test_long_texts_are_tokenized_in_another_thread() -> None:
    """Long texts are tokenized in another thread, so they do not block others. Short texts are not."""
    threads = []

    class Watched:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread())
            return []

    tokenizer: Tokenizer = Watched()  # type: ignore[assignment]
    await encode_text(tokenizer, "a" * SHORT_TEXT)
    await encode_text(tokenizer, "a" * (SHORT_TEXT + 1))

    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


async def test_many_threads_share_a_tokenizer(tmp_path: Path) -> None:
    """Many threads can share a tokenizer with truncation and padding, which other calls must not change."""
    made = make_byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=8)
    tokenizer = load_tokenizer(save(made, tmp_path))
    text = "the " * SHORT_TEXT

    counts = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(16):
            tasks.create_task(encode_text(tokenizer, text)).add_done_callback(
                lambda task: counts.append(len(task.result()))
            )

    assert counts == [SHORT_TEXT + 1] * 16
