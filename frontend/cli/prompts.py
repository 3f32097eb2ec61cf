"""Reads the input of `rollbus generate`: JSONL, one prompt with its parameters in each line.

A line holds `prompt` (text) or `prompt_token_ids`, any other field of `GenerateRequest`, and fields of
`SamplingParams`, either beside these fields or under `sampling`. Blank lines are skipped but counted.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...schemas import limits
from ...schemas.checks import check_int, describe
from ...schemas.errors import InvalidRequest
from ...schemas.messages import encode
from ...schemas.request import GenerateRequest
from ...schemas.request_fields import request_from_json
from ...schemas.sampling import SamplingParams
from ..tokenization import Encoder
from .exits import CommandFailed, ExitCode

__all__ = ["Defaults", "InputSummary", "PromptLine", "check_input", "parse_prompt", "read_prompts"]

SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
REQUEST_FIELDS = frozenset(GenerateRequest.__struct_fields__)
START = "routed_experts_prompt_start"
ROUTING = "return_routed_experts"
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a line. The longest allowed prompt fits as decimal numbers. A file without line ends must not fill
memory."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default values of fields that a line does not state, in JSON's types."""

    fields: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One line of the input. All checks that need no tokenizer of the model are done."""

    index: int
    """0-based number of its line."""
    request_id: str
    fingerprint: str
    """Digest of all values that affect the result. The same line with the same options has the same digest."""
    text: str | None
    """The prompt if it is text. None: the prompt is token ids."""
    fields: Mapping[str, object]
    """The other fields of the request, in JSON's types."""

    def request(self, tokenizer: Encoder | None) -> GenerateRequest:
        """Return the request to send. A text prompt is tokenized.

        Raises:
            InvalidRequest: the tokens of the text do not fit the other fields, or the text has no tokens, or there is
                no tokenizer.
        """
        if self.text is None:
            return request_from_json(self.fields)
        if tokenizer is None:
            raise InvalidRequest(field="prompt", problem="is text", allowed="prompt_token_ids, without a tokenizer")
        return request_from_json({**self.fields, "prompt_token_ids": tokenizer.encode(self.text)})


@dataclass(frozen=True, slots=True)
class InputSummary:
    """Result of a pass over the whole input."""

    num_prompts: int
    has_text: bool


def read_prompts(path: Path, defaults: Defaults, *, skip: Container[int] = ()) -> Iterator[PromptLine]:
    """Read the prompts of a file one at a time, without the prompts whose indexes are in `skip`.

    Raises:
        CommandFailed: a line is not valid. The message names the line and the field.
    """
    with path.open("rb") as file:
        index = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            try:
                if len(raw) > MAX_LINE_BYTES:
                    raise InvalidRequest(field="the line", problem="is too long", allowed=f"{MAX_LINE_BYTES} bytes")
                if index not in skip and raw.strip():
                    yield parse_prompt(index, raw, defaults)
            except InvalidRequest as exc:
                raise CommandFailed(f"{path} line {index + 1}: {exc.message}", ExitCode.USAGE) from exc
            index += 1


def check_input(path: Path, defaults: Defaults, finished: Mapping[int, str]) -> InputSummary:
    """Check the whole file before the first request is sent, so that an error in its last line wastes no computation.

    Args:
        finished: fingerprints of the prompts that have results already, by index.

    Raises:
        CommandFailed: a line is not valid, two lines have the same request id, or a finished prompt is missing or has
            changed in this file.
    """
    num_prompts = 0
    num_finished = 0
    has_text = False
    lines: dict[str, int] = {}
    for prompt in read_prompts(path, defaults):
        num_prompts += 1
        has_text = has_text or prompt.text is not None
        first = lines.setdefault(prompt.request_id, prompt.index)
        if first != prompt.index:
            raise CommandFailed(
                f"{path} line {prompt.index + 1}: request_id is the same as in line {first + 1}", ExitCode.USAGE
            )
        if prompt.index in finished:
            num_finished += 1
            if finished[prompt.index] != prompt.fingerprint:
                raise _changed(f"{path} line {prompt.index + 1} differs from the line of its result")
    if num_finished < len(finished):
        raise _changed(f"{path} lacks {len(finished) - num_finished} of the lines that have results")
    return InputSummary(num_prompts, has_text)


