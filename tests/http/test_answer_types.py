"""The responses equal their types in the OpenAPI document in each field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollbus.frontend.http.tokens import ChatAnswer, CompletionAnswer, GenerateAnswer
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.openai_support import CHAT, COMPLETIONS, CONFIG, talking

PROMPT = [5, 6, 7]
EXTRA = ["engine_data", "completion_token_ids", "prompt_token_ids", "worker_id", "timing", "weight_version"]
ASKED: list[tuple[str, type, dict[str, Any]]] = [
    ("/inference/v1/generate", GenerateAnswer, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
    (
        "/inference/v1/generate",
        GenerateAnswer,
        {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 2, "n": 2, "logprobs": 2, "prompt_logprobs": 1},
            "return_token_ids": True,
        },
    ),
    (CHAT, ChatAnswer, {"tokens": PROMPT, "max_tokens": 2}),
    (
        CHAT,
        ChatAnswer,
        {
            "tokens": PROMPT,
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 1,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "stop": "nowhere",
            "nvext": {"extra_fields": EXTRA},
        },
    ),
    (CHAT, ChatAnswer, {"tokens": PROMPT, "max_tokens": 2, "nvext": {"extra_fields": ["routed_experts"]}}),
    (CHAT, ChatAnswer, {"tokens": PROMPT, "max_tokens": 2, "n": 2, "return_routed_experts": True}),
    (COMPLETIONS, CompletionAnswer, {"prompt": PROMPT, "return_routed_experts": True}),
    (COMPLETIONS, CompletionAnswer, {"prompt": PROMPT}),
    (
        COMPLETIONS,
        CompletionAnswer,
        {
            "prompt": [PROMPT, PROMPT],
            "n": 2,
            "max_tokens": 2,
            "logprobs": 1,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        },
    ),
    (COMPLETIONS, CompletionAnswer, {"prompt": PROMPT, "max_tokens": 2, "nvext": {"extra_fields": EXTRA}}),
]


@pytest.mark.parametrize("config", [CONFIG, SyntheticConfig(vocab_size=264, num_experts=0)], ids=["moe", "dense"])
async def test_response_fields_match_the_openapi_document(
    nats_url: str, fleet: str, tmp_path: Path, config: SyntheticConfig
) -> None:
    """In a response, no field has another type, is missing, or is absent from the document."""
    async with talking(nats_url, fleet, tmp_path, config) as (http, _):
        for path, kind, body in ASKED:
            answer = await http.client.post(path, json=body)
            if answer.status_code == 400 and not config.num_experts:
                assert answer.json()["error"]["param"] in {"nvext.extra_fields", "return_routed_experts"}
                continue
            assert answer.status_code == 200, answer.text
            described: object = msgspec.json.decode(answer.content, type=kind)
            assert json.loads(msgspec.json.encode(described)) == answer.json(), (path, body)
