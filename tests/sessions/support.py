"""A service with sessions in front of synthetic workers that write given texts, and a client for the owner's routes."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from msgspec.structs import replace

from rollbus.frontend.http import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.support import Http, http_service
from tests.sessions.families import TEMPLATES, tokenizer_of

EOS = 263
CONFIG = SyntheticConfig(vocab_size=272, eos_token_id=EOS, max_model_len=8192)


def replace_context(size: int) -> SyntheticConfig:
    """Return the configuration of a model with a context of so many tokens."""
    return replace(CONFIG, max_model_len=size)


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def write_call(a: int, b: int) -> str:
    """Return the text of a call as a model writes it, with other blanks than the template."""
    return f'<tool_call>\n{{"name":"add","arguments":{{"b": {b}, "a": {a}}}}}\n</tool_call>'


def save_qwen3(folder: Path) -> Path:
    """Write the tokenizer and the template of a small model in the format of Qwen3."""
    wrapped: Any = tokenizer_of("qwen3").wrapped
    wrapped.backend_tokenizer.save(str(folder / "tokenizer.json"))
    template = (TEMPLATES / "qwen3.jinja").read_text().removesuffix("\n")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Owner:
    """The routes of a trainer."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client

    async def open(self, **fields: Any) -> dict[str, Any]:
        """Open a session."""
        answer = await self.client.post("/v1/rl/sessions", json=fields)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def samples(self, session: dict[str, Any], **query: Any) -> list[dict[str, Any]]:
        """Return the samples of a session."""
        answer = await self.client.get(f"/v1/rl/sessions/{session['id']}/samples", params=query)
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["samples"]
        return found

    async def read(self, session: dict[str, Any]) -> dict[str, Any]:
        """Return a session."""
        found: dict[str, Any] = (await self.client.get(f"/v1/rl/sessions/{session['id']}")).json()
        return found

    async def num_turns(self, session: dict[str, Any]) -> int:
        """Return the number of a session's turns."""
        return int((await self.read(session))["num_turns"])


def agent_of(session: dict[str, Any], **options: Any) -> "openai.AsyncOpenAI":
    """Return an unchanged client of OpenAI for a session."""
    return openai.AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], **{"max_retries": 0, **options})


Serving = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Http, Owner]]]


@contextlib.asynccontextmanager
async def serving(nats_url: str, fleet: str, folder: Path, **settings: Any) -> AsyncIterator[tuple[Http, Owner]]:
    """Serve sessions with vLLM's parsers for the format of Qwen3."""
    config = settings.pop("config", CONFIG)
    options = Settings(
        tokenizer=save_qwen3(folder), **{"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **settings}
    )
    async with http_service(nats_url, fleet, options, config=config) as http:
        yield http, Owner(http.client)
