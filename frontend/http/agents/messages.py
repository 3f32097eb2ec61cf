"""Anthropic's Messages API: the request, and its translation to a request of the chat route."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from ....schemas.checks import describe
from ....schemas.decoding import JsonObject
from ..errors import invalid, unsupported
from ..openai.body import ChatBody
from ..text import StopStrings
from .turns import AgentFields, History, function_tool, read_block, read_string, read_text, read_type, refuse_fields

ROLES: Final = ("user", "assistant", "system")
TEXT: Final = ("text",)
OF_USER: Final = ("text", "tool_result")
OF_ASSISTANT: Final = ("text", "thinking", "tool_use")
"""Types of blocks in a message."""
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Tool choices, and those of the chat route."""
INVALID_JSON: Final = "INVALID_JSON"
"""The only name in the input of a call whose arguments are not a JSON object. Anthropic's clients know it."""
BILLING: Final = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that is for Anthropic's servers. It differs in each request."""
REFUSED: Final = {
    "container": ("the service runs no tools", (), "null"),
    "mcp_servers": ("the service calls no servers; the client offers its own tools", ([],), "null"),
    "thread": ("messages are not stored; send the whole history as messages", (), "null"),
    "speed": ("all requests have one speed; use priority", ("standard",), "standard"),
}
"""By unsupported field: the reason, harmless values and the allowed values, for `refuse_fields`."""
NAMES: Final = (
    ("max_completion_tokens", "max_tokens"),
    ("response_format", "output_config.format"),
    ("continue_final_message", "messages"),
    ("reasoning_effort", "output_config.effort"),
    ("stop", "stop_sequences"),
    ("chat_template_kwargs.enable_thinking", "thinking"),
    (".function.parameters", ".input_schema"),
    (".function", ""),
)
"""The chat route's names of fields, and those of this API, for `renamed_errors`."""


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The answer's effort and format."""

    effort: str | None = None
    """Variable of the chat template, as `reasoning_effort` of the chat route."""
    format: JsonObject | None = None
    """`{"type": "json_schema", "schema": ...}`."""


class CountTokensBody(AgentFields, kw_only=True, frozen=True):
    """A request whose prompt is counted. Null has the effect of an omitted field."""

    messages: Annotated[list[JsonObject], Meta(min_length=1)]
    """Messages of the user and the assistant. The answer continues a last message of the assistant."""
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    """Only the client's own tools, with `name` and `input_schema`."""
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    """`enabled` and `disabled` set the variable `enable_thinking` of the chat template. A budget has no effect: use
    `thinking_token_budget`."""
    output_config: OutputConfig | None = None
    context_management: JsonObject | None = None
    """Only edits that keep all."""

    # Accepted without effect.
    cache_control: JsonObject | None = None
    """Prefixes are always cached, and `usage` has the tokens that were."""
    betas: list[str] | None = None
    diagnostics: JsonObject | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    # Known but not supported, unless they have a harmless value.
    container: str | JsonObject | None = None
    mcp_servers: list[JsonObject] | None = None
    speed: str | None = None
    thread: JsonObject | None = None


class MessagesBody(CountTokensBody, kw_only=True, frozen=True):
    """The body of a message."""

    max_tokens: int
    """Above the rest of the context, it is the rest: clients send more than a small model has."""
    stop_sequences: StopStrings = None
    metadata: JsonObject | None = None
    """`user_id` is the chat route's `user`."""
    service_tier: str | None = None
    """Without effect."""
    inference_geo: str | None = None
    """Without effect."""


def translate_message(body: CountTokensBody) -> ChatBody:
    """Return the request of the chat route.

    Raises:
        HttpError: 400, naming the field.
    """
    refuse_fields(body, REFUSED)
    edits = (body.context_management or {}).get("edits", [])
    if not isinstance(edits, list):
        raise invalid("context_management.edits", f"is {describe(edits)}", "a list")
    for index, edit in enumerate(edits):
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            raise unsupported(
                f"context_management.edits[{index}]", "the service edits no histories", allowed='keep "all"'
            )
    config, answer = body.output_config or OutputConfig(), body if isinstance(body, MessagesBody) else None
    messages = read_messages(body)
    continues = messages[-1]["role"] == "assistant"
    choice, parallel = _tool_choice(body.tool_choice)
    fields = body.chat_fields()
    show, variables = _thinking(body)
    fields["chat_template_kwargs"] = {**variables, **(body.chat_template_kwargs or {})} or None
    if body.include_reasoning is None:
        fields["include_reasoning"] = show
    metadata = (answer and answer.metadata) or {}
    return ChatBody(
        **fields,
        messages=messages,
        continue_final_message=True if continues else None,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        max_completion_tokens=None if answer is None else answer.max_tokens,
        stop=None if answer is None else answer.stop_sequences,
        response_format=_response_format(config.format),
        reasoning_effort=config.effort,
        user=metadata["user_id"] if isinstance(metadata.get("user_id"), str) else None,
    )


