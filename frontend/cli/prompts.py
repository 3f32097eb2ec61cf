"""Reads the prompts of `rollbus generate` from the rows of its input.

A row holds one prompt: `prompt` (text, token ids or messages), `prompt_token_ids` or `messages`, or the field that
`--prompt-field` names. A row whose other fields are all known sets fields of `GenerateRequest` and `SamplingParams`,
the latter beside them or under `sampling`. A row with any other field is data: it stands as it is in its result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec.structs import replace

from ...schemas import limits
from ...schemas.checks import check_int, describe
from ...schemas.errors import InvalidRequest
from ...schemas.messages import encode
from ...schemas.request import GenerateRequest
from ...schemas.request_fields import request_from_json
from ...schemas.request_ids import check_given_id
from ..tokenization import Encoder
from .exits import CommandFailed, ExitCode
from .inputs import Input, Row
from .row_fields import SAMPLING_FIELDS, Defaults, Messages, near_option, read_row

__all__ = ["InputSummary", "PromptLine", "check_input", "check_unchanged", "parse_prompt", "read_prompts"]

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
    """The row as it came, if it is data."""
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
            raise InvalidRequest(field="prompt", problem=problem, allowed="prompt_token_ids, without a tokenizer")
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
            raise CommandFailed(f"{source.place(index)}: {exc.message}", ExitCode.USAGE) from exc


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
    return CommandFailed(f"{what}: {cause}; choose another --output", ExitCode.USAGE)


def parse_prompt(index: int, raw: Row, defaults: Defaults) -> PromptLine:
    """Parse and check one row.

    Raises:
        InvalidRequest: the row is not a JSON object, or a field is not valid, missing or stated twice.
    """
    parts = read_row(_decode(raw) if isinstance(raw, bytes) else raw, defaults)
    if parts.fields.get(ROUTING) and defaults.fields.get(ROUTING) is False:
        raise InvalidRequest(field=ROUTING, problem="is true", allowed="false, with --routed-experts none")
    sampling = {**defaults.sampling, **_sampling_of(parts.fields)}
    fields = {**defaults.fields, **parts.fields, "sampling": sampling}
    shown_id = f"input-{index}" if parts.request_id is None else parts.request_id
    digest = blake2b(digest_size=16)
    try:
        sent_id = check_given_id("request_id", shown_id)
    except InvalidRequest:
        sent_id = f"input-{index}"
        digest.update(_as_json(shown_id))
    checked = {**fields, "request_id": sent_id}
    if parts.prompt is not None:
        # The length of the prompt, which limits the start of the routed experts, is known only after tokenization.
        start = check_int(START, fields.get(START, 0), 0, limits.MAX_PROMPT_TOKENS)
        checked |= {START: 0, "prompt_token_ids": [0]}
        digest.update(f"{start} ".encode())
        digest.update(parts.prompt.encode() if isinstance(parts.prompt, str) else _as_json(parts.prompt))
    # These fields do not change a result. For example, a user may raise the timeout and resume the run.
    free = dict.fromkeys(("timeout_s", "session_id", "group_id", "traceparent", "tracestate"))
    digest.update(encode(replace(request_from_json(checked), **free, priority=0)))
    for part in (parts.row, parts.tools, parts.continues or None):
        if part is not None:
            digest.update(_as_json(part))
    return PromptLine(
        index, shown_id, digest.hexdigest(), parts.prompt, fields, parts.row, parts.tools, parts.continues
    )


def _as_json(value: object) -> bytes:
    # Data sets have values of other types, such as dates.
    return msgspec.json.encode(value, enc_hook=str)


def _decode(raw: bytes) -> dict[str, object]:
    allowed = 'a JSON object such as {"prompt": "text"}'
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(field="the line", problem=f"is not JSON ({exc})", allowed=allowed) from None
    if not isinstance(value, dict):
        raise InvalidRequest(field="the line", problem=f"is {describe(value)}", allowed=allowed)
    return value


def _sampling_of(fields: dict[str, object]) -> dict[str, object]:
    """Remove the sampling parameters from `fields`. Return them together with the parameters under `sampling`."""
    nested = fields.pop("sampling", {})
    if not isinstance(nested, dict):
        raise InvalidRequest(field="sampling", problem=f"is {describe(nested)}", allowed="a JSON object")
    for name in sorted(nested.keys() - SAMPLING_FIELDS):
        problem = f"is unknown{near_option(name, SAMPLING_FIELDS)}"
        raise InvalidRequest(field=f"sampling.{name}", problem=problem, allowed=", ".join(sorted(SAMPLING_FIELDS)))
    beside = {name: fields.pop(name) for name in sorted(SAMPLING_FIELDS & set(fields))}
    twice = sorted(set(beside) & set(nested))
    if twice:
        raise InvalidRequest(field=twice[0], problem="is set both beside and under sampling", allowed="one of the two")
    return {**nested, **beside}
