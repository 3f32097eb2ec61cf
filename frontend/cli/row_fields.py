"""Finds the prompt, the options and the data in one row of the input of `rollbus generate`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from ...schemas.checks import describe
from ...schemas.errors import InvalidRequest
from ...schemas.explain import nearest
from ...schemas.request import GenerateRequest
from ...schemas.sampling import SamplingParams

__all__ = ["Defaults", "RowParts", "near_option", "read_row"]

Messages = Sequence[Mapping[str, Any]]

SAMPLING_FIELDS: Final = frozenset(SamplingParams.__struct_fields__)
PROMPT_FIELDS: Final = ("prompt", "prompt_token_ids", "messages")
OPTION_FIELDS: Final = SAMPLING_FIELDS | (set(GenerateRequest.__struct_fields__) | {"tools"}) - {
    "prompt_token_ids",
    "request_id",
}
"""Fields of a row that change how its prompt is answered."""
SIMILARITY: Final = 0.8
"""How near an unknown field is to an option if it misspells the option: `max_new_tokens` is, `source` is not."""
MIN_COMPARED_CHARS: Final = 5
"""Shorter fields, such as `mode`, are near to too many options."""
BATCH_FIELDS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_IGNORED: Final = ("metadata", "service_tier", "store", "stream", "user")
"""Fields of OpenAI's bodies without an effect on the tokens."""
CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Defaults:
    """How rows are read, and the values of fields that a row does not state, in JSON's types."""

    fields: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)
    prompt_field: str | None = None
    """Field of the prompt. None: the one of `PROMPT_FIELDS` that a row has."""
    row_options: Literal["read", "keep"] | None = None
    """Whether the known options in a row of data are options (read) or data (keep). None: they are an error."""
    messages: Literal["drop-last", "continue"] | None = None
    """What happens with messages that end with the assistant. None: they are an error."""


@dataclass(frozen=True, slots=True)
class RowParts:
    """A row in its parts. Only the prompt and the names of the other fields are checked."""

    request_id: object
    """Id of the row; None: it has none."""
    prompt: str | Messages | None
    """The prompt if it is text or messages. None: it is under `prompt_token_ids` in `fields`."""
    fields: dict[str, object]
    """Fields of the request that the row states, also those of sampling."""
    tools: Messages | None
    continues: bool
    """True if the model continues the last message."""
    row: Mapping[str, object] | None
    """The row as it came, if it is data or a line of a batch."""


def read_row(row: Mapping[str, object], defaults: Defaults) -> RowParts:
    """Return the parts of a row.

    Raises:
        InvalidRequest: the row has no prompt or several, its prompt is not valid, or it has options among data.
    """
    request_id = row.get("request_id")
    kept: Mapping[str, object] | None = row
    if {"custom_id", "body"} <= row.keys() <= BATCH_FIELDS:
        request_id = row["custom_id"]
        name, fields = _read_batch(row)
        value = fields.pop(name)
    else:
        name = _prompt_name(row, defaults.prompt_field)
        value = row[name]
        fields, is_data = _read_options(row, name, defaults.row_options)
        kept = row if is_data else None
    tools = fields.pop("tools", None)
    if isinstance(value, str) and value:
        return RowParts(request_id, value, fields, None, False, kept)
    if not isinstance(value, list) or (not value and name != "prompt_token_ids"):
        allowed = "a non-empty string, token ids or messages"
        raise InvalidRequest(field=name, problem=f"is {describe(value)}", allowed=allowed)
    if name == "messages" or any(isinstance(item, Mapping) for item in value):
        messages, continues = _read_messages(name, value, defaults.messages)
        return RowParts(request_id, messages, fields, _read_tools(tools), continues, kept)
    return RowParts(request_id, None, {**fields, "prompt_token_ids": value}, None, False, kept)


@lru_cache(maxsize=1024)  # A data set has the same columns in all rows.
def near_option(name: str, options: Collection[str] = OPTION_FIELDS) -> str:
    """Return a question with the option that `name` seems to misspell, or an empty string."""
    return nearest(name, options, SIMILARITY) if len(name) >= MIN_COMPARED_CHARS else ""


