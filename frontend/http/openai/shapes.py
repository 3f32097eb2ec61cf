"""The answer formats of the two routes: messages of a chat or plain text, each with Dynamo's `nvext` object."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from .... import bus
from ....schemas.decoding import JsonObject
from ...tokenization import Tokenizer, token_text
from ..answers import AnswerChoice, Update
from ..calls import object_json
from ..requests import RequestTarget
from ..tokens import (
    BLOCK,
    SampledToken,
    Scored,
    ScoredBlocks,
    Scores,
    Tokens,
    TopToken,
    json_logprobs,
    lists_json,
    prompt_list,
    routed_experts_json,
    whole_rows,
)
from .body import ChatBody
from .parsers import AnswerParts, AnswerReader, CallPart, ParsePlan, ToolQuestion

JsonParts = JsonObject | Iterator[bytes] | None
"""A JSON value, or its JSON in pieces."""


class AnswerShape:
    """The answer format of one route. The methods here are those of OpenAI's formats."""

    id_prefix = ""
    object = ""
    event_object = ""
    prompt_is_common = True
    """True if all answers belong to one prompt, so that its token ids and logprobs are fields of the whole response."""
    has_text = True
    """False: the answers have only tokens, which each event of a stream has."""
    nothing: ClassVar[JsonObject] = {"stop_reason": None, "logprobs": None}
    """Fields of an answer that was aborted before its first token."""

    def head(self, request_id: str, model: str, lora: str | None, created: int, *, is_event: bool) -> JsonObject:
        """Return the first fields of a response or an event."""
        name = self.event_object if is_event else self.object
        return {"id": f"{self.id_prefix}{request_id}", "object": name, "created": created, "model": model}

    def opening(self, index: int) -> JsonObject | None:
        """Return the event content before the first text of an answer in a stream; None: there is none."""
        return None

    def text(self, text: str, *, delta: bool) -> JsonObject:
        """Return the fields for the text of an answer, or for a part of the text."""
        return {"text": text}

    def fields(self, choice: AnswerChoice, update: Update, shown: JsonObject, *, with_ids: bool) -> JsonObject:
        """Return the first fields of an answer, or of a part of an answer."""
        ids = {"token_ids": update.tokens.ids.tolist()} if with_ids else {}
        return {"index": choice.index, **shown, "stop_reason": choice.stop_reason, **ids}

    def logprobs(self, choice: AnswerChoice, scores: ScoredBlocks, namer: "Namer", width: int) -> JsonParts:
        """Return the logprobs of the answer's next tokens, with `width` alternatives to each token."""
        raise NotImplementedError

    def masks(self, tokens: Tokens) -> Mapping[str, JsonParts]:
        """Return a field with the tokens' sampling masks, if the format has any."""
        return {}


class Namer:
    """The names of tokens in logprobs."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        """Return the text of a token, or `token_id:N`."""
        if self._tokenizer is None or self._as_token_ids:
            return f"token_id:{token_id}"
        return token_text(self._tokenizer.token_bytes(token_id))

    def few(self, scores: ScoredBlocks) -> tuple[list[str], list[float]] | None:
        """Return the names and logprobs of few tokens without alternatives, in a fraction of the time; None: others."""
        if not isinstance(scores, Scores) or scores.top_ids is not None or len(scores.ids) > BLOCK:
            return None
        ids, tokenizer = scores.ids.tolist(), None if self._as_token_ids else self._tokenizer
        if tokenizer is None:
            names = [f"token_id:{token_id}" for token_id in ids]
        else:
            names = list(map(token_text, map(tokenizer.token_bytes, ids)))
        return names, json_logprobs(scores.logprobs)

    def bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


def _tops(position: list[Scored], width: int) -> list[Scored]:
    """Return the `width` most likely tokens of a position, the most likely token first."""
    if not width:
        return []
    return sorted((each for each in position if each.rank is not None), key=lambda each: each.rank or 0)[:width]


class _ChatShape(AnswerShape):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self, index: int) -> JsonObject | None:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def text(self, text: str, *, delta: bool) -> JsonObject:
        if delta:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: AnswerChoice, scores: ScoredBlocks, namer: Namer, width: int) -> JsonParts:
        def named(each: Scored) -> tuple[str, float, list[int] | None]:
            data = namer.bytes(each.token_id)
            return namer.name(each.token_id), each.logprob, None if data is None else list(data)

        def content(block: list[list[Scored]]) -> list[SampledToken]:
            return [
                SampledToken(*named(position[0]), [TopToken(*named(each)) for each in _tops(position, width)])
                for position in block
            ]

        return lists_json(scores, {"content": content}, refusal=None)


class _Completion(AnswerShape):
    id_prefix = "cmpl-"
    object = "text_completion"
    event_object = "text_completion"
    prompt_is_common = False

    def logprobs(self, choice: AnswerChoice, scores: ScoredBlocks, namer: Namer, width: int) -> JsonParts:
        if (few := namer.few(scores)) is not None:
            given, own = few
            *places, choice.text_offset = itertools.accumulate(map(len, given), initial=choice.text_offset)
            tops = [{name: logprob} for name, logprob in zip(given, own, strict=True)]
            return {"tokens": given, "token_logprobs": own, "top_logprobs": tops, "text_offset": places}

        def names(block: list[list[Scored]]) -> list[str]:
            return [namer.name(position[0].token_id) for position in block]

        def offsets(block: list[list[Scored]]) -> list[int]:
            *places, choice.text_offset = itertools.accumulate(map(len, names(block)), initial=choice.text_offset)
            return places

        def top(position: list[Scored]) -> dict[str, float] | None:
            if math.isnan(position[0].logprob):
                return None
            # The sampled token is included even if it is not among the most likely tokens.
            return {namer.name(each.token_id): each.logprob for each in [*_tops(position, width), position[0]]}

        return lists_json(
            scores,
            {
                "tokens": names,
                "token_logprobs": lambda block: [position[0].logprob for position in block],
                "top_logprobs": lambda block: list(map(top, block)),
                "text_offset": offsets,
            },
        )


CHAT: Final[AnswerShape] = _ChatShape()
COMPLETION: Final[AnswerShape] = _Completion()


class RequestClock:
    """Measures the times of one HTTP request."""

    def __init__(self) -> None:
        self._received_ms = round(time.time() * 1000)
        self._begun = time.perf_counter()
        self._first: float | None = None

    def token(self) -> None:
        """Record that tokens have arrived. Only the first call has an effect."""
        if self._first is None:
            self._first = time.perf_counter()

    def timing(self) -> JsonObject:
        """Return Dynamo's `timing`. The time to the first token is null if the answer was not streamed."""
        first = self._first
        return {
            "request_received_ms": self._received_ms,
            "ttft_ms": None if first is None else (first - self._begun) * 1000,
            "total_time_ms": (time.perf_counter() - self._begun) * 1000,
        }


