"""Reads the prompts of `rollbus generate` from the rows of its input.

A row holds one prompt: `prompt` (text, token ids or messages), `prompt_token_ids` or `messages`, or the field that
`--prompt-field` names. A row whose other fields are all known sets fields of `GenerateRequest` and `SamplingParams`,
the latter beside them or under `sampling`. A row with any other field is data: it stands as it is in its result.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Literal

import msgspec
from msgspec import structs

from ....schemas import limits
from ....schemas.checks import check_int, describe
from ....schemas.decoding import MALFORMED, nearest
from ....schemas.errors import InvalidRequest
from ....schemas.messages import encode
from ....schemas.request import GenerateRequest, check_given_id
from ....schemas.request_fields import request_from_json
from ....schemas.sampling import SamplingParams
from ...tokenization import Encoder
from ..exits import CommandFailed, WrongUsage
from .inputs import Input, Row

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


START: Final = "routed_experts_prompt_start"
ROUTING: Final = "return_routed_experts"


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One row of the input. All checks that need no tokenizer of the model are done."""

    index: int
    """0-based position of the row."""
    request_id: object
    """Id of the row in the results, in any of JSON's types. It may repeat."""
    fingerprint: str
    """Digest of all values that affect the result. The same row with the same options has the same digest."""
    prompt: str | Messages | None
    """The prompt if it is text or messages. None: it is token ids."""
    fields: Mapping[str, object]
    """The other fields of the request, in JSON's types, without the id."""
    row: Mapping[str, object] | None = None
    """The row as it came, if it is data or a line of a batch."""
    tools: Messages | None = None
    """Tools of messages."""
    continues: bool = False
    """True if the model continues the last message."""

    @property
    def text(self) -> str | None:
        """The prompt if it is text."""
        return self.prompt if isinstance(self.prompt, str) else None

    def request(self, tokenizer: Encoder | None, request_id: str | None = None) -> GenerateRequest:
        """Return the request to send. A prompt of text or messages is tokenized.

        Args:
            request_id: id of the request; None: the id of the row.

        Raises:
            InvalidRequest: the tokens of the text do not fit the other fields, the text has no tokens, the chat
                template rejects the messages, or there is no tokenizer.
            TokenizerUnavailable: the prompt is messages, and the tokenizer has no chat template.
        """
        fields = {**self.fields, "request_id": self.request_id if request_id is None else request_id}
        if self.prompt is None:
            return request_from_json(fields)
        if tokenizer is None:
            problem = "is text" if isinstance(self.prompt, str) else "is messages"
            raise InvalidRequest("prompt", problem, "prompt_token_ids, without a tokenizer")
        if isinstance(self.prompt, str):
            ids = tokenizer.encode(self.prompt)
        else:
            text = tokenizer.apply_chat_template(
                self.prompt,
                tools=self.tools,
                add_generation_prompt=not self.continues,
                continue_final_message=self.continues,
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
        return request_from_json({**fields, "prompt_token_ids": ids})


def read_row(index: int, row: Mapping[str, object], defaults: Defaults) -> PromptLine:
    """Return the parts of a row. Only the prompt and the names of the other fields are checked.

    Raises:
        InvalidRequest: the row has no prompt or several, its prompt is not valid, or it has options among data.
    """
    request_id = row.get("request_id")
    kept: Mapping[str, object] | None = row
    if {"custom_id", "body"} <= row.keys() <= BATCH_FIELDS:
        request_id = row["custom_id"]
        name, fields = _read_batch(row, defaults.sampling)
        value = fields.pop(name)
    else:
        name = _prompt_name(row, defaults.prompt_field)
        value = row[name]
        fields, is_data = _read_options(row, name, defaults.row_options)
        kept = row if is_data else None
    tools = fields.pop("tools", None)
    if request_id is None:
        request_id = f"input-{index}"
    if isinstance(value, str) and value:
        return PromptLine(index, request_id, "", value, fields, kept)
    if not isinstance(value, list) or (not value and name != "prompt_token_ids"):
        allowed = "a non-empty string, token ids or messages"
        raise InvalidRequest(name, f"is {describe(value)}", allowed)
    if name == "messages" or any(isinstance(item, Mapping) for item in value):
        messages, continues = _read_messages(name, value, defaults.messages)
        return PromptLine(index, request_id, "", messages, fields, kept, _read_tools(tools), continues)
    return PromptLine(index, request_id, "", None, {**fields, "prompt_token_ids": value}, kept)


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
        raise InvalidRequest(" and ".join(found), "are both set", allowed)
    if not found:
        near = next(filter(None, (nearest(name, row, SIMILARITY) for name in names)), "")
        allowed = f"--prompt-field with one of its fields: {', '.join(row) or 'it has none'}"
        if chosen is None:
            allowed = f"{', '.join(PROMPT_FIELDS)}, or {allowed}"
        raise InvalidRequest("the row", f"has no {chosen or 'prompt'}{near}", allowed)
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
                next(iter(options)),
                f"is an option, in a row with data ({sorted(unknown)[0]})",
                "--row-options read, which uses it, or --row-options keep, which keeps it as data",
            )
        for name in sorted(unknown):
            near = near_option(name)
            if near:
                allowed = "an option, or --row-options keep, which keeps it as data"
                raise InvalidRequest(name, f"is not an option{near}", allowed)
    return options, bool(unknown)


