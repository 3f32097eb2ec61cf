"""An answer as blocks of Anthropic's Messages API, and its errors."""

from typing import Final

import msgspec
from starlette.responses import Response

from ....schemas.decoding import JsonObject
from ..errors import HttpError
from ..openai.parsers import CallPart
from ..tokens import Usage
from .answers import AnswerEnd, BlockWriter, Kind
from .messages import INVALID_JSON

UNSEALED: Final = "unsealed"
"""Signature of a thinking block outside of a session. Clients send blocks back only if they have one."""
FIELDS: Final = {"reasoning": "thinking", "text": "text"}
"""Types of blocks, and of their field with the text."""
ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status. Others are `invalid_request_error` below 500, and `api_error`."""
TOO_LONG: Final = "context_length_exceeded"
NO_THREADS: Final[JsonObject] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of the error for `thread`, with which Anthropic's client sends the whole history instead."""


class MessageWriter(BlockWriter):
    """Writes one answer as a message.

    Args:
        answer_id: id without a prefix.
        seal: signature of the reasoning.
    """

    def __init__(self, answer_id: str, model: str, *, seal: str = UNSEALED) -> None:
        super().__init__()
        self._seal = seal
        self._content: list[JsonObject] = []
        self.document = {
            "id": f"msg_{answer_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, usage: Usage) -> list[JsonObject]:
        """Return the event before the first block."""
        return [{"type": "message_start", "message": {**self.document, "content": [], "usage": _usage(usage)}}]

    def open_block(self, kind: Kind) -> list[JsonObject]:
        """Return the event that begins a block."""
        block = {"type": FIELDS[kind], FIELDS[kind]: "", **({"signature": ""} if kind == "reasoning" else {})}
        return [{"type": "content_block_start", "index": len(self._content), "content_block": block}]

    def _delta(self, kind: str, **fields: str) -> JsonObject:
        return {"type": "content_block_delta", "index": len(self._content), "delta": {"type": kind, **fields}}

    def grow_block(self, kind: Kind, text: str) -> list[JsonObject]:
        """Return the event that adds text."""
        return [self._delta(f"{FIELDS[kind]}_delta", **{FIELDS[kind]: text})]

    def close_block(self, kind: Kind, text: str, *, is_cut: bool) -> list[JsonObject]:
        """Return the events that end a block."""
        block, events = {"type": FIELDS[kind], FIELDS[kind]: text}, []
        if kind == "reasoning":
            block["signature"] = self._seal
            events = [self._delta("signature_delta", signature=self._seal)]
        return [*events, self._add_block(block)]

    def _add_block(self, block: JsonObject) -> JsonObject:
        self._content.append(block)
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def call_block(self, call: CallPart, arguments: str) -> list[JsonObject]:
        """Return the events of a call. Arguments that are not a JSON object are wrapped in one."""
        block: JsonObject = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        index = len(self._content)
        try:
            given = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            given = None
        if not isinstance(given, dict):
            given = {INVALID_JSON: arguments}
            arguments = msgspec.json.encode(given).decode()
        return [
            {"type": "content_block_start", "index": index, "content_block": block},
            self._delta("input_json_delta", partial_json=arguments),
            self._add_block({**block, "input": given}),
        ]

    def finish(self, end: AnswerEnd) -> list[JsonObject]:
        """Return the last events."""
        reason, stop = "end_turn", None
        if end.finish_reason == "length":
            reason = "model_context_window_exceeded" if end.is_full else "max_tokens"
        elif self._calls:
            reason = "tool_use"
        elif isinstance(end.stop, str):
            reason, stop = "stop_sequence", end.stop
        delta, usage = {"stop_reason": reason, "stop_sequence": stop}, _usage(end.usage)
        self.document |= {**delta, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def fail(self, error: HttpError) -> list[JsonObject]:
        """Return the last event of a stream with an error."""
        return [_error(error)]


def _usage(usage: Usage) -> JsonObject:
    cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _error(error: HttpError) -> JsonObject:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # Clients compact a history if the message has these words.
    message = f"prompt is too long: {error.message}" if error.code == TOO_LONG else error.message
    told: JsonObject = {"type": kind, "message": message, "param": error.param, "code": error.code}
    if error.param == "thread":
        told["details"] = NO_THREADS
    return {"type": "error", "error": told}


def message_error(error: HttpError) -> Response:
    """Return the answer for an error in Anthropic's format."""
    return Response(msgspec.json.encode(_error(error)), error.status, error.headers, media_type="application/json")
