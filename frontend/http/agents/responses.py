"""OpenAI's Responses API: the request, and its translation to a request of the chat route.

No response is stored outside of sessions: a request has the whole history in `input`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ..errors import invalid, unsupported
from ..openai.body import ChatBody
from ..text import StopStrings
from .turns import AgentFields, History, function_tool, read_string, read_text, read_type, refuse_fields

ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of a message, and the chat route's role for each. Many templates have no developer."""
TEXTS: Final = ("input_text", "output_text", "text", "refusal")
"""Types of content with text."""
ITEMS: Final = ("message", "reasoning", "function_call", "function_call_output")
"""Types of items in `input`."""
HOSTED: Final = ("web_search", "web_search_preview", "image_generation")
"""Types of tools of OpenAI's servers that clients offer unasked. Beside functions they are left out."""
NAMESPACE: Final = "."
"""Stands between the names of a namespace and of a function, in the name that the model sees."""
ENCRYPTED: Final = "reasoning.encrypted_content"
INCLUDABLE: Final = frozenset(
    (
        *(ENCRYPTED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
    )
)
"""Values of `include`. Answers without the tools of OpenAI's servers have none of it but the first."""
PREVIOUS: Final = "previous_response_id"
NOT_STORED: Final = "responses are not stored; send the whole history as input"
REFUSED: Final = {
    PREVIOUS: (NOT_STORED, (), "null"),
    "conversation": (NOT_STORED, (), "null"),
    "background": (NOT_STORED, (False,), "false"),
    "prompt": ("the service stores no prompts; use instructions and input", (), "null"),
    "truncation": ("the service never truncates prompts", ("disabled",), "disabled"),
    "context_management": ("the service compacts no histories", ([],), "null"),
    "moderation": ("the service moderates nothing", (), "null"),
    "image": ("this service accepts and generates text only", (), "null"),
    "access_programs": ("this service has no access programs", (), "null"),
    "top_logprobs": ("parts of an answer have no logprobs; use /v1/chat/completions", (0,), "0"),
}
"""By unsupported field: the reason, harmless values and the allowed values, for `refuse_fields`."""
NAMES: Final = (
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    (".function", ""),
)
"""The chat route's names of fields, and those of this API, for `renamed_errors`."""


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Additional content of a stream."""

    include_obfuscation: bool | None = None
    """Without effect: events have no random padding."""


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The reasoning of an answer."""

    effort: str | None = None
    """Variable of the chat template, as `reasoning_effort` of the chat route."""
    summary: str | None = None
    """Without effect: an answer has the reasoning itself and no summary."""
    generate_summary: str | None = None
    """Older name of `summary`."""


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The text of an answer."""

    format: JsonObject | None = None
    """`text`, `json_object`, or `json_schema` with `name` and `schema`."""
    verbosity: str | None = None
    """Only `medium`: the service does not control the length of answers."""


class ResponsesBody(AgentFields, kw_only=True, frozen=True):
    """The body of a response. Null has the effect of an omitted field."""

    input: str | list[JsonObject]
    """A text of the user, or the history: messages, reasoning, calls and their results."""
    instructions: str | None = None
    """The first system message."""
    max_output_tokens: int | None = None
    tools: list[JsonObject] | None = None
    """Only functions, alone or in a `namespace`. Beside them, tools for web searches and images are left out, and the
    answer's `tools` lacks them."""
    tool_choice: Literal["none", "auto", "required"] | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    """False: the answer omits all calls after the first."""
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stop: StopStrings = None
    include: list[str] | None = None
    stream_options: ResponsesStreamOptions | None = None
    prompt_cache_key: str | None = None
    """Requests with one key go to one worker if it has space."""
    user: str | None = None

    # Accepted without effect.
    store: bool | None = None
    """Answered as false."""
    client_metadata: JsonObject | None = None
    metadata: dict[str, str] | None = None
    max_tool_calls: int | None = None
    """Limits only the tools of OpenAI's servers."""
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: JsonObject | None = None

    # Known but not supported, unless they have a harmless value.
    previous_response_id: str | None = None
    """Only in sessions: the response whose history `input` continues."""
    conversation: str | JsonObject | None = None
    background: bool | None = None
    prompt: JsonObject | None = None
    truncation: str | None = None
    context_management: list[JsonObject] | None = None
    moderation: JsonObject | None = None
    image: JsonObject | None = None
    access_programs: JsonObject | None = None
    top_logprobs: int | None = None


def offered_tools(body: ResponsesBody) -> list[JsonObject]:
    """Return the tools that the model is offered."""
    tools = body.tools or []
    found = [tool for tool in tools if tool.get("type") not in HOSTED]
    return found or tools


def namespaces(body: ResponsesBody) -> list[str]:
    """Return the names of the namespaces of a request."""
    return [str(tool.get("name")) for tool in body.tools or () if tool.get("type") == "namespace"]


def translate_response(body: ResponsesBody, served: Sequence[JsonObject] = ()) -> ChatBody:
    """Return the request of the chat route.

    Args:
        served: the messages up to the response `previous_response_id`; empty: it is not supported.

    Raises:
        HttpError: 400, naming the field.
    """
    refuse_fields(body, {name: reason for name, reason in REFUSED.items() if not served or name != PREVIOUS})
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            reason = f"{describe(name)} is unknown, or needs logprobs, which parts of an answer do not have"
            raise unsupported(f"include[{index}]", reason, allowed=ENCRYPTED)
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    if text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "the service does not control the length of answers", allowed="medium")
    choice: Any = _tool_choice(body.tool_choice)
    return ChatBody(
        **body.chat_fields(),
        messages=read_history(body, served),
        tools=_tools(body) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        response_format=_response_format(text.format),
        reasoning_effort=reasoning.effort,
        stop=body.stop,
        prompt_cache_key=body.prompt_cache_key,
        user=body.user,
    )