def read_messages(body: CountTokensBody) -> list[JsonObject]:
    """Return the messages of the chat. Messages of the user that follow each other are one, as in Anthropic's API.

    Raises:
        HttpError: 400, naming the block.
    """
    history = History()
    if body.system:
        system = body.system
        if isinstance(system, list):
            system = [block for block in system if not str(block.get("text")).startswith(BILLING)]
        history.add({"role": "system", "content": read_text("system", system, TEXT)})
    texts: list[str] = []

    def end_user_message() -> None:
        if texts:
            history.add({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for index, message in enumerate(body.messages):
        field, role = f"messages[{index}]", message.get("role")
        if role not in ROLES:
            raise invalid(f"{field}.role", f"is {describe(role)}", ", ".join(ROLES))
        content = message.get("content")
        if role == "user":
            for at, block in _blocks(f"{field}.content", content):
                kind = read_type(at, block, OF_USER)
                if kind == "text":
                    texts.append(read_block(at, block, TEXT))
                    continue
                end_user_message()
                call_id = read_string(at, block, "tool_use_id")
                history.add_result(f"{at}.tool_use_id", call_id, read_text(f"{at}.content", block.get("content"), TEXT))
            if not content:
                texts.append("")
            continue
        end_user_message()
        history.check_answered("the next message")
        if role == "system":
            history.add({"role": "system", "content": read_text(f"{field}.content", content, TEXT)})
        else:
            _read_turn(field, content, history)
    end_user_message()
    if not history.messages:
        raise invalid("messages", "has only system messages", "at least one message of the user")
    history.check_answered("the end of messages")
    return history.finish()


def _blocks(field: str, content: object) -> list[tuple[str, JsonObject]]:
    if isinstance(content, str):
        return [(field, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise invalid(field, f"is {describe(content)}", "text, or a list of blocks")
    return [(f"{field}[{index}]", block) for index, block in enumerate(content)]


def _read_turn(field: str, content: object, history: History) -> None:
    """Add a message of the assistant."""
    message: JsonObject = {"role": "assistant", "content": None}
    texts: list[str] = []
    thoughts: list[str] = []
    history.add(message)
    for at, block in _blocks(f"{field}.content", content):
        kind = read_type(at, block, OF_ASSISTANT)
        if kind == "text":
            texts.append(read_block(at, block, TEXT))
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise invalid(f"{at}.thinking", f"is {describe(block.get('thinking'))}", "a text")
            thoughts.append(block["thinking"])
            if block.get("signature"):
                message["seal"] = block["signature"]
        else:
            given = block.get("input")
            if not isinstance(given, dict):
                raise invalid(f"{at}.input", f"is {describe(given)}", "an object")
            call_id, name = read_string(at, block, "id"), read_string(at, block, "name")
            history.add_call(f"{at}.id", message, call_id, name, arguments_of(given))
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)


def arguments_of(given: Mapping[str, Any]) -> str:
    """Return the arguments of a call as the model wrote them, apart from blanks, for the input of its block."""
    if given.keys() == {INVALID_JSON} and isinstance(given[INVALID_JSON], str):
        return str(given[INVALID_JSON])
    return msgspec.json.encode(given).decode()


def _tool(field: str, tool: JsonObject) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        reason = "the service has no tools of its own"
        raise unsupported(f"{field}.type", f"is {describe(tool['type'])}, and {reason}", allowed="custom")
    if tool.get("defer_loading"):
        raise unsupported(f"{field}.defer_loading", "the model sees all tools", allowed="false")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{field}.input_schema", "is missing or is not an object", "a JSON schema")
    return function_tool(tool.get("name"), tool.get("description"), tool["input_schema"], tool.get("strict"))


def _tool_choice(given: JsonObject | None) -> tuple[Any, bool | None]:
    """Return the chat route's `tool_choice` and `parallel_tool_calls`."""
    if given is None:
        return None, None
    kind, parallel = given.get("type"), False if given.get("disable_parallel_tool_use") is True else None
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid("tool_choice.type", f"is {describe(kind)}", ", ".join([*CHOICES, "tool"]))
    return CHOICES[kind], parallel


def _thinking(body: CountTokensBody) -> tuple[bool | None, JsonObject]:
    """Return the chat route's `include_reasoning`, and the variables of the template."""
    given = body.thinking or {"type": "adaptive"}
    kind, display = given.get("type"), given.get("display")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise invalid("thinking.type", f"is {describe(kind)}", "enabled, disabled, adaptive")
    if display not in (None, "summarized", "omitted"):
        raise invalid("thinking.display", f"is {describe(display)}", "summarized, omitted")
    variables = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    return False if display == "omitted" else None, variables


def _response_format(given: JsonObject | None) -> JsonObject | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise invalid("output_config.format", "is unknown or incomplete", "type json_schema with a schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}
