"""Conversion of a chat into token ids, with vLLM's result for the same messages, and the routes that only tokenize."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ...schemas import limits
from ...schemas.decoding import JsonObject
from ...schemas.errors import InvalidRequest
from ..tokenization import SHORT_TEXT, Tokenizer, TokenizerUnavailable, joined
from .body import decode_body, read_body
from .calls import json_response
from .errors import HttpError
from .requests import find_target
from .service import HttpRoute, RouteTable, Service

TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of content parts with their text in the field `text`."""
FUNCTION_FIELDS: Final = ("name", "description", "parameters")
"""Fields of a tool that vLLM passes to templates even if they are null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The inputs of a chat's prompt. Names and defaults are vLLM's."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool | None = None
    """None: True unless the final message is to be continued."""
    continue_final_message: bool = False
    add_special_tokens: bool = False
    """Adds special tokens besides those in the template."""
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


async def encode_text(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text. A long text does not block other requests."""
    if len(text) <= SHORT_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    """Return the token ids of a chat's prompt without blocking other requests.

    Raises:
        InvalidRequest: a message is invalid, the model's template rejects the messages, a reserved name is set, or both
            flags are set.
        HttpError: 501, the model has no chat template.
    """
    try:
        # A thread would wait longer for the interpreter lock.
        if len(msgspec.json.encode([chat.messages, chat.tools, chat.chat_template_kwargs])) <= SHORT_TEXT:
            return _encode_chat(tokenizer, chat)
        return await asyncio.to_thread(_encode_chat, tokenizer, chat)
    except TokenizerUnavailable as exc:
        raise HttpError(501, str(exc), code="no_chat_template") from exc
    except RecursionError:
        raise InvalidRequest("messages", "are nested too deeply", "fewer levels") from None


def _encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    adds, given = chat.add_generation_prompt, chat.messages
    takes_parts = any(isinstance(message.get("content"), list) for message in given) and tokenizer.takes_parts
    messages = [template_message(f"messages[{at}]", each, takes_parts=takes_parts) for at, each in enumerate(given)]
    text = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=not chat.continue_final_message if adds is None else adds,
        continue_final_message=chat.continue_final_message,
        tools=chat.tools,
        chat_template_kwargs=chat.chat_template_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)


def template_message(field: str, given: Mapping[str, Any], *, takes_parts: bool = False) -> JsonObject:
    """Return a message in the form that templates expect.

    Fields unknown to vLLM, such as `annotations`, are omitted, as in vLLM.

    Args:
        takes_parts: the template takes text parts. False: they are joined by line ends, as those of tools always are.
    """
    role = given.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{field}.role", "is not text", "system, user, assistant or tool")
    content = _content(f"{field}.content", given.get("content"))
    message: JsonObject = {"role": role, "content": content if takes_parts and role != "tool" else joined(content)}
    if isinstance(given.get("name"), str):
        message["name"] = given["name"]
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant":
        if given.get("tool_calls"):
            message["tool_calls"] = _tool_calls(f"{field}.tool_calls", given["tool_calls"])
        reasoning = given.get("reasoning")
        if reasoning is None:
            reasoning = given.get("reasoning_content")
        if reasoning is not None:
            # Templates use either name.
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message


def _content(field: str, content: object) -> str | list[JsonObject]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field, "is neither text nor a list", "text, or a list of text parts")
    return [{"type": "text", "text": _part(f"{field}[{index}]", part)} for index, part in enumerate(content)]


def _part(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise InvalidRequest(field, "is not text", '{"type": "text", "text": ...}')
    return str(part["text"])


def _tool_calls(field: str, calls: object) -> list[JsonObject]:
    """Return tool calls with the arguments as objects, as templates expect. In requests, they are JSON in a string."""
    if not isinstance(calls, list):
        raise InvalidRequest(field, "is not a list", "a list of function calls")
    found = []
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise InvalidRequest(f"{field}[{index}]", "is not a function call", '{"function": {...}, ...}')
        function = call["function"]
        found.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return found


def _arguments(given: object) -> JsonObject:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            # The model generated these arguments in an earlier turn. An error would end every conversation that has an
            # invalid call.
            return {}
    return given if isinstance(given, dict) else {}


def template_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[JsonObject] | None:
    """Return tools in the format in which vLLM passes them to chat templates; None: there are none."""
    shown = []
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict):
            raise InvalidRequest(f"tools[{index}].function", "is not an object", '{"name": ..., "parameters": {...}}')
        fields = {name: function.get(name) for name in FUNCTION_FIELDS}
        if function.get("strict") is not None:
            fields["strict"] = function["strict"]
        shown.append({"type": "function", "function": fields})
    return shown or None


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A text as `prompt`, or a chat as `messages`. The fields after `return_token_strs` are for chats only."""

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    add_special_tokens: bool | None = None
    """Null means true for a text, and false for a chat, because the chat template adds the special tokens."""
    return_token_strs: bool | None = False
    add_generation_prompt: bool | None = None
    """Null means true, unless `continue_final_message` is true."""
    continue_final_message: bool = False
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
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
            raise InvalidRequest("prompt", "is missing", "a text, or messages instead")
        for name in ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"):
            if getattr(body, name):
                raise InvalidRequest(name, "is given with a prompt", "with messages")
        return None
    if body.prompt is not None:
        raise InvalidRequest("prompt", "is given with messages", "one of the two")
    return Chat(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens is True,
        tools=template_tools(body.tools),
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
        raise InvalidRequest(f"tokens[{index}]", f"is {token_ids[index]}", "ids of the model's tokenizer")
    return tokenizer.decode(token_ids, skip_special_tokens=False)


_TOKENIZE = HttpRoute(tokenize, TokenizeBody, TokenizeAnswer)
_DETOKENIZE = HttpRoute(detokenize, DetokenizeBody, DetokenizeAnswer)
ROUTES: RouteTable = {
    ("POST", "/v1/tokenize"): _TOKENIZE,
    ("POST", "/tokenize"): _TOKENIZE,
    ("POST", "/v1/detokenize"): _DETOKENIZE,
    ("POST", "/detokenize"): _DETOKENIZE,
}
