"""OpenAI's Responses and Anthropic's Messages through their published clients. The engine writes given texts."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from rollbus.frontend.http import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Http, byte_level, client_of, http_service, make_byte_level, save
from tests.http.test_tools import CALL, TOOL, TWO, serving, writes

__all__ = ["writes"]

THOUGHT = f"<think>2 and 3</think>{CALL}"
FUNCTION: dict[str, Any] = {"type": "function", **TOOL["function"], "strict": None}
CLAUDE_TOOL: dict[str, Any] = {
    "name": "add",
    "description": "Adds",
    "input_schema": TOOL["function"]["parameters"],
    "cache_control": {"type": "ephemeral"},
}
ASKED: dict[str, Any] = {"model": "synthetic", "input": "How much is 2 + 3?", "tools": [FUNCTION]}
TOLD: dict[str, Any] = {
    "model": "synthetic",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "How much is 2 + 3?"}],
    "tools": [CLAUDE_TOOL],
}


def anthropic_of(http: Http, key: str = "none") -> "anthropic.AsyncAnthropic":
    """Return Anthropic's client without retries, which would hide failures."""
    return anthropic.AsyncAnthropic(base_url=http.url, api_key=key, max_retries=0)


@contextlib.asynccontextmanager
async def both(nats_url: str, fleet: str, folder: Path) -> AsyncIterator[tuple[Http, Any, Any]]:
    """Serve with parsers of calls and reasoning. Yield the service and both clients."""
    async with (
        serving(nats_url, fleet, folder, reasoning_parser="qwen3") as (http, client),
        anthropic_of(http) as claude,
    ):
        yield http, client, claude