def read_history(body: ResponsesBody, served: Sequence[JsonObject]) -> list[JsonObject]:
    """Return the messages of the chat: the instructions, the served messages and the input.

    Instructions replace a served system message at the beginning.

    Raises:
        HttpError: 400, naming the item.
    """
    history = History()
    if body.instructions:
        history.add({"role": "system", "content": body.instructions})
    if served:
        history.resume(served, with_system=not body.instructions)
    if isinstance(body.input, str):
        history.add({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _read_item(f"input[{index}]", item, history)
    history.check_answered("the end of input")
    if not history.messages:
        raise invalid("input", "has no message", "a text, or at least one item that is not an instruction")
    return history.finish()


def _read_item(field: str, item: JsonObject, history: History) -> None:
    # OpenAI's clients omit the type of messages.
    kind = read_type(field, {"type": "message", **item}, ITEMS)
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{field}.role", f"is {describe(role)}", ", ".join(ROLES))
        text = read_text(f"{field}.content", item.get("content"), TEXTS, joined="" if role == "assistant" else "\n")
        if role == "assistant":
            _turn(history, item, ("content", "tool_calls"))["content"] = text
        else:
            history.add({"role": ROLES[role], "content": text})
    elif kind == "reasoning":
        message = _turn(history, item, ("reasoning", "content", "tool_calls"))
        message["reasoning"] = _reasoning(field, item)
        if item.get("encrypted_content") is not None:
            message["seal"] = item["encrypted_content"]
    elif kind == "function_call":
        call_id, name = read_string(field, item, "call_id"), read_string(field, item, "name")
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise invalid(f"{field}.arguments", "is missing or is not text", "JSON in a text")
        if item.get("namespace") is not None:
            name = read_string(field, item, "namespace") + NAMESPACE + name
        history.add_call(f"{field}.call_id", _turn(history, item, ()), call_id, name, arguments)
    else:
        call_id = read_string(field, item, "call_id")
        history.add_result(f"{field}.call_id", call_id, read_text(f"{field}.output", item.get("output"), TEXTS))


def _turn(history: History, item: Mapping[str, object], later: tuple[str, ...]) -> JsonObject:
    """Return the assistant's message to which an item belongs: the last one, or a new one.

    Args:
        later: fields that the message must not have, because their items follow this one in one answer.
    """
    last = history.messages[-1] if history.messages else None
    if last is not None and last["role"] == "assistant" and not any(last.get(name) is not None for name in later):
        return last
    message: JsonObject = {"role": "assistant", "content": None}
    if isinstance(item.get("id"), str):
        message["id"] = item["id"]
    history.add(message)
    return message


def _reasoning(field: str, item: JsonObject) -> str:
    """Return the text of the reasoning, or else of its summary."""
    text = read_text(f"{field}.content", item.get("content"), ("reasoning_text", "text"), joined="")
    return text or read_text(f"{field}.summary", item.get("summary"), ("summary_text",))


def _tools(body: ResponsesBody) -> list[JsonObject]:
    offered, found = offered_tools(body), []
    for index, tool in enumerate(body.tools or ()):
        field = f"tools[{index}]"
        if tool.get("type") == "namespace":
            name, inner = read_string(field, tool, "name"), tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
                raise invalid(f"{field}.tools", f"is {describe(inner)}", "a list of functions")
            for at, each in enumerate(inner):
                made = _tool(f"{field}.tools[{at}]", each)
                made["function"]["name"] = name + NAMESPACE + read_string(f"{field}.tools[{at}]", each, "name")
                found.append(made)
        elif tool in offered:
            found.append(_tool(field, tool))
    return found


def _tool(field: str, tool: JsonObject) -> JsonObject:
    if tool.get("type") != "function":
        reason = "the service runs no tools; the client offers its own as functions"
        raise unsupported(f"{field}.type", f"is {describe(tool.get('type'))}, and {reason}", allowed="function")
    for name in ("defer_loading", "async"):
        if tool.get(name):
            raise unsupported(f"{field}.{name}", "the model sees all tools and waits for results", allowed="false")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _tool_choice(given: str | JsonObject | None) -> str | JsonObject | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise unsupported(
            "tool_choice.type",
            f"{describe(given.get('type'))} selects other tools",
            allowed="none, auto, required, function",
        )
    name = given.get("name")
    if given.get("namespace") is not None:
        name = read_string("tool_choice", given, "namespace") + NAMESPACE + read_string("tool_choice", given, "name")
    return {"type": "function", "function": {"name": name}}


def _response_format(given: JsonObject | None) -> JsonObject | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
