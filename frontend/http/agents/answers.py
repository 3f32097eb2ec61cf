"""An answer as content blocks: reasoning, text and tool calls, in this order, the same streamed and not.

A writer gets the parts of an answer in any split and returns the events of a stream. Its `document` is the whole
answer, so both have the same blocks.
"""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from ....schemas.decoding import JsonObject
from ..errors import HttpError
from ..openai.parsers import AnswerParts, CallPart
from ..tokens import Usage

Kind = Literal["reasoning", "text"]
ABORTED: Final = "aborted"
"""Code of the error for an answer that was aborted. Both APIs have no status of an answer for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerEnd:
    """How an answer ended."""

    finish_reason: str
    """OpenAI's finish reason: `stop`, `length` or `tool_calls`. With calls, `stop` means the same as `tool_calls`."""
    stop: int | str | None = None
    """The stop string or the stop token that ended the answer."""
    usage: Usage
    reasoning_tokens: int = 0
    """Number of tokens of the reasoning's text."""
    is_full: bool = False
    """True if the answer reached the end of the model's context."""


class BlockWriter:
    """Writes one answer as blocks. The subclasses are the formats of the APIs.

    Calls are written at the end, because their arguments are known only then. Blank text makes no block, and the
    reasoning has no blanks at its end: a parser may return these late.

    Attributes:
        document: the answer; complete after `end`.
    """

    document: JsonObject

    def __init__(self) -> None:
        self._open: Kind | None = None
        self._texts: list[str] = []
        self._blanks: dict[Kind, list[str]] = {"reasoning": [], "text": []}
        self._calls: dict[int, tuple[CallPart, list[str]]] = {}

    def begin(self, usage: Usage) -> list[JsonObject]:
        """Return the events before the first block."""
        raise NotImplementedError

    def add(self, parts: AnswerParts) -> list[JsonObject]:
        """Return the events for the additions to an answer."""
        events = [*self._write("reasoning", parts.reasoning), *self._write("text", parts.content)]
        for call in parts.calls:
            known = self._calls.setdefault(call.index, (call, []))
            known[1].append(call.arguments)
        return events

    def end(self, end: AnswerEnd) -> list[JsonObject]:
        """Return the events after the last text: the calls, and the end of the answer."""
        cut = end.finish_reason == "length"
        events = self._close(is_cut=cut and not self._calls)
        for call, arguments in self._calls.values():
            events += self.call_block(call, "".join(arguments))
        return [*events, *self.finish(end)]

    def fail(self, error: HttpError) -> list[JsonObject]:
        """Return the events for an error after the first event."""
        raise NotImplementedError

    def _write(self, kind: Kind, text: str | None) -> list[JsonObject]:
        if not text:
            return []
        if text.isspace() and (kind == "reasoning" or kind != self._open):
            self._blanks[kind].append(text)
            return []
        events: list[JsonObject] = []
        if kind != self._open:
            events = [*self._close(is_cut=False), *self.open_block(kind)]
            self._open = kind
        kept = text.rstrip() if kind == "reasoning" else text
        added = "".join([*self._blanks[kind], kept])
        self._blanks[kind] = [text[len(kept) :]] if len(kept) < len(text) else []
        self._texts.append(added)
        return [*events, *self.grow_block(kind, added)]

    def _close(self, *, is_cut: bool) -> list[JsonObject]:
        if self._open is None:
            return []
        events = self.close_block(self._open, "".join(self._texts), is_cut=is_cut)
        self._open, self._texts = None, []
        return events

    def open_block(self, kind: Kind) -> list[JsonObject]:
        """Return the events that begin a block."""
        raise NotImplementedError

    def grow_block(self, kind: Kind, text: str) -> list[JsonObject]:
        """Return the events that add text to the last block."""
        raise NotImplementedError

    def close_block(self, kind: Kind, text: str, *, is_cut: bool) -> list[JsonObject]:
        """Return the events that end the last block, which has this text, and add it to the document."""
        raise NotImplementedError

    def call_block(self, call: CallPart, arguments: str) -> list[JsonObject]:
        """Return the events of a tool call, and add it to the document."""
        raise NotImplementedError

    def finish(self, end: AnswerEnd) -> list[JsonObject]:
        """Return the events after the last block."""
        raise NotImplementedError


def encode_events(events: list[JsonObject]) -> bytes:
    """Return server-sent events, each named by its type."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