async def responded(client: Any, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return a response. Of a stream, check the events against it: their order, their numbers and their texts."""
    if not stream:
        answer = await client.responses.create(**{**ASKED, **fields})
        return dict(answer.model_dump(mode="json", warnings="error"))
    events = [event async for event in await client.responses.create(**{**ASKED, **fields}, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for event in events[2:-1]:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                texts[event.item.id] = ""
            case "response.output_item.done":
                items.append(event.item.model_dump(mode="json"))
            case "response.output_text.delta" | "response.reasoning_text.delta":
                texts[event.item_id] += event.delta
            case "response.function_call_arguments.delta":
                texts[event.item_id] += event.delta
    answer = dict(last.response.model_dump(mode="json", warnings="error"))
    assert last.type == f"response.{answer['status']}"
    assert items == answer["output"]
    assert list(texts.values()) == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in items
    ]
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a response or message without what differs in each: ids and times."""
    text = json.dumps(answer)
    for key in ("id", "call_id", "created_at", "completed_at"):
        text = json.dumps(_without(json.loads(text), key))
    return dict(json.loads(text))


def _without(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _without(each, key) for name, each in value.items() if name != key}
    return [_without(each, key) for each in value] if isinstance(value, list) else value


async def told(claude: Any, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return a message. Of a stream, it is what Anthropic's client makes of the events."""
    if not stream:
        return dict((await claude.messages.create(**{**TOLD, **fields})).model_dump(mode="json", warnings="none"))
    async with claude.messages.stream(**{**TOLD, **fields}) as events:
        kinds = [event.type async for event in events]
        message = await events.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content)
    return dict(message.model_dump(mode="json", warnings="none"))


async def test_a_response_has_reasoning_and_calls_and_continues_streamed_or_not(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Reasoning, calls, usage and the next turn of Responses are the same streamed or not."""
    async with both(nats_url, fleet, tmp_path) as (_, client, _):
        found = []
        for stream in (False, True):
            writes[:] = [THOUGHT]
            answer = await responded(client, stream=stream, reasoning={"effort": "low", "summary": "auto"})
            found.append(comparable(answer))
            reasoning, call = answer["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "2 and 3"}]
            assert (call["name"], json.loads(call["arguments"])) == ("add", {"a": 2, "b": 3})
            usage = answer["usage"]
            assert usage["output_tokens_details"]["reasoning_tokens"] == len("2 and 3")
            assert usage["output_tokens"] == len(byte_level().encode(THOUGHT, add_special_tokens=False)) + 1
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
            assert (answer["status"], answer["store"]) == ("completed", False)
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
            history = [{"role": "user", "content": ASKED["input"]}, reasoning, call, result]
            writes[:] = ["</think>It is 5."]
            answer = await responded(client, stream=stream, input=history, instructions="Be brief", store=True)
            (message,) = answer["output"]
            assert (message["type"], message["content"][0]["text"]) == ("message", "It is 5.")
            assert (answer["store"], answer["instructions"]) == (False, "Be brief")
        assert found[0] == found[1]


async def test_tools_of_coding_agents_are_functions_of_a_namespace_and_hosted_ones_are_left_out(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """The model sees `math.add` for a function of a namespace. Clients get both names, and continue with both."""
    space = {"type": "namespace", "name": "math", "description": "Numbers", "tools": [FUNCTION]}
    tools = [{**FUNCTION, "name": "other"}, space, {"type": "web_search", "external_web_access": True}]
    async with both(nats_url, fleet, tmp_path) as (_, client, _):
        for stream in (False, True):
            writes[:] = [f"</think>{CALL.replace('add', 'math.add')}"]
            answer = await responded(client, stream=stream, tools=tools, extra_body={"client_metadata": {"a": "b"}})
            (call,) = answer["output"]
            assert (call["namespace"], call["name"]) == ("math", "add")
            assert [tool["type"] for tool in answer["tools"]] == ["function", "namespace"]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
            history = [{"role": "user", "content": ASKED["input"]}, call, result]
            writes[:] = ["</think>It is 5."]
            answer = await responded(client, stream=stream, input=history, tools=tools)
            assert answer["output"][0]["content"][0]["text"] == "It is 5."
        wrong: list[tuple[list[Any], str]] = [
            ([{**space, "tools": None}], "tools[0].tools"),
            ([{**space, "tools": [{**FUNCTION, "name": None}]}], "tools[0].tools[0].name"),
            ([{**space, "tools": [{"type": "custom", "name": "a"}]}], "tools[0].tools[0].type"),
            ([{**space, "name": ""}], "tools[0].name"),
            ([FUNCTION, {"type": "mcp"}], "tools[1].type"),
        ]
        for given, param in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(**{**ASKED, "tools": given})
            assert caught.value.param == param


async def test_a_message_has_thinking_and_tool_use_and_continues_streamed_or_not(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Thinking, tool use, usage and the next turn of Messages are the same streamed or not."""
    async with both(nats_url, fleet, tmp_path) as (_, _, claude):
        found = []
        for stream in (False, True):
            writes[:] = [THOUGHT]
            answer = await told(claude, stream=stream, thinking={"type": "enabled", "budget_tokens": 1024})
            found.append(comparable(answer))
            thinking, use = answer["content"]
            assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == (
                "thinking",
                "2 and 3",
                True,
            )
            assert (use["name"], use["input"], answer["stop_reason"]) == ("add", {"a": 2, "b": 3}, "tool_use")
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "5"}]}
            turn = {"role": "assistant", "content": answer["content"]}
            history = [
                *TOLD["messages"],
                turn,
                {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ]
            writes[:] = ["</think>It is 5."]
            answer = await told(claude, stream=stream, messages=history, system=[{"type": "text", "text": "Be brief"}])
            assert [block["text"] for block in answer["content"]] == ["It is 5."]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
            counted = await claude.messages.count_tokens(
                model="synthetic", messages=history, tools=[CLAUDE_TOOL], system="Be brief"
            )
            usage = answer["usage"]
            assert counted.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert found[0] == found[1]


async def test_a_cut_or_broken_call_is_text_and_the_reason_says_so(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """A call that is cut or malformed is text in both APIs, and the status and the stop reason tell which."""
    async with both(nats_url, fleet, tmp_path) as (_, client, claude):
        for stream in (False, True):
            writes[:] = [f"</think>{TWO}"]
            answer = await responded(client, stream=stream, max_output_tokens=60)
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            assert [(item["type"], item["status"]) for item in answer["output"]] == [("message", "incomplete")]
            message = await told(claude, stream=stream, max_tokens=60)
            assert (message["stop_reason"], [block["type"] for block in message["content"]]) == ("max_tokens", ["text"])
            writes[:] = ["</think>" + CALL.replace("}}", "}")]
            answer = await responded(client, stream=stream)
            assert (answer["status"], [item["type"] for item in answer["output"]]) == ("completed", ["message"])
            message = await told(claude, stream=stream)
            assert (message["stop_reason"], [block["type"] for block in message["content"]]) == ("end_turn", ["text"])


async def test_stop_sequences_choices_and_prefixes_of_answers(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """A stop sequence is named, a choice limits the calls, and a last message of the assistant is continued."""
    writes[:] = [f"</think>Sure. It is so.{CALL}{CALL}"]
    async with both(nats_url, fleet, tmp_path) as (_, client, claude):
        for stream in (False, True):
            message = await told(claude, stream=stream, stop_sequences=["It is"])
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "It is")
            assert message["content"][0]["text"].strip() == "Sure."
            one = {"type": "auto", "disable_parallel_tool_use": True}
            message = await told(claude, stream=stream, tool_choice=one)
            assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
            answer = await responded(client, stream=stream, parallel_tool_calls=False)
            assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
            answer = await responded(client, stream=stream, tool_choice="none")
            assert [item["type"] for item in answer["output"]] == ["message"]
            begun = [*TOLD["messages"], {"role": "assistant", "content": "It"}]
            counted = await claude.messages.count_tokens(model="synthetic", messages=begun, tools=[])
            whole = await told(claude, stream=stream, messages=begun, tools=[])
            assert whole["usage"]["input_tokens"] == counted.input_tokens
            full = await told(claude, stream=stream, max_tokens=10_000)
            assert full["stop_reason"] == "tool_use"
            hidden = await told(claude, stream=stream, thinking={"type": "adaptive", "display": "omitted"})
            assert "thinking" not in {block["type"] for block in hidden["content"]}


async def test_the_cached_tokens_are_reported(nats_url: str, fleet: str, tmp_path: Path, writes: list[str]) -> None:
    """Tokens of the prefix cache are in the usage of both APIs. Anthropic's `input_tokens` are without them."""
    writes[:] = ["</think>Yes."]
    settings = Settings(tokenizer=save(make_byte_level(), tmp_path))
    config = SyntheticConfig(vocab_size=265, eos_token_id=262, max_model_len=4096, prefix_cache=True)
    async with (
        http_service(nats_url, fleet, settings, config=config) as http,
        client_of(http) as client,
        anthropic_of(http) as claude,
    ):
        text = "the " * 200
        usages = []
        for _ in range(2):
            message = await told(claude, stream=True, tools=[], messages=[{"role": "user", "content": text}])
            usages.append(message["usage"])
        answer = await responded(client, stream=False, tools=[], input=text)
        cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
        assert usages[0]["cache_read_input_tokens"] == 0 < usages[1]["cache_read_input_tokens"] == cached
        assert usages[1]["input_tokens"] + cached == usages[0]["input_tokens"] == answer["usage"]["input_tokens"]


async def test_errors_have_the_format_of_each_api(nats_url: str, fleet: str, tmp_path: Path, writes: list[str]) -> None:
    """Both clients raise their typed errors with the API's name of the field, before and within a stream."""
    writes[:] = ["</think>Yes."]
    async with both(nats_url, fleet, tmp_path) as (http, client, claude):
        wrong_input: list[tuple[dict[str, Any], str]] = [
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"temperature": -1.0}, "temperature"),
            ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": "the " * 5000}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
            ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ]
        for fields, param in wrong_input:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.responses.create(**{**ASKED, **fields}, stream=stream)
                assert caught.value.param == param
                assert caught.value.message.count(param) >= 1
        wrong_told: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 0}, "max_tokens"),
            ({"tools": [{**CLAUDE_TOOL, "name": "a b"}]}, "tools[0].name"),
            ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
            ({"messages": [{"role": "user", "content": "the " * 5000}]}, "messages"),
            ({"stop_sequences": [""]}, "stop_sequences[0]"),
            ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
            ({"extra_body": {"thread": {"type": "create"}}}, "thread"),
        ]
        for fields, param in wrong_told:
            for stream in (False, True):
                with pytest.raises(anthropic.BadRequestError) as refused:
                    await claude.messages.create(**{**TOLD, **fields}, stream=stream)
                error: Any = refused.value.body
                assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
                assert error["error"]["param"] == param
                assert ("prompt is too long" in error["error"]["message"]) == (param == "messages")
                # With these details, the client's tool runner goes on without a thread.
                details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
                assert error["error"].get("details") == (details if param == "thread" else None)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await claude.messages.create(**{**TOLD, "model": "other"})
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        assert missing.value.response.headers["x-request-id"]
        bad = await http.client.post("/v1/messages", content=b"{", headers={"Content-Type": "text/plain"})
        assert (bad.status_code, bad.json()["type"]) == (415, "error")


