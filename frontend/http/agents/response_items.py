"""An answer as items of OpenAI's Responses API."""

import time
from typing import Final

from ....schemas.decoding import JsonObject
from ..errors import HttpError
from ..openai.parsers import CallPart
from ..tokens import Usage
from .answers import AnswerEnd, BlockWriter, Kind
from .responses import NAMESPACE, ReasoningOptions, ResponsesBody, TextOptions, namespaces, offered_tools

PREFIXES: Final = {"reasoning": "rs", "text": "msg"}
"""Beginnings of the ids of items."""
TEXT_TYPES: Final = {"reasoning": "reasoning_text", "text": "output_text"}
"""Types of an item's content."""
AS_GIVEN: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields that an answer has as its request."""
FAILED: Final = "server_error"
"""Code of the error in a response. The client's enum has no other code that fits."""


class ResponseWriter(BlockWriter):
    """Writes one answer as a response.

    Args:
        answer_id: id without a prefix.
        seal: `encrypted_content` of the reasoning; None: it has none.
    """

    def __init__(self, body: ResponsesBody, answer_id: str, model: str, *, seal: str | None = None) -> None:
        super().__init__()
        self._id = answer_id
        self._seal = seal
        self._sequence = 0
        self._items: list[JsonObject] = []
        self._item: JsonObject = {}
        self._namespaces = namespaces(body)
        text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
        self.document = {
            "id": f"resp_{answer_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
            **{name: getattr(body, name) for name in AS_GIVEN},
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": text.format or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": offered_tools(body),
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def _event(self, kind: str, /, **fields: object) -> JsonObject:
        event = {"type": f"response.{kind}", "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _part_event(self, kind: str, /, **fields: object) -> JsonObject:
        place = {"item_id": self._item["id"], "output_index": len(self._items)}
        return self._event(kind, **place, **fields)

    def begin(self, usage: Usage) -> list[JsonObject]:
        """Return the events before the first item."""
        return [self._event(name, response=dict(self.document)) for name in ("created", "in_progress")]

    def open_block(self, kind: Kind) -> list[JsonObject]:
        """Return the events that begin an item with one text."""
        self._item = self._text_item(kind, [], "in_progress")
        return [
            self._event("output_item.added", output_index=len(self._items), item=self._item),
            self._part_event("content_part.added", content_index=0, part=_text(kind, "")),
        ]

    def _text_item(self, kind: Kind, content: list[JsonObject], status: str) -> JsonObject:
        item_id = f"{PREFIXES[kind]}_{self._id}_{len(self._items)}"
        item: JsonObject = {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        if kind == "reasoning":
            item = {"id": item_id, "type": "reasoning", "summary": [], "status": status, "content": content}
            if self._seal is not None:
                item["encrypted_content"] = self._seal
        return item

    def grow_block(self, kind: Kind, text: str) -> list[JsonObject]:
        """Return the event that adds text."""
        more: JsonObject = {"logprobs": []} if kind == "text" else {}
        return [self._part_event(f"{TEXT_TYPES[kind]}.delta", content_index=0, delta=text, **more)]

    def close_block(self, kind: Kind, text: str, *, is_cut: bool) -> list[JsonObject]:
        """Return the events that end an item."""
        more: JsonObject = {"logprobs": []} if kind == "text" else {}
        self._item = self._text_item(kind, [_text(kind, text)], "incomplete" if is_cut else "completed")
        events = [
            self._part_event(f"{TEXT_TYPES[kind]}.done", content_index=0, text=text, **more),
            self._part_event("content_part.done", content_index=0, part=_text(kind, text)),
        ]
        return [*events, self._add_item()]

    def _add_item(self) -> JsonObject:
        event = self._event("output_item.done", output_index=len(self._items), item=self._item)
        self._items.append(self._item)
        return event

    def call_block(self, call: CallPart, arguments: str) -> list[JsonObject]:
        """Return the events of a call."""
        item_id = f"fc_{self._id}_{len(self._items)}"
        item = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name}
        for namespace in self._namespaces:
            begin, _, name = (call.name or "").partition(namespace + NAMESPACE)
            if name and not begin:
                item |= {"name": name, "namespace": namespace}
        begun = {**item, "arguments": "", "status": "in_progress"}
        self._item = {**item, "arguments": arguments, "status": "completed"}
        return [
            self._event("output_item.added", output_index=len(self._items), item=begun),
            self._part_event("function_call_arguments.delta", delta=arguments),
            self._part_event("function_call_arguments.done", arguments=arguments, name=item["name"]),
            self._add_item(),
        ]

    def finish(self, end: AnswerEnd) -> list[JsonObject]:
        """Return the last event, with the whole response."""
        is_cut = end.finish_reason == "length"
        usage, cached = end.usage, end.usage.prompt_tokens_details
        self.document |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": 0 if cached is None else cached.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": usage.total_tokens,
            },
        }
        return [self._event("incomplete" if is_cut else "completed", response=self.document)]

    def fail(self, error: HttpError) -> list[JsonObject]:
        """Return the last events of a stream with an error: OpenAI's client raises the first, others read the last."""
        told = {"code": FAILED, "message": f"{error.code}: {error.message}"}
        self.document |= {"status": "failed", "error": told, "output": self._items}
        raised = {"type": FAILED, "code": error.code, "message": told["message"], "param": error.param}
        event = {**self._event("error", error=raised), "type": "error"}
        return [event, self._event("failed", response=self.document)]


def _text(kind: Kind, text: str) -> JsonObject:
    more: JsonObject = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": TEXT_TYPES[kind], "text": text, **more}
