"""`/tokenize` and `/detokenize`, with vLLM's fields and defaults."""

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...schemas import limits
from ...schemas.errors import InvalidRequest
from ..tokenization import Tokenizer
from .body import decode_body, read_body
from .chat import Chat, encode_chat, encode_text
from .request_target import find_target
from .service import HttpRoute, RouteTable, Service
from .status import json_response

__all__ = ["ROUTES", "DetokenizeBody", "TokenizeBody"]


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A text as `prompt`, or a chat as `messages`. The fields after `return_token_strs` are for chats only."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Null means true for a text, and false for a chat, because the chat template adds the special tokens."""
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    """Null means true, unless `continue_final_message` is true."""
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: None = None
    """Must be null. A template is a program, so the service runs only the model's own template."""
    media_io_kwargs: None = None
    mm_processor_kwargs: None = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Token ids to convert to text."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]]


class TokenizeAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    """Limit on the sum of prompt tokens and generated tokens."""
    tokens: list[int]
    token_strs: list[str] | None
    """The tokens as the vocabulary spells them, if the request has `return_token_strs`; else null."""


class DetokenizeAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """Text of the token ids."""

    prompt: str


async def tokenize(service: Service, request: Request) -> Response:
    """Return the token ids of a text or a chat, and the model's token limit."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), TokenizeBody)
    target = await find_target(service, request, body.model)
    chat = _chat(body)
    tokenizer = await service.tokenizer(target.worker)
    if chat is not None:
        token_ids = await encode_chat(tokenizer, chat)
    else:
        add_special_tokens = body.add_special_tokens is not False
        token_ids = await encode_text(tokenizer, body.prompt or "", add_special_tokens=add_special_tokens)
    strings = await asyncio.to_thread(tokenizer.tokens, token_ids) if body.return_token_strs else None
    max_model_len = target.capabilities.max_model_len
    return json_response(
        TokenizeAnswer(count=len(token_ids), max_model_len=max_model_len, tokens=token_ids, token_strs=strings)
    )


def _chat(body: TokenizeBody) -> Chat | None:
    """Return the chat, or None if the body has a text.

    Raises:
        InvalidRequest: the body has both, or neither, or a text with fields of a chat.
    """
    if body.messages is None:
        if body.prompt is None:
            raise InvalidRequest(field="prompt", problem="is missing", allowed="a text, or messages instead")
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise InvalidRequest(field=name, problem="is given with a prompt", allowed="with messages")
        return None
    if body.prompt is not None:
        raise InvalidRequest(field="prompt", problem="is given with messages", allowed="one of the two")
    return Chat(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens is True,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
    )


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    service.admit(request)
    body = decode_body(await read_body(request, service.settings), DetokenizeBody)
    target = await find_target(service, request, body.model)
    tokenizer = await service.tokenizer(target.worker)
    return json_response(DetokenizeAnswer(prompt=await asyncio.to_thread(_text, tokenizer, body.tokens)))


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    used = list(set(token_ids))
    unknown = {token_id for token_id, token in zip(used, tokenizer.tokens(used), strict=True) if not token}
    if unknown:
        index = next(index for index, token_id in enumerate(token_ids) if token_id in unknown)
        raise InvalidRequest(
            field=f"tokens[{index}]", problem=f"is {token_ids[index]}", allowed="ids of the model's tokenizer"
        )
    return tokenizer.decode(token_ids, skip_special_tokens=False)


_TOKENIZE = HttpRoute(tokenize, TokenizeBody, TokenizeAnswer)
_DETOKENIZE = HttpRoute(detokenize, DetokenizeBody, DetokenizeAnswer)
ROUTES: RouteTable = {
    ("POST", "/v1/tokenize"): _TOKENIZE,
    ("POST", "/tokenize"): _TOKENIZE,
    ("POST", "/v1/detokenize"): _DETOKENIZE,
    ("POST", "/detokenize"): _DETOKENIZE,
}
