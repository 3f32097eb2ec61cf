"""Helpers for the tests of the OpenAI routes."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai

from rollbus.frontend.http.settings import Settings
from rollbus.workers.engines.synthetic.config import SyntheticConfig
from tests.http.small_tokenizers import make_byte_level, save
from tests.http.support import Http, http_service

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CONFIG = SyntheticConfig(vocab_size=264, eos_token_id=262, max_model_len=512)
"""The model may generate each token of the tokenizer."""


def client_of(http: Http) -> Any:
    """Return the OpenAI client without retries, which would hide failures.

    Its type is Any because of rollbus's extra fields.
    """
    return openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0)


@contextlib.asynccontextmanager
async def talking(
    nats_url: str, fleet: str, folder: Path, config: SyntheticConfig = CONFIG
) -> AsyncIterator[tuple[Http, Any]]:
    """Serve a synthetic model with a byte tokenizer. Yield the service and a client of it."""
    settings = Settings(tokenizer=save(make_byte_level(), folder))
    async with http_service(nats_url, fleet, settings, config=config) as http, client_of(http) as client:
        yield http, client
