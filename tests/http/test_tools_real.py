"""Structured outputs with vLLM: a model with random weights calls a required tool, or writes one of given texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollbus.frontend.http import Settings
from rollbus.frontend.tokenization import load_tokenizer
from tests.http.support import client_of, http_before

pytestmark = pytest.mark.vllm

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"sign": {"enum": ["plus", "minus"]}, "exact": {"type": "boolean"}},
            "required": ["sign", "exact"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "add"}}


# The parser of Hermes uses a grammar of its format, and the other parser uses a JSON schema of all calls.
@pytest.mark.parametrize("parser", ["hermes", "pythonic"])
async def test_the_arguments_of_a_forced_call_match_the_schema(nats_url: str, real_fleet: str, parser: str) -> None:
    """`required` and a named function, streamed or not, give arguments that match the schema."""
    async with http_before(nats_url, real_fleet, Settings(tool_call_parser=parser)) as http, client_of(http) as client:
        await http.own.fleet.wait_for_workers()
        (worker,) = http.own.fleet.workers
        tokenizer = load_tokenizer(Path(worker.model_path or ""))
        ids = range(worker.capabilities.vocab_size)
        asked: dict[str, Any] = {
            "model": worker.model,
            "messages": [{"role": "user", "content": "2 + 3?"}],
            "tools": [ADD],
            "max_tokens": 400,
            # A draw may write blanks up to the limit in the middle of a call.
            "seed": 1,
            "logit_bias": {str(each): _bias(tokenizer.token_bytes(each)) for each in ids},
            "parallel_tool_calls": False,
            "extra_body": {"return_token_ids": True},
        }
        for choice in ("required", NAMED):
            (answer,) = (await client.chat.completions.create(**asked, tool_choice=choice)).choices
            (call,) = answer.message.tool_calls
            found = [(call.function.name, call.function.arguments, answer.finish_reason, len(answer.token_ids))]
            name, arguments, reason, num_tokens = "", "", "", 0
            async for event in await client.chat.completions.create(**asked, tool_choice=choice, stream=True):
                (part,) = event.choices
                reason = part.finish_reason or reason
                num_tokens += len(getattr(part, "token_ids", None) or [])
                for delta in part.delta.tool_calls or []:
                    name += delta.function.name or ""
                    arguments += delta.function.arguments or ""
            found.append((name, arguments, reason, num_tokens))
            for name, arguments, reason, num_tokens in found:
                decoded = json.loads(arguments)
                assert (name, set(decoded)) == ("add", {"sign", "exact"})
                assert decoded["sign"] in ("plus", "minus")
                assert isinstance(decoded["exact"], bool)
                assert reason == ("tool_calls" if choice == "required" else "stop")
                assert num_tokens > 0


def _bias(token: bytes) -> float:
    """Return a bias against blanks and commas, which random weights would otherwise repeat without end."""
    if not token.strip():
        return -100
    return -50 if b"," in token else 0


async def test_structured_outputs_give_one_of_the_allowed_texts(nats_url: str, real_fleet: str) -> None:
    """With structured outputs, a model with random weights writes one of the given texts."""
    async with http_before(nats_url, real_fleet) as http, client_of(http) as client:
        await http.own.fleet.wait_for_workers()
        (model,) = (await client.models.list()).data
        answer = await client.completions.create(
            model=model.id,
            prompt="Yes or no?",
            max_tokens=8,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
    assert answer.choices[0].text in ("yes", "no")
