"""Tool calls and reasoning on the chat route, with a synthetic engine that writes given texts and vLLM's parsers."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.frontend.cli.exits import ExitCode
from rollbus.frontend.http import Settings, writer
from rollbus.frontend.http.openai import parsers
from rollbus.frontend.http.openai.parsers import (
    AnswerParts,
    AnswerReader,
    CallPart,
    ParserUnavailable,
    ToolQuestion,
    load_parsers,
)
from rollbus.workers.engines.synthetic.batch import SyntheticBatch
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import CHAT, Http, byte_level, client_of, http_service, loaded, make_byte_level, save
from tests.sessions.families import tokenizer_of

EOS = 262
CONFIG = SyntheticConfig(vocab_size=265, eos_token_id=EOS, max_model_len=4096)
USER = {"role": "user", "content": "How much is 2 + 3?"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TWO = f"Sure. {CALL}\n{CALL}"


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list whose first text the engine writes, followed by the end of the sequence."""
    texts: list[str] = []

    def sample(batch: Any, choices: Any) -> Any:
        table = batch._table
        ids = [*byte_level().encode(texts[0], add_special_tokens=False), EOS]
        sampled = np.array([ids[min(int(count), len(ids) - 1)] for count in table["count"]], np.uint64)
        table["last"][:] = sampled
        table["count"] += np.uint64(1)
        return sampled

    monkeypatch.setattr(SyntheticBatch, "_sample", sample)
    return texts


@contextlib.asynccontextmanager
async def serving(nats_url: str, fleet: str, folder: Path, **options: Any) -> AsyncIterator[tuple[Http, Any]]:
    """Serve with vLLM's parser for the format of Hermes, and yield the service and an OpenAI client."""
    settings = Settings(tokenizer=save(make_byte_level(), folder), **{"tool_call_parser": "hermes", **options})
    async with http_service(nats_url, fleet, settings, config=CONFIG) as http, client_of(http) as client:
        yield http, client


async def asked(client: Any, *, stream: bool, **fields: Any) -> tuple[dict[str, Any], str, list[int]]:
    """Return message, finish reason and tokens. Events of a stream are joined as clients join them."""
    fields = {"model": "synthetic", "messages": [USER], "tools": [TOOL], **fields}
    fields["extra_body"] = {"return_token_ids": True, **fields.get("extra_body", {})}
    if not stream:
        (choice,) = (await client.chat.completions.create(**fields)).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason, choice.token_ids
    message: dict[str, Any] = {}
    ids: list[int] = []
    reason = ""
    async for event in await client.chat.completions.create(**fields, stream=True):
        (choice,) = event.choices
        ids += getattr(choice, "token_ids", None) or []
        reason = choice.finish_reason or reason
        delta = choice.delta.model_dump(exclude_none=True)
        for call in delta.pop("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(
                    {"id": call["id"], "type": call["type"], "function": {"arguments": "", **call["function"]}}
                )
                continue
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
    return message, reason, ids