def _changed(what: str) -> CommandFailed:
    return CommandFailed(
        f"{what}: the input or the options changed after the first run; choose another --output", ExitCode.USAGE
    )


def parse_prompt(index: int, raw: bytes, defaults: Defaults) -> PromptLine:
    """Parse and check one line.

    Raises:
        InvalidRequest: the line is not a JSON object, or a field is not valid, unknown, missing or stated twice.
    """
    text, fields = _split(_decode(raw))
    if fields.get(ROUTING) and defaults.fields.get(ROUTING) is False:
        raise InvalidRequest(field=ROUTING, problem="is true", allowed="false, with --routed-experts none")
    sampling = {**defaults.sampling, **_sampling_of(fields)}
    fields = {"request_id": f"input-{index}", **defaults.fields, **fields, "sampling": sampling}
    if text is None:
        checked = request_from_json(fields)
        digest = blake2b(digest_size=16)
    else:
        # The length of the prompt, which limits the start of the routed experts, is known only after tokenization.
        start = check_int(START, fields.get(START, 0), 0, limits.MAX_PROMPT_TOKENS)
        checked = request_from_json({**fields, START: 0, "prompt_token_ids": [0]})
        digest = blake2b(f"{start} {text}".encode(), digest_size=16)
    # These fields do not change a result. For example, a user may raise the timeout and resume the run.
    digest.update(
        encode(
            replace(
                checked, timeout_s=None, priority=0, session_id=None, group_id=None, traceparent=None, tracestate=None
            )
        )
    )
    return PromptLine(index, checked.request_id, digest.hexdigest(), text, fields)


def _decode(raw: bytes) -> dict[str, object]:
    allowed = 'a JSON object such as {"prompt": "text"}'
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequest(field="the line", problem=f"is not JSON ({exc})", allowed=allowed) from None
    if not isinstance(value, dict):
        raise InvalidRequest(field="the line", problem=f"is {describe(value)}", allowed=allowed)
    return value


def _split(fields: dict[str, object]) -> tuple[str | None, dict[str, object]]:
    """Return the text prompt, or None for token ids, and the other fields."""
    allowed = "either prompt (text) or prompt_token_ids"
    if ("prompt" in fields) == ("prompt_token_ids" in fields):
        problem = "are both set" if "prompt" in fields else "are both missing"
        raise InvalidRequest(field="prompt and prompt_token_ids", problem=problem, allowed=allowed)
    known = sorted(REQUEST_FIELDS | SAMPLING_FIELDS | {"prompt"})
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise InvalidRequest(field=unknown[0], problem="is unknown", allowed=", ".join(known))
    if "prompt" not in fields:
        return None, fields
    text = fields["prompt"]
    if not isinstance(text, str) or not text:
        raise InvalidRequest(field="prompt", problem=f"is {describe(text)}", allowed="a non-empty string")
    return text, {name: value for name, value in fields.items() if name != "prompt"}


def _sampling_of(fields: dict[str, object]) -> dict[str, object]:
    """Remove the sampling parameters from `fields`. Return them together with the parameters under `sampling`."""
    nested = fields.pop("sampling", {})
    if not isinstance(nested, dict):
        raise InvalidRequest(field="sampling", problem=f"is {describe(nested)}", allowed="a JSON object")
    beside = {name: fields.pop(name) for name in sorted(SAMPLING_FIELDS & set(fields))}
    twice = sorted(set(beside) & set(nested))
    if twice:
        raise InvalidRequest(field=twice[0], problem="is set both beside and under sampling", allowed="one of the two")
    return {**nested, **beside}
