"""Requests that the OpenAI routes refuse before publishing, and fields that they ignore."""

from pathlib import Path
from typing import Any

import pytest

from tests.http.openai_support import CHAT, COMPLETIONS, talking

USER = {"role": "user", "content": "the"}
TOOL = {"type": "function", "function": {"name": "f"}}
BOTH: list[tuple[dict[str, Any], str]] = [
    ({"unheard": 1}, "unheard"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 2, "nvext": {"extra_fields": ["engine_data"]}}, "n"),
    ({"seed": -2}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"min_tokens": 20, "max_tokens": 3}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [264]}, "stop_token_ids"),
    ({"logit_bias": {"264": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"priority": 2**40}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream_options": {"include_usage": False}}, "stream_options"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"bad_words": [" "], "max_tokens": 1}, "bad_words"),
    ({"nvext": {"token_data": []}}, "nvext.token_data"),
    ({"nvext": {"token_data": [264]}}, "nvext.token_data[0]"),
    ({"nvext": {"token_data": [-1]}}, "nvext.token_data[0]"),
    ({"nvext": {"token_data": "text"}}, "nvext.token_data"),
    ({"nvext": {"token_data": [1]}, "tokens": [2]}, "tokens"),
    ({"nvext": {"cache_salt": "a"}, "cache_salt": "b"}, "cache_salt"),
    ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    ({"nvext": {"routed_experts_prompt_start": 500}}, "nvext.routed_experts_prompt_start"),
    ({"nvext": {"routed_experts_prompt_start": 0.5}}, "nvext.routed_experts_prompt_start"),
    ({"nvext": {"routed_experts_prompt_start": -1}}, "nvext.routed_experts_prompt_start"),
    ({"nvext": {"extra_fields": ["timing", "token_idz"]}}, "nvext.extra_fields[1]"),
    ({"timeout_s": 0}, "timeout_s"),
    ({"prompt_cache_key": "a\n"}, "prompt_cache_key"),
    ({"tokens": [1] * 512}, "tokens"),
]
OF_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities[0]"),
]
OF_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["the", 5]}, "prompt"),
    ({"prompt": ["the", [5]]}, "prompt"),
    ({"prompt": [0.5]}, "prompt[0]"),
    ({"prompt": [[5], [264]]}, "prompt[1][0]"),
    ({"prompt": [[5], []]}, "prompt[1]"),
    ({"prompt": ["the"] * 257}, "prompt"),
    ({"prompt": ["a", "b"], "nvext": {"extra_fields": ["engine_data"]}}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"messages": [USER]}, "messages"),
]
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"run": "1"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "x",
    "stop": None,
    "echo": False,
    "stream_options": {},
    "response_format": {"type": "text"},
    "spaces_between_special_tokens": True,
    "nvext": {
        "annotations": ["x"],
        "backend_instance_id": 3,
        "agent_hints": {"osl": 3},
        "extra_fields": ["stop_reason"],
    },
    "max_tokens": 2,
}


async def test_a_refused_request_names_its_field(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A refused request gives 400 with the field's name, streamed or not, and never reaches the engine."""
    async with talking(nats_url, fleet, tmp_path) as (http, _):
        base: dict[str, Any] = {"messages": [USER]}
        cases = [(CHAT, base, *case) for case in [*BOTH, *OF_CHAT]]
        cases += [(COMPLETIONS, {"prompt": "the"}, *case) for case in [*BOTH, *OF_COMPLETIONS]]
        for path, base, body, param in cases:
            for stream in ({}, {"stream": True}) if "stream_options" not in body else ({},):
                answer = await http.client.post(path, json={**base, **body, **stream})
                assert answer.status_code == 400, (path, body, answer.text)
                error = answer.json()["error"]
                assert error["param"] == param, (path, body, error)
                assert error["message"].startswith(param), (path, body, error)
        assert http.own.stats().requests == 0


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "the"})])
async def test_fields_that_only_other_servers_need_are_ignored(
    nats_url: str, fleet: str, tmp_path: Path, path: str, prompt: dict[str, Any]
) -> None:
    """Fields that only other servers need, and unknown hints, are ignored."""
    more: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto"} if path == CHAT else {"best_of": 1}
    async with talking(nats_url, fleet, tmp_path) as (http, _):
        answer = await http.client.post(path, json={**prompt, **HARMLESS, **more})
    assert answer.status_code == 200, answer.text
    assert "nvext" not in answer.json()


async def test_tools_are_shown_to_the_model(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """With `tool_choice` none, the prompt contains the tools. A prompt of token ids stays unchanged."""
    asked = {"messages": [USER], "tools": [TOOL], "max_tokens": 1, "return_token_ids": True}
    async with talking(nats_url, fleet, tmp_path) as (http, _):
        shown = (await http.client.post(CHAT, json={**asked, "tool_choice": "none"})).json()
        given = (await http.client.post(CHAT, json={**asked, "nvext": {"token_data": [5, 6]}})).json()
        text = await http.client.post("/v1/detokenize", json={"tokens": shown["prompt_token_ids"]})
    assert text.json()["prompt"].startswith("(f)<user>the")
    assert given["prompt_token_ids"] == [5, 6]