def _read_messages(name: str, messages: list[Any], mode: str | None) -> tuple[Messages, bool]:
    """Return the messages of the prompt, and whether the model continues the last one."""
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"{name}[{number}]", f"is {describe(message)}", "a message")
        # A call of tools needs no content.
        content: tuple[type, ...] = (str, list) if message.get("tool_calls") is None else (str, list, type(None))
        for key, kinds in (("role", (str,)), ("content", content)):
            if not isinstance(message.get(key), kinds):
                problem = f"is {describe(message[key])}" if key in message else f"is missing ({', '.join(message)})"
                raise InvalidRequest(f"{name}[{number}].{key}", problem, "a string")
    if messages[-1]["role"] != "assistant":
        return messages, False
    if mode is None:
        allowed = "--messages drop-last, which takes the turn away, or --messages continue, which continues it"
        raise InvalidRequest(name, "end with the assistant", allowed)
    if mode == "continue":
        return messages, True
    end = max((number for number, message in enumerate(messages) if message["role"] != "assistant"), default=-1) + 1
    if not end:
        raise InvalidRequest(name, "have only turns of the assistant", "another turn before")
    return messages[:end], False


def _read_tools(tools: object) -> Messages | None:
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        return tools
    raise InvalidRequest("tools", f"is {describe(tools)}", "a list of objects")