def nvext_json(
    extra: frozenset[str], request: bus.GenerateRequest, target: RequestTarget, tokens: Tokens, clock: RequestClock
) -> JsonObject | Iterator[bytes]:
    """Return the object. All errors are raised before its first piece.

    The object has the routed experts once: in `engine_data`, or beside it if `extra` has `routed_experts`.

    Args:
        tokens: all tokens of the answer.

    Raises:
        HttpError: 502, rows of routed experts are missing.
    """
    completion_ids = tokens.ids.tolist()
    fields: JsonObject = {}
    if "prompt_token_ids" in extra:
        fields["prompt_token_ids"] = prompt_list(request)
    for name in {"completion_token_ids", "token_ids"} & extra:
        fields[name] = completion_ids
    if "worker_id" in extra and tokens.worker is not None:
        fields["worker_id"] = {"prefill_worker_id": tokens.first_worker, "decode_worker_id": tokens.worker}
    if "timing" in extra:
        fields["timing"] = clock.timing()
    if "weight_version" in extra:
        # The version of the last token; null if there are no tokens.
        fields["weight_version"] = int(tokens.weight_versions[-1]) if completion_ids else None
    engine: JsonObject | None = None
    if "engine_data" in extra:
        engine = {"prompt_token_ids": prompt_list(request), "completion_token_ids": completion_ids}
        engine["completion_logprobs"] = json_logprobs(tokens.scores.logprobs)
        engine["completion_weight_versions"] = tokens.weight_versions.tolist()
    rows = whole_rows(request, target, tokens) if extra & {"engine_data", "routed_experts"} else None
    if engine is not None and (rows is None or "routed_experts" in extra):
        fields["engine_data"] = engine
    if rows is None:
        return fields
    rows_json = {"routed_experts": routed_experts_json(rows, request.routed_experts_prompt_start)}
    if engine is None or "routed_experts" in extra:
        return object_json(fields | rows_json)
    return object_json(fields | {"engine_data": object_json(engine | rows_json)})


@dataclass(frozen=True, slots=True)
class Reading:
    """The parsing of the answers to one chat."""

    body: ChatBody
    question: ToolQuestion
    plan: ParsePlan

    def reader(self, request: bus.GenerateRequest) -> AnswerReader:
        """Create the reader of one answer."""
        return AnswerReader(
            self.plan.answer_parser,
            self.question,
            prompt_list(request),
            show_reasoning=self.body.include_reasoning is not False,
            one_call=self.body.parallel_tool_calls is False,
        )


def parts_json(parts: AnswerParts, *, delta: bool) -> JsonObject:
    """Return the `message` of an answer, or the `delta` of a stream."""
    fields: JsonObject = {} if delta else {"role": "assistant", "refusal": None}
    if not delta or parts.content:
        # As in OpenAI's API, empty content is null if the answer has other parts.
        fields["content"] = parts.content or (None if parts else "")
    if parts.reasoning:
        # Clients of vLLM read `reasoning`. Clients of DeepSeek and other servers read `reasoning_content`.
        fields |= {"reasoning": parts.reasoning, "reasoning_content": parts.reasoning}
    if parts.calls:
        fields["tool_calls"] = [_call_json(call, delta=delta) for call in parts.calls]
    return {"delta" if delta else "message": fields}


def _call_json(call: CallPart, *, delta: bool) -> JsonObject:
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    found: JsonObject = {"index": call.index} if delta else {}
    if call.id is not None:
        found |= {"id": call.id, "type": "function"}
    return {**found, "function": function}
