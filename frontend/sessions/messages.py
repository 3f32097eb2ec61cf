"""Comparison of the messages of an incoming history with the messages that a session has served."""

import hashlib
import hmac
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from ...schemas.decoding import JsonObject

NUMBER: Final = "\0number "
"""Prefix of a number in decoded arguments. Numbers are compared as they are written: 1 and 1.0 differ."""
ANSWER_ID: Final = re.compile(r"(?:(?:rs|msg|fc)_(.+)_\d+|chatcmpl-(.+))", re.DOTALL)
"""Id of an item of a response, or of a chat's answer, with the id of its request."""


SETTING: Final = ("model", "tools", "variables")
"""Fields of a turn's setting."""


class MessageKey(NamedTuple):
    """The parts of a message that decide whether two messages are the same."""

    role: str
    content: str
    """Text of the content. For an assistant, without blanks at its ends: clients strip them."""
    tool_calls: tuple[tuple[str, str], ...] = ()
    """Name and canonical arguments of each call."""
    name: str = ""
    tool_call_id: str = ""
    reasoning: str = ""
    """Reasoning without blanks at its ends. Many clients drop it, so an empty one equals any."""

    def difference(self, served: "MessageKey") -> str | None:
        """Return the first field in which this message of a client differs from a served one; None: they are equal."""
        for field in ("role", "content", "tool_calls", "name", "tool_call_id"):
            if getattr(self, field) != getattr(served, field):
                return field
        return "reasoning" if self.reasoning and self.reasoning != served.reasoning else None


def key_of(message: Mapping[str, Any]) -> MessageKey:
    """Return the key of a message. Unicode is not normalized."""
    role, content = str(message.get("role")), text_of(message.get("content"))
    if role != "assistant":
        return MessageKey(
            role, content, name=_text(message.get("name")), tool_call_id=_text(message.get("tool_call_id"))
        )
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        calls.append((_text(function.get("name")), canonical_arguments(function.get("arguments"))))
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    return MessageKey(role, content.strip(), tuple(calls), reasoning=_text(reasoning).strip())


def call_ids(message: Mapping[str, Any]) -> set[str]:
    """Return the ids by which a client shows which answer it means.

    These are the ids of its tool calls, that of the answer's request, and the turn in the signature of its reasoning.
    """
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    own = ANSWER_ID.fullmatch(_text(message.get("id")))
    request = message.get("id") if own is None else own[1] or own[2]
    found = (request, turn_of_seal(message), *(call.get("id") for call in calls))
    return {each for each in found if isinstance(each, str) and each}


def make_seal(key: str, turn: str) -> str:
    """Return the signature of a turn's reasoning: the turn's id with a code that only the session's services know."""
    return f"{turn}.{hmac.new(key.encode(), turn.encode(), hashlib.sha256).hexdigest()[:32]}"


def turn_of_seal(message: Mapping[str, Any]) -> str:
    """Return the id of the turn in the signature of a message's reasoning. Its code is not checked."""
    return _text(message.get("seal")).partition(".")[0]


def text_of(content: object) -> str:
    """Return the text of a message's content, with its text parts joined as in the prompt."""
    if isinstance(content, list):
        return "\n".join(_text(part.get("text")) if isinstance(part, Mapping) else _text(part) for part in content)
    return _text(content)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def canonical_arguments(arguments: object) -> str:
    """Return the arguments of a call so that the order of names and blanks do not count.

    Text that is not JSON is returned without blanks at its ends.
    """
    try:
        text, number = arguments if isinstance(arguments, str) else json.dumps(arguments or {}), NUMBER.__add__
        found = json.loads(text, parse_int=number, parse_float=number, parse_constant=number)
        return json.dumps(found, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return arguments.strip() if isinstance(arguments, str) else repr(arguments)


def frame_of(setting: Mapping[str, Any]) -> str:
    """Return a digest of a turn's setting, `Turn.setting`."""
    text = json.dumps([setting[name] or None for name in SETTING], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all strings in it changed, also the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): map_strings(each, change) for name, each in value.items()}
    return [map_strings(each, change) for each in value] if isinstance(value, list) else value


def first_exchange(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the first answer with calls and their results, with short texts; empty: there are no results."""
    # A hostile client may give calls to other roles too.
    is_call = (message["role"] == "assistant" and message.get("tool_calls") for message in messages)
    begin = next((at for at, found in enumerate(is_call) if found), len(messages))
    results = takewhile(lambda message: message["role"] == "tool", messages[begin + 1 :])
    # Some templates reject calls beside text.
    found = [{**each, "content": each.get("content") and "a"} for each in (*messages[begin : begin + 1], *results)]
    return [without_reasoning(found[0]), *found[1:]] if len(found) > 1 else []


def changed_setting(served: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """Return the first field that differs between two settings: `model`, `tools` or `variables`."""
    before, after = ([json.dumps(each[name] or None, sort_keys=True) for name in SETTING] for each in (served, given))
    return next(name for name, *values in zip(SETTING, before, after, strict=True) if values[0] != values[1])


def without_reasoning(message: Mapping[str, Any]) -> JsonObject:
    """Return a message without its reasoning."""
    return {name: value for name, value in message.items() if name not in ("reasoning", "reasoning_content")}