def _prompt_name(row: Mapping[str, object], chosen: str | None) -> str:
    """Return the field of the prompt."""
    names = (chosen,) if chosen is not None else PROMPT_FIELDS
    found = [name for name in names if name in row]
    if len(found) > 1:
        allowed = f"one of them; --prompt-field {found[0]} takes it and keeps the others as data"
        raise InvalidRequest(field=" and ".join(found), problem="are both set", allowed=allowed)
    if not found:
        near = next(filter(None, (nearest(name, row, SIMILARITY) for name in names)), "")
        allowed = f"--prompt-field with one of its fields: {', '.join(row) or 'it has none'}"
        if chosen is None:
            allowed = f"{', '.join(PROMPT_FIELDS)}, or {allowed}"
        raise InvalidRequest(field="the row", problem=f"has no {chosen or 'prompt'}{near}", allowed=allowed)
    return found[0]


def _read_options(
    row: Mapping[str, object], prompt_name: str, mode: Literal["read", "keep"] | None
) -> tuple[dict[str, object], bool]:
    """Return the options that a row sets, and whether the row is data."""
    others = {name: value for name, value in row.items() if name not in (prompt_name, "request_id")}
    options = {name: value for name, value in others.items() if name in OPTION_FIELDS}
    unknown = others.keys() - options.keys()
    if mode == "keep":
        return {}, bool(others)
    if mode is None and unknown:
        if options:
            raise InvalidRequest(
                field=next(iter(options)),
                problem=f"is an option, in a row with data ({sorted(unknown)[0]})",
                allowed="--row-options read, which uses it, or --row-options keep, which keeps it as data",
            )
        for name in sorted(unknown):
            near = near_option(name)
            if near:
                allowed = "an option, or --row-options keep, which keeps it as data"
                raise InvalidRequest(field=name, problem=f"is not an option{near}", allowed=allowed)
    return options, bool(unknown)


def _read_messages(name: str, messages: list[Any], mode: str | None) -> tuple[Messages, bool]:
    """Return the messages of the prompt, and whether the model continues the last one."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(field=f"{name}[{number}]", problem=f"is {describe(message)}", allowed="a message")
        # A call of tools needs no content.
        content: tuple[type, ...] = (str, list) if message.get("tool_calls") is None else (str, list, type(None))
        for key, kinds in (("role", (str,)), ("content", content)):
            if not isinstance(message.get(key), kinds):
                problem = f"is {describe(message[key])}" if key in message else f"is missing ({', '.join(message)})"
                raise InvalidRequest(field=f"{name}[{number}].{key}", problem=problem, allowed="a string")
    if messages[-1]["role"] != "assistant":
        return messages, False
    if mode is None:
        allowed = "--messages drop-last, which takes the turn away, or --messages continue, which continues it"
        raise InvalidRequest(field=name, problem="end with the assistant", allowed=allowed)
    if mode == "continue":
        return messages, True
    end = max((number for number, message in enumerate(messages) if message["role"] != "assistant"), default=-1) + 1
    if not end:
        raise InvalidRequest(field=name, problem="have only turns of the assistant", allowed="another turn before")
    return messages[:end], False


def _read_tools(tools: object) -> Messages | None:
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        return tools
    raise InvalidRequest(field="tools", problem=f"is {describe(tools)}", allowed="a list of objects")


def _read_batch(row: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Return the name of the prompt in the body of a line of OpenAI's batch API, and the body with our names."""
    body = row["body"]
    if not isinstance(body, Mapping):
        raise InvalidRequest(field="body", problem=f"is {describe(body)}", allowed="an object")
    url = row.get("url", CHAT_URL if "messages" in body else COMPLETIONS_URL)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise InvalidRequest(field="url", problem=f"is {describe(url)}", allowed=f"{CHAT_URL} or {COMPLETIONS_URL}")
    name = "messages" if url == CHAT_URL else "prompt"
    fields = {key: value for key, value in body.items() if value is not None and key not in BATCH_IGNORED}
    if name not in fields:
        raise InvalidRequest(field=f"body.{name}", problem="is missing", allowed=f"the prompt, for {url}")
    if name == "messages":
        # As over HTTP: without a limit, the rest of the model's context.
        longest = fields.pop("max_completion_tokens", None)
        fields.setdefault("max_tokens", longest)
        if isinstance(fields.get("logprobs"), bool):
            top = fields.pop("top_logprobs", 0)
            fields["logprobs"] = top if fields["logprobs"] else None
    for key in fields.keys() - OPTION_FIELDS - {name}:
        allowed = f"{name} and {', '.join(sorted(OPTION_FIELDS))}"
        raise InvalidRequest(field=f"body.{key}", problem=f"is not supported here{near_option(key)}", allowed=allowed)
    return name, fields