def _read_batch(row: Mapping[str, object], options: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """Return the name of the prompt in the body of a line of OpenAI's batch API, and the body with our names."""
    body = row["body"]
    if not isinstance(body, Mapping):
        raise InvalidRequest("body", f"is {describe(body)}", "an object")
    url = row.get("url", CHAT_URL if "messages" in body else COMPLETIONS_URL)
    if url not in (CHAT_URL, COMPLETIONS_URL):
        raise InvalidRequest("url", f"is {describe(url)}", f"{CHAT_URL} or {COMPLETIONS_URL}")
    name = "messages" if url == CHAT_URL else "prompt"
    fields = {key: value for key, value in body.items() if value is not None and key not in BATCH_IGNORED}
    if name not in fields:
        raise InvalidRequest(f"body.{name}", "is missing", f"the prompt, for {url}")
    if name == "messages":
        # As over HTTP: without a limit, also as an option, the rest of the model's context.
        longest = fields.pop("max_completion_tokens", options.get("max_tokens"))
        fields.setdefault("max_tokens", longest)
        if isinstance(fields.get("logprobs"), bool):
            top = fields.pop("top_logprobs", 0)
            fields["logprobs"] = top if fields["logprobs"] else None
    for key in fields.keys() - OPTION_FIELDS - {name}:
        allowed = f"{name} and {', '.join(sorted(OPTION_FIELDS))}"
        raise InvalidRequest(f"body.{key}", f"is not supported here{near_option(key)}", allowed)
    return name, fields


@dataclass(frozen=True, slots=True)
class InputSummary:
    """Result of the check of an input."""

    num_prompts: int | None
    """None: the input is a stream."""
    needs_tokenizer: bool
    """True if a prompt is text or messages."""
    needs_template: bool
    """True if a prompt is messages."""
    models: Mapping[str | None, str]
    """By the model that rows and options name, or None: the place of the first such row."""
    repeated_ids: int = 0
    """Number of rows whose id another row before has."""


def read_prompts(source: Input, defaults: Defaults) -> Iterator[PromptLine]:
    """Read the prompts of an input one at a time; of a stream those of its first rows.

    Raises:
        CommandFailed: a row is not valid. The message names the row and the field.
    """
    for index, row in source.rows_to_check():
        try:
            yield parse_prompt(index, row, defaults)
        except InvalidRequest as exc:
            raise WrongUsage(f"{source.place(index)}: {exc.message}") from exc


def check_input(source: Input, defaults: Defaults, finished: Mapping[int, str], changes: str = "") -> InputSummary:
    """Check an input before the first request is sent, so that an error in its last line wastes no computation.

    Args:
        finished: fingerprints of the prompts that have results already, by index.
        changes: the options that differ from those of the first run, for the error.

    Raises:
        CommandFailed: a row is not valid, or a finished prompt is missing or has changed in this input.
    """
    num_prompts = num_finished = repeated_ids = 0
    needs_tokenizer = needs_template = False
    ids: set[object] = set()
    models: dict[str | None, str] = {}
    for prompt in read_prompts(source, defaults):
        num_prompts += 1
        needs_tokenizer = needs_tokenizer or prompt.prompt is not None
        key = hash(msgspec.json.encode(prompt.request_id))
        repeated_ids += key in ids
        ids.add(key)
        needs_template = needs_template or not isinstance(prompt.prompt, str | None)
        model = prompt.fields.get("model")
        models.setdefault(model if isinstance(model, str) else None, source.place(prompt.index))
        if prompt.index in finished:
            num_finished += 1
            check_unchanged(source, prompt, finished, changes)
    if num_finished < len(finished) and not source.is_stream:
        raise _changed(f"{source.name} lacks {len(finished) - num_finished} of the rows that have results", changes)
    return InputSummary(
        None if source.is_stream else num_prompts, needs_tokenizer, needs_template, models, repeated_ids
    )


def check_unchanged(source: Input, prompt: PromptLine, finished: Mapping[int, str], changes: str) -> None:
    """Check that a finished prompt is the one of its result.

    Raises:
        CommandFailed: the row or an option that affects its result has changed.
    """
    if finished[prompt.index] != prompt.fingerprint:
        raise _changed(f"{source.place(prompt.index)} differs from the row of its result", changes)


def _changed(what: str, changes: str) -> CommandFailed:
    cause = f"the options changed: {changes}" if changes else "the input changed after the first run"
    return WrongUsage(f"{what}: {cause}; choose another --output")


def parse_prompt(index: int, raw: Row, defaults: Defaults) -> PromptLine:
    """Parse and check one row.

    Raises:
        InvalidRequest: the row is not a JSON object, or a field is not valid, missing or stated twice.
    """
    row = read_row(index, _decode(raw) if isinstance(raw, bytes) else raw, defaults)
    if row.fields.get(ROUTING) and defaults.fields.get(ROUTING) is False:
        raise InvalidRequest(ROUTING, "is true", "false, with --routed-experts none")
    own = dict(row.fields)
    sampling = {**defaults.sampling, **_take_sampling(own)}
    fields = {**defaults.fields, **own, "sampling": sampling}
    digest = blake2b(digest_size=16)
    try:
        sent_id = check_given_id("request_id", row.request_id)
    except InvalidRequest:
        sent_id = f"input-{index}"
        digest.update(_as_json(row.request_id))
    checked = {**fields, "request_id": sent_id}
    if row.prompt is not None:
        # The length of the prompt, which limits the start of the routed experts, is known only after tokenization.
        start = check_int(START, fields.get(START, 0), 0, limits.MAX_PROMPT_TOKENS)
        checked |= {START: 0, "prompt_token_ids": [0]}
        digest.update(f"{start} ".encode())
        digest.update(row.prompt.encode() if isinstance(row.prompt, str) else _as_json(row.prompt))
    # These fields do not change a result. For example, a user may raise the timeout and resume the run.
    free = dict.fromkeys(("timeout_s", "session_id", "group_id", "traceparent", "tracestate"))
    digest.update(encode(structs.replace(request_from_json(checked), **free, priority=0)))
    for part in (row.row, row.tools, row.continues or None):
        if part is not None:
            digest.update(_as_json(part))
    return replace(row, fingerprint=digest.hexdigest(), fields=fields)


def _as_json(value: object) -> bytes:
    # Data sets have values of other types, such as dates.
    return msgspec.json.encode(value, enc_hook=str)


def _decode(raw: bytes) -> dict[str, object]:
    allowed = 'a JSON object such as {"prompt": "text"}'
    try:
        value = msgspec.json.decode(raw)
    except MALFORMED as exc:
        raise InvalidRequest("the line", f"is not JSON ({exc})", allowed) from None
    if not isinstance(value, dict):
        raise InvalidRequest("the line", f"is {describe(value)}", allowed)
    return value


def _take_sampling(fields: dict[str, object]) -> dict[str, object]:
    """Remove the sampling parameters from `fields`. Return them together with the parameters under `sampling`."""
    nested = fields.pop("sampling", {})
    if not isinstance(nested, dict):
        raise InvalidRequest("sampling", f"is {describe(nested)}", "a JSON object")
    for name in sorted(nested.keys() - SAMPLING_FIELDS):
        problem = f"is unknown{near_option(name, SAMPLING_FIELDS)}"
        raise InvalidRequest(f"sampling.{name}", problem, ", ".join(sorted(SAMPLING_FIELDS)))
    beside = {name: fields.pop(name) for name in sorted(SAMPLING_FIELDS & set(fields))}
    twice = sorted(set(beside) & set(nested))
    if twice:
        raise InvalidRequest(twice[0], "is set both beside and under sampling", "one of the two")
    return {**nested, **beside}
