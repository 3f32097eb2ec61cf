"""Conversion of a chat into token ids, with the same result as vLLM for the same messages."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...schemas.errors import InvalidRequest
from ..tokenization import Tokenizer, TokenizerUnavailable
from .errors import HttpError

__all__ = ["Chat", "encode_chat", "encode_text"]

SHORT_TEXT: Final = 4096
"""Characters up to which tokenizing takes about as long as a switch to a thread and back, or less."""
TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of content parts with their text in the field `text`."""


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
        return await asyncio.to_thread(_encode_chat, tokenizer, chat)
    except TokenizerUnavailable as exc:
        raise HttpError(501, str(exc), code="no_chat_template") from exc


def _encode_chat(tokenizer: Tokenizer, chat: Chat) -> list[int]:
    adds = chat.add_generation_prompt
    text = tokenizer.apply_chat_template(
        [_message(f"messages[{index}]", message) for index, message in enumerate(chat.messages)],
        add_generation_prompt=not chat.continue_final_message if adds is None else adds,
        continue_final_message=chat.continue_final_message,
        tools=chat.tools,
        chat_template_kwargs=chat.chat_template_kwargs,
    )
    return tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)


def _message(field: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    Fields unknown to vLLM, such as `annotations`, are omitted, as in vLLM.
    """
    role = given.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(field=f"{field}.role", problem="is not text", allowed="system, user, assistant or tool")
    message: dict[str, Any] = {"role": role, "content": _content(f"{field}.content", given.get("content"))}
    if isinstance(given.get("name"), str):
        message["name"] = given["name"]
    if role == "tool" and "tool_call_id" in given:
        message["tool_call_id"] = given["tool_call_id"]
    if role == "assistant":
        if given.get("tool_calls"):
            message["tool_calls"] = _tool_calls(f"{field}.tool_calls", given["tool_calls"])
        reasoning = given.get("reasoning", given.get("reasoning_content"))
        if reasoning is not None:
            # Templates use either name.
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return message


def _content(field: str, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(field=field, problem="is neither text nor a list", allowed="text, or a list of text parts")
    return "\n".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))


def _part(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise InvalidRequest(field=field, problem="is not text", allowed='{"type": "text", "text": ...}')
    return str(part["text"])


def _tool_calls(field: str, calls: object) -> list[dict[str, Any]]:
    """Return tool calls with the arguments as objects, as templates expect. In requests, they are JSON in a string."""
    if not isinstance(calls, list):
        raise InvalidRequest(field=field, problem="is not a list", allowed="a list of function calls")
    found = []
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise InvalidRequest(
                field=f"{field}[{index}]", problem="is not a function call", allowed='{"function": {...}, ...}'
            )
        function = call["function"]
        found.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return found


def _arguments(given: object) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError):
            # The model generated these arguments in an earlier turn. An error would end every conversation that has an
            # invalid call.
            return {}
    return given if isinstance(given, dict) else {}