def functions(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the calls of a message, and check that their ids differ."""
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


async def test_tools_calls_and_results_work_streamed_or_not(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Tools, calls with ids, results and the answer work streamed or not, with the engine's tokens."""
    async with serving(nats_url, fleet, tmp_path) as (_, client):
        for stream in (False, True):
            writes[:] = [TWO]
            message, reason, ids = await asked(client, stream=stream)
            assert functions(message) == [("add", {"a": 2, "b": 3})] * 2
            assert message["content"].strip() == "Sure."
            assert reason == "tool_calls"
            assert byte_level().decode(ids[:-1]) == TWO
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message["tool_calls"]]
            writes[:] = ["It is 5."]
            turn = {"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]}
            message, reason, _ = await asked(client, stream=stream, messages=[USER, turn, *results])
            assert (message["content"], reason) == ("It is 5.", "stop")
            assert not functions(message)


async def test_a_stream_has_comments_while_a_call_is_held_back(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a tool call is held back, a stream has comments, which clients ignore. The events stay the same."""
    writes[:] = [TWO]
    body = {"messages": [USER], "tools": [TOOL], "stream": True}
    streams = []
    async with serving(nats_url, fleet, tmp_path) as (http, client):
        for seconds in (writer.KEEP_ALIVE_S, 0.0):
            monkeypatch.setattr(writer, "KEEP_ALIVE_S", seconds)
            streams.append((await http.client.post(CHAT, json=body)).text.split("\n\n"))
        message, _, _ = await asked(client, stream=True, extra_body={"return_token_ids": False})

    quiet, alive = streams
    assert quiet.count(": ping") == 0 < alive.count(": ping")
    events = [event for event in alive if event != ": ping"]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == quiet[-2:] == ["data: [DONE]", ""]
    assert functions(message) == [("add", {"a": 2, "b": 3})] * 2


async def test_parallel_calls_tool_choice_and_max_tokens_limit_the_calls(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Without parallel calls there is one call, with `tool_choice` none there is text, and `max_tokens` cuts a call."""
    writes[:] = [TWO]
    async with serving(nats_url, fleet, tmp_path) as (_, client):
        for stream in (False, True):
            message, reason, ids = await asked(client, stream=stream, parallel_tool_calls=False)
            assert (functions(message), reason) == ([("add", {"a": 2, "b": 3})], "tool_calls")
            assert byte_level().decode(ids[:-1]) == TWO
            message, reason, _ = await asked(client, stream=stream, tool_choice="none")
            assert (message["content"], reason) == (TWO, "stop")
            _, reason, ids = await asked(client, stream=stream, max_tokens=30)
            assert (reason, len(ids)) == ("length", 30)


async def test_reasoning_is_beside_the_content_or_omitted(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """Reasoning has both names beside the content, or is omitted on request. Its tokens remain."""
    text = f"<think>2 and 3</think>{CALL}"
    writes[:] = [text]
    options = {"reasoning_parser": "qwen3"}
    async with serving(nats_url, fleet, tmp_path, **options) as (_, client):
        for stream in (False, True):
            message, _, ids = await asked(client, stream=stream)
            assert message["reasoning"] == message["reasoning_content"] == "2 and 3"
            assert functions(message) == [("add", {"a": 2, "b": 3})]
            assert byte_level().decode(ids[:-1]) == text
            message, _, hidden = await asked(client, stream=stream, extra_body={"include_reasoning": False})
            assert not message.keys() & {"reasoning", "reasoning_content"}
            assert functions(message) == [("add", {"a": 2, "b": 3})]
            assert hidden == ids


async def test_if_a_parser_raises_an_error_the_text_is_the_content(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a parser raises an error or the text is too long for it, the complete text is the content."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    writes[:] = [TWO]
    async with serving(nats_url, fleet, tmp_path) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(parsers, "MAX_TEXT", 5)
            for stream in (False, True):
                message, reason, _ = await asked(client, stream=stream)
                assert (message["content"], reason) == (TWO, "stop")

        def raises(*_: object, **__: object) -> None:
            raise RecursionError

        monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", raises)
        monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls_streaming", raises)
        for stream in (False, True):
            message, reason, _ = await asked(client, stream=stream)
            assert (message["content"], reason) == (TWO, "stop")


async def test_a_broken_call_is_the_same_streamed_or_not(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str]
) -> None:
    """A malformed call, and a second call that is cut, have the same message and finish reason streamed or not."""
    broken = CALL.replace("}}", "}")
    async with serving(nats_url, fleet, tmp_path) as (_, client):
        for text, limit in ((broken, 400), (TWO, 100), (f"{CALL}\n{broken}", 400)):
            writes[:] = [text]
            whole, *rest = [await asked(client, stream=stream, max_tokens=limit) for stream in (False, True)]
            message, reason, _ = whole
            assert message["content"] == text[: len(message["content"])]
            assert "tool_calls" not in message
            assert reason == ("length" if limit == 100 else "stop")
            message.pop("role")
            assert rest == [whole]


async def test_long_texts_are_parsed_in_a_thread(
    nats_url: str, fleet: str, tmp_path: Path, writes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts are parsed in a thread in growing pieces, without loss and without a parser call per token."""
    monkeypatch.setattr(parsers, "SHORT_TEXT", 100)
    monkeypatch.setattr(parsers, "MIN_GROWTH", 4)
    words = "word " * 100
    writes[:] = [f'{words}<tool_call>{{"name": "add", "arguments": {{"a": "{words}"}}}}</tool_call>']
    async with serving(nats_url, fleet, tmp_path) as (_, client):
        for stream in (False, True):
            message, reason, _ = await asked(client, stream=stream, max_tokens=2000)
            assert (functions(message), reason) == ([("add", {"a": words})], "tool_calls")
            assert message["content"] == words


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
    ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    # This engine has no structured outputs.
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools"),
]


async def test_a_wrong_tool_is_refused_with_field_and_index(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A wrong tool gives 400 with the field and its index."""
    async with serving(nats_url, fleet, tmp_path) as (http, _):
        for body, param in REFUSED:
            answer = await http.client.post(CHAT, json={"messages": [USER], **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
        message = answer.json()["error"]["message"]
        assert "structured outputs" in message
        assert http.own.stats().requests == 0


async def test_a_parser_that_does_not_fit_the_model_gives_501(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A parser that needs a token outside the vocabulary gives 501 with its name."""
    async with serving(nats_url, fleet, tmp_path, tool_call_parser="llama3_json") as (http, _):
        answer = await http.client.post(CHAT, json={"messages": [USER], "tools": [TOOL]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "no_parser")
    assert "llama3_json" in answer.json()["error"]["message"]


async def test_the_error_of_an_unknown_parser_names_the_known_parsers() -> None:
    """The error for an unknown parser names the option and the known parsers."""
    with pytest.raises(ParserUnavailable, match=r"--tool-call-parser nothing .* hermes"):
        await asyncio.to_thread(load_parsers, "nothing", None)
    with pytest.raises(ParserUnavailable, match=r"--reasoning-parser nothing .* qwen3"):
        await asyncio.to_thread(load_parsers, None, "nothing")


async def test_the_error_of_refused_parsers_has_the_reason_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM refuses parsers, for example because they cannot be combined, the error has its reason."""
    from vllm.parser import ParserManager

    def refuses(*_: object, **__: object) -> None:
        raise TypeError("these cannot be combined")

    monkeypatch.setattr(ParserManager, "get_parser", refuses)
    with pytest.raises(ParserUnavailable, match="cannot be combined"):
        await asyncio.to_thread(load_parsers, "hermes", "qwen3")


def test_an_unknown_parser_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown parser is a usage error before anything starts."""
    from rollbus.frontend.cli.app import main

    assert main(["frontend", "--tool-call-parser", "nothing", "--nats", "nats://127.0.0.1:1"]) == ExitCode.USAGE
    assert "--tool-call-parser nothing" in capsys.readouterr().err


async def test_templates_receive_the_same_tools_as_in_vllm() -> None:
    """A template receives the same tool dicts in the same order as in vLLM, so the prompt is the same."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    from rollbus.frontend.http.chat import template_tools
    from rollbus.frontend.http.openai.body import ChatBody

    bare = {"type": "function", "function": {"name": "f"}}
    strict = {"function": {**TOOL["function"], "strict": True}, "type": "function", "more": 1}
    tools: list[dict[str, Any]] = [TOOL, bare, strict]
    expected = [ChatCompletionToolsParam(**tool).model_dump() for tool in tools]
    assert json.dumps(template_tools(ChatBody(tools=tools).tools)) == json.dumps(expected)


# Malformed and cut tool calls: a stream has the same parts as a whole answer, and that is the answer of vLLM's
# server.


ARGUMENTS = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
TEXTS = {
    "a call": CALL,
    "text and two calls": TWO,
    "text after a call": f"Sure.\n{CALL}\nThat is all.",
    "text": "  It is 5.\n\n",
    "an opened call": "Sure.\n<tool_call>",
    "half a marker": "Sure. <tool_c",
    "cut in the name": '<tool_call>\n{"name": "ad',
    "cut in the arguments": 'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 2, "b',
    "cut before the end marker": f"Sure. <tool_call>\n{ARGUMENTS}\n",
    "a brace is missing": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}\n</tool_call>',
    "a brace too many": f"<tool_call>\n{ARGUMENTS}}}\n</tool_call>",
    "quotes are missing": "<tool_call>\n{name: add, arguments: {a: 2}}\n</tool_call>",
    "arguments are text": '<tool_call>\n{"name": "add", "arguments": "2 and 3"}\n</tool_call>',
    "no arguments": '<tool_call>\n{"name": "add"}\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>',
    "the second call is cut": f'{TWO[:-30]}"a"',
    "the second call is broken": f"{CALL}\n<tool_call>\nadd 2 and 3\n</tool_call>",
    "an empty call": "<tool_call></tool_call>",
    "a list": f"[{ARGUMENTS}, {ARGUMENTS}]",
    "a cut list": f'[{ARGUMENTS}, {{"name": "add", "argu',
    "JSON": ARGUMENTS,
    "cut JSON": ARGUMENTS[:-12],
    "Python": "[add(a=2, b=3), add(a=1, b=1)]",
    "cut Python": "[add(a=2, b=3), add(a=1",
    "broken Python": "[add(a=2, b=3, add(]",
    "XML": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
    "cut XML": "Sure.\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</para",
    "broken XML": "<tool_call>\n<function=add\n<parameter=a>\n2\n</function>\n</tool_call>",
    "reasoning": f"<think>2 and 3\n</think>\n\n{CALL}",
    "cut reasoning": "<think>2 and",
    "reasoning and a cut call": '<think>\n2 and 3\n</think>\n\nSure. <tool_call>\n{"name": "add", "argu',
}
CHOICES = ("auto", "required", "named")


def question(choice: str) -> ToolQuestion:
    """Return the properties of a request with one tool."""
    return ToolQuestion(
        tools=[TOOL],
        choice=choice,
        name="add" if choice == "named" else None,
        template_kwargs={},
        skip_special_tokens=True,
    )


def joined(parts: list[AnswerParts]) -> AnswerParts:
    """Return the parts of a stream as a client joins them. A stream has each call at once."""
    calls = [call for part in parts for call in part.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    return AnswerParts(
        "".join(part.content or "" for part in parts) or None,
        "".join(part.reasoning or "" for part in parts) or None,
        tuple(calls),
    )


def plain(parts: AnswerParts) -> AnswerParts:
    """Return the parts without the random ids of the calls."""
    calls = tuple(CallPart(call.index, None, call.name, call.arguments) for call in parts.calls)
    return AnswerParts(parts.content or None, parts.reasoning or None, calls)


async def streamed(reader: AnswerReader, text: str, rng: random.Random) -> AnswerParts:
    """Return the joined parts of a stream of random pieces."""
    tokenizer, parts = byte_level(), []
    while True:
        size = rng.choice((1, 1, 2, 7, 40))
        piece, text = text[:size], text[size:]
        parts.append(await reader.add(piece, tokenizer.encode(piece, add_special_tokens=False), final=not text))
        if not text:
            return joined(parts)


def by_vllm(plan: Any, text: str) -> AnswerParts:
    """Return what vLLM's server makes of a whole answer."""
    ids = byte_level().encode(text, add_special_tokens=False)
    reasoning, content, calls = plan.make().parse(
        text, plan.request, enable_auto_tools=True, model_output_token_ids=ids
    )
    found = tuple(CallPart(at, None, call.name, call.arguments) for at, call in enumerate(calls or ()))
    return AnswerParts(content or None, reasoning or None, found)


@pytest.mark.slow
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
@pytest.mark.parametrize("parser", ["hermes", "pythonic", "qwen3_coder", "qwen3_xml", "xlam", "granite"])
async def test_streams_whole_answers_and_vllm_agree(parser: str, reasoning: str | None) -> None:
    """For each text, the joined stream, the whole answer and vLLM's answer have the same content and calls.

    Text that vLLM omits at the end, because a call begins there, is content.
    """
    parsers = await asyncio.to_thread(load_parsers, parser, reasoning)
    rng, wrong, has_calls = random.Random(0), [], 0
    for choice in CHOICES:
        plan: Any = parsers.plan(loaded(make_byte_level()), question(choice))
        for name, text in TEXTS.items():

            def reader(plan: Any = plan, choice: str = choice) -> AnswerReader:
                return AnswerReader(plan.answer_parser, question(choice), [], show_reasoning=True, one_call=False)

            ids = byte_level().encode(text, add_special_tokens=False)
            whole = plain(await reader().whole(text, ids))
            expected = by_vllm(plan, text)
            reasoning, content = plan.make().extract_reasoning(text, plan.request)
            if not expected.calls and (content or "").startswith(expected.content or ""):
                expected = AnswerParts(content or None, reasoning or None)
            has_calls += len(whole.calls)
            for _ in range(3):
                stream = plain(await streamed(reader(), text, rng))
                if not stream == whole == expected:
                    wrong.append(f"{choice}, {name}: {stream}, whole {whole}, vLLM {expected}")
    assert wrong == []
    assert has_calls


THOUGHTS = (
    "<think>2 and 3</think>It is 5.",
    "2 and 3\n</think>\n\nIt is 5. ",
    f"<think>\n2 and 3\n</think>\n\nSure. {CALL}",
    f"<think>a</think>b<think>c</think>d{CALL[:-9]}",
    "a <think>b</think></think> c",
    "<think>cut </th",
)


@pytest.mark.parametrize("parser", [None, "hermes"])
async def test_the_marks_of_reasoning_are_read_from_text(parser: str | None) -> None:
    """A stream has the parts of the whole answer, whatever tokens spell a mark, and whatever comes with it."""
    tokenizer = tokenizer_of("qwen3")
    parsers: Any = await asyncio.to_thread(load_parsers, parser, "deepseek_r1")
    rng, asks = random.Random(0), question("auto" if parser else "none")
    plan = parsers.plan(tokenizer, asks)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    async def read(text: str, prompt: str, sizes: tuple[int, ...]) -> AnswerParts:
        reader = AnswerReader(plan.answer_parser, asks, encode(prompt), show_reasoning=True, one_call=False)
        if not sizes:
            return plain(await reader.whole(text, encode(text)))
        parts: list[AnswerParts] = []
        while not parts or text:
            size = rng.choice(sizes)
            piece, text = text[:size], text[size:]
            parts.append(await reader.add(piece, encode(piece), final=not text))
        return plain(joined(parts))

    earlier = "<think>1</think>Yes.<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    for text in THOUGHTS:
        for prompt in ("", f"{earlier}<think>\n", f"{earlier}<think>\n\n</think>\n\n"):
            whole = await read(text, prompt, ())
            for sizes in ((1,), (1, 2, 7, 40), (400,)):
                assert await read(text, prompt, sizes) == whole, (text, prompt)
    assert await read(THOUGHTS[0], earlier, (1,)) == AnswerParts("It is 5.", "2 and 3")
    assert await read("It is 5.", f"{earlier}<think>\n\n</think>\n\n", ()) == AnswerParts("It is 5.")


async def test_the_text_of_a_cut_call_is_in_the_answer() -> None:
    """Some parsers omit the beginning of a cut call. Its text is content, streamed or not."""
    parsers: Any = await asyncio.to_thread(load_parsers, "qwen3_coder", "qwen3")
    plan = parsers.plan(tokenizer_of("qwen3"), question("auto"))
    text = "<think>2</think>Sure. <tool_call>\n<funct"
    assert "<funct" not in (by_vllm(plan, text).content or "")
    reader = AnswerReader(plan.answer_parser, question("auto"), [], show_reasoning=True, one_call=False)
    assert (await streamed(reader, text, random.Random(0))).content == text.partition("</think>")[2]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_of_many_marks_takes_no_quadratic_time(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    """After so much work, the parser of streams gets no more text, and the whole text is parsed at the end."""
    monkeypatch.setattr(parsers, "MAX_WORK", 20_000)
    loaded: Any = await asyncio.to_thread(load_parsers, "hermes", "deepseek_r1")
    plan = loaded.plan(tokenizer_of("qwen3"), question("auto"))
    text = f"2 and 3</think>Sure. {'</tool_call>x' * 400}"
    reader = AnswerReader(plan.answer_parser, question("auto"), [], show_reasoning=True, one_call=False)
    found = await (streamed(reader, text, random.Random(0)) if is_stream else reader.whole(text, []))
    assert plain(found) == by_vllm(plan, text)
    assert reader._num_given < 1000
