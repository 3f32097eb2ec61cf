"""Malformed and cut tool calls: a stream has the same parts as a whole answer, and that is the answer of vLLM's server.

The texts are of the formats of several models. Each parser gets all of them.
"""

import asyncio
import random
from typing import Any

import pytest

from rollbus.frontend.http.openai.parsers import AnswerParts, AnswerReader, CallPart, ToolQuestion, load_parsers
from tests.http.small_tokenizers import byte_level
from tests.http.test_tools import CALL, TOOL, TWO

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
        ids = tokenizer.encode(piece, add_special_tokens=False)
        parts.append(await reader.add(piece, ids, final=not text))
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
    """For each text, the joined stream, the whole answer and vLLM's answer have the same content and calls."""
    parsers = await asyncio.to_thread(load_parsers, parser, reasoning)
    rng, wrong, has_calls = random.Random(0), [], 0
    for choice in CHOICES:
        plan: Any = parsers.plan(byte_level(), question(choice))
        for name, text in TEXTS.items():

            def reader(plan: Any = plan, choice: str = choice) -> AnswerReader:
                return AnswerReader(plan.answer_parser, question(choice), [], show_reasoning=True, one_call=False)

            ids = byte_level().encode(text, add_special_tokens=False)
            whole = plain(await reader().whole(text, ids))
            expected = by_vllm(plan, text)
            has_calls += len(whole.calls)
            for _ in range(3):
                stream = plain(await streamed(reader(), text, rng))
                if not stream == whole == expected:
                    wrong.append(f"{choice}, {name}: {stream}, whole {whole}, vLLM {expected}")
    assert wrong == []
    assert has_calls