async def test_an_abort_ends_both_apis_with_an_error(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[str]
) -> None:
    """An aborted request is an error before its stream begins, and the last event after that, never an answer."""
    writes[:] = ["word " * 500]
    async with both(nats_url, fleet, tmp_path) as (http, client, claude):
        stream = await client.responses.create(**ASKED, stream=True, extra_body={"request_id": "mine"})
        kinds = [(await anext(stream)).type]
        assert (await http.client.post("/abort_requests", json={"request_ids": ["mine"]})).status_code == 200
        with pytest.raises(openai.APIError, match="aborted: ") as raised:
            [event async for event in stream]
        assert (kinds, raised.value.code) == (["response.created"], "aborted")
        events = await claude.messages.create(**TOLD, stream=True, extra_body={"request_id": "other"})
        assert (await anext(events)).type == "message_start"
        await http.client.post("/abort_requests", json={"request_ids": ["other"]})
        with pytest.raises(anthropic.APIStatusError) as caught:
            [event async for event in events]
        assert caught.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_the_token_may_be_in_the_header_of_anthropic(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """The data token is accepted in `x-api-key` as in `Authorization`, and a wrong one is Anthropic's error."""
    writes[:] = ["</think>Yes."]
    options = {"token": "data", "admin_token": "admin"}
    async with serving(nats_url, fleet, tmp_path, **options) as (http, _):
        for key in ("data", "admin"):
            async with anthropic_of(http, key) as claude:
                assert (await told(claude, stream=False))["stop_reason"] == "end_turn"
        for given in ("other", ""):
            async with anthropic_of(http, given or "x") as claude:
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    await claude.messages.create(**TOLD)
                assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        wrong = await http.client.post("/pause", headers={"x-api-key": "data"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "unauthorized")
        assert (await http.client.get("/v1/models", headers={"x-api-key": "data"})).status_code == 200
