"""The prompt of a turn: the ids that the session holds, and the new messages as the chat template renders them.

Only the new messages are rendered, after an answer with a marker. So the cost of a turn is that of its new messages.
At turns 1, 2, 4, 8 and so on, all messages are rendered too, and their text is compared with the decoded ids.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from ...schemas.decoding import JsonObject
from ...schemas.errors import InvalidRequest
from ..tokenization import Tokenizer
from .errors import SessionError
from .messages import map_strings, without_reasoning

MARK: Final = f"rbmark{os.urandom(8).hex()}"
"""Stands for text in a rendering, and is in no message."""
TEXT_MARK: Final = f"rbtext{os.urandom(8).hex()}"
"""Stands for the text of a special token in what a client sent."""
TEXT_MARKS: Final = re.compile(rf"{TEXT_MARK}x(\d+)x")
INSTRUCTIONS: Final = ("system", "developer")
"""Roles of messages that some templates move to the beginning."""
PROBE: Final = {"role": "user", "content": "a"}
Form = Callable[[Mapping[str, Any]], JsonObject]
"""Converts a message into the form that templates expect."""


class CannotJoin(Exception):
    """The template does not show where an answer ends. The prompt is then rendered as a whole."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model, with the tools and variables of one request."""

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]
    form: Form
    opened_at: float | None = None
    """Unix time that the template reads. All turns of a session have the same; None: the time of each rendering."""

    def render(self, messages: Sequence[Mapping[str, Any]], *, opens: bool = True) -> str:
        """Return the text of messages.

        Args:
            opens: True: the text ends with the beginning of an answer.
        """
        shown = [self.form(message) for message in messages]
        if "developer" not in str(self.tokenizer.wrapped.chat_template):
            # Many templates omit messages of a role that they do not know.
            shown = [{**each, "role": "system"} if each["role"] == "developer" else each for each in shown]
        try:
            return self._render(shown, opens)
        except InvalidRequest:
            # Some templates expect the arguments of calls as text, others as objects. Some reject calls with text and
            # reasoning.
            for change in (_with_text_arguments, without_reasoning):
                changed = [change(message) for message in shown]
                if changed != shown:
                    with contextlib.suppress(InvalidRequest):
                        return self._render(changed, opens)
            raise

    def _render(self, shown: Sequence[JsonObject], opens: bool) -> str:
        return self.tokenizer.apply_chat_template(
            shown,
            add_generation_prompt=opens,
            tools=self.tools,
            chat_template_kwargs=self.variables,
            now=None if self.opened_at is None else datetime.fromtimestamp(self.opened_at),
        )

    def whole(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the ids of all messages.

        Raises:
            SessionError: `special_token_in_content`.
            InvalidRequest: the template does not accept these messages.
        """
        return self._encode(ChatTemplate.render, messages)

    def tail(self, answer: JsonObject, ended_by: str, messages: Sequence[JsonObject]) -> list[int]:
        """Return the ids after a sampled answer: the end of the turn if it was not sampled, and the new messages.

        Args:
            answer: the answer, as it was served.
            ended_by: text of the special token with which the sampled ids end; empty: they end otherwise.

        Raises:
            CannotJoin: the template does not show where the answer ends.
            SessionError: `special_token_in_content`.
        """
        try:
            return self._tail(answer, ended_by, messages)
        except InvalidRequest as error:
            # The template does not accept the messages after a single question. It may accept them after all others.
            raise CannotJoin from error

    def _tail(self, answer: JsonObject, ended_by: str, messages: Sequence[JsonObject]) -> list[int]:
        before, has_calls = [PROBE, _marked(answer)], bool(answer.get("tool_calls"))
        if has_calls and MARK not in self.render(before, opens=False):
            # The template has no calls. The sampled ids have them.
            before, has_calls = [PROBE, _marked({**answer, "tool_calls": None})], False
        if any(message["role"] in INSTRUCTIONS for message in messages):
            before = [{**PROBE, "role": "system"}, *before]
            marked = [{**message, "content": TEXT_MARK} for message in messages if message["role"] in INSTRUCTIONS]
            if TEXT_MARK in self.render([*before, *marked, PROBE]).rpartition(MARK)[0]:
                # The template moves instructions to the beginning.
                raise CannotJoin

        def text(template: "ChatTemplate", shown: Sequence[JsonObject]) -> str:
            alone = _after_mark(template.render(shown[: len(before)], opens=False))
            after = _after_mark(template.render(shown))
            return after[self._end_of_turn(alone, after, ended_by, has_calls=has_calls) :]

        return self._encode(text, [*before, *messages])

    def _end_of_turn(self, alone: str, after: str, ended_by: str, *, has_calls: bool) -> int:
        """Return how much of the text after the answer's mark the sampled ids have already.

        Args:
            alone: the text after the mark if no message follows.
            after: the text after the mark if messages follow.
        """
        common = _common_start(alone, after)
        if ended_by:
            at = common.rfind(ended_by)
            if at >= 0:
                return at + len(ended_by)
            # Some templates end a turn with the first token of the next one.
            rest = after[len(common) :]
            if rest.lstrip().startswith(ended_by):
                return after.index(ended_by, len(common)) + len(ended_by)
        if not has_calls:
            # Another special token that ended the turn stands in the place of the template's.
            first = self._special_at_start(after) if ended_by and alone.strip() else ""
            return after.index(first) + len(first) if first else 0
        end = self._special_at_start(self._end_without_calls)
        if not end and not ended_by and after.startswith(alone):
            # The template ends no turn.
            return len(alone)
        at = common.rfind(end) if end else -1
        if at < 0:
            raise CannotJoin
        return at + (len(end) if ended_by else 0)

    @cached_property
    def _end_without_calls(self) -> str:
        return _after_mark(self.render([PROBE, _marked({"role": "assistant"})], opens=False))

    def _special_at_start(self, text: str) -> str:
        text = text.lstrip()
        return max((token for token in self.tokenizer.added_texts if text.startswith(token)), key=len, default="")

    # Special tokens in the text of clients.

    def _encode(
        self, text_of: Callable[["ChatTemplate", Sequence[JsonObject]], str], messages: Sequence[JsonObject]
    ) -> list[int]:
        messages = [self.form(message) for message in messages]
        text = text_of(self, messages)
        own: set[str] = set()
        # Templates read the reasoning in the text of an answer. Its marks then stay what they are.
        for of_answers in (self.tokenizer.added_pattern, self.tokenizer.special_pattern):
            hidden = self._hide(messages, of_answers, own)
            if not own:
                return self.tokenizer.encode(text, add_special_tokens=False)
            pieces = TEXT_MARKS.split(text_of(*hidden))
            found = {self.tokenizer.added_texts[each]: each for each in own}
            shown = [found[int(piece)] if at % 2 else piece for at, piece in enumerate(pieces)]
            if "".join(shown) == text:
                break
        else:
            raise _altered(own)
        ids: list[int] = []
        plain = {each: self._plain(each) for each in set(shown[1::2])}
        for at, piece in enumerate(shown):
            ids += plain[piece] if at % 2 else self.tokenizer.encode(piece, add_special_tokens=False)
        if self.tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise _altered(own)
        return ids

    def _hide(
        self, messages: Sequence[JsonObject], of_answers: re.Pattern[str], found: set[str]
    ) -> tuple["ChatTemplate", Sequence[JsonObject]]:
        """Return template and messages with marks in the place of special tokens in their strings.

        Args:
            of_answers: the special tokens that are hidden in the content of answers.
            found: gets the special tokens that were found.
        """

        def mark(match: re.Match[str]) -> str:
            found.add(match[0])
            return f"{TEXT_MARK}x{self.tokenizer.added_texts[match[0]]}x"

        def hide(value: Any) -> Any:
            try:
                return map_strings(value, lambda text: self.tokenizer.added_pattern.sub(mark, text))
            except RecursionError:
                raise InvalidRequest("messages", "have JSON that is nested too deeply", "some hundred levels") from None

        shown = []
        for message in messages:
            hidden = hide(message)
            if message["role"] == "assistant":
                hidden["content"] = of_answers.sub(mark, message["content"])
            shown.append(hidden)
        variables = {name: hide(value) for name, value in self.variables.items()}
        return dataclasses.replace(self, tools=hide(self.tools), variables=variables), shown

    def _plain(self, text: str) -> list[int]:
        """Return ids of a text without any special token: it is cut within the text of each."""
        ids: list[int] = []
        known: dict[str, list[int]] = {}
        # A special token of one character cannot be cut. The caller compares the decoded text.
        begins = re.compile(f"(?={self.tokenizer.added_pattern.pattern})")
        cuts = [0, *(found.start() + 1 for found in begins.finditer(text)), len(text)]
        for begin, end in pairwise(cuts):
            piece = text[begin:end]
            if piece not in known:
                known[piece] = self.tokenizer.encode(piece, add_special_tokens=False)
                if not self.tokenizer.special_ids.isdisjoint(known[piece]):
                    raise _altered({text})
            ids += known[piece]
        return ids

    # The check of the join.

    def check(
        self, pieces: Sequence[Sequence[int]], messages: Sequence[JsonObject], kept: Sequence[str] = ()
    ) -> bool | None:
        """Return True if the pieces between the sampled answers are what the template makes of all messages.

        Compared is decoded text. What the template makes of the answers themselves does not count: the sampled ids
        stand for them.

        Args:
            pieces: ids of the prompt before each answer, in order; the last one ends the prompt.
            messages: all messages, with the answers as they were served.
            kept: texts that the template must not drop from the answers, one for each piece but the last.

        Returns:
            None: the tokenizer changes text, and what it makes of the whole differs too, so this shows nothing.
        """
        text = self.render(messages)
        if self._contains(text, pieces, kept):
            return True
        decoded = self.tokenizer.decode(self._ids(text), skip_special_tokens=False)
        return False if decoded == text else self._contains(decoded, pieces, kept) or None

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _contains(self, text: str, pieces: Sequence[Sequence[int]], kept: Sequence[str]) -> bool:
        decoded = [self.tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces]
        opening, lasting = self._openings
        at = 0
        for place, piece in enumerate(decoded[:-1]):
            fixed = piece.removesuffix(opening) + lasting if piece.endswith(opening) else piece
            begin = text.find(fixed, at)
            if begin < 0 or (not place and begin):
                return False
            if place and kept and kept[place - 1].strip() not in text[at:begin]:
                return False
            at = begin + len(fixed)
        end = len(text) - len(decoded[-1])
        if end < at or not text.endswith(decoded[-1]) or (len(decoded) == 1 and end):
            return False
        return not (len(decoded) > 1 and kept) or kept[len(decoded) - 2].strip() in text[at:end]

    @cached_property
    def _openings(self) -> tuple[str, str]:
        """Return the text that opens an answer, and the part of it that the template keeps before an earlier answer."""
        closed = self.render([PROBE], opens=False)
        opened = self.render([PROBE])
        past = self.render([PROBE, _marked({"role": "assistant"}), PROBE], opens=False)
        if not opened.startswith(closed) or not past.startswith(closed) or MARK not in past:
            return "", ""
        opening = opened[len(closed) :]
        return opening, _common_start(opening, past[len(closed) : past.index(MARK)])


def _common_start(one: str, other: str) -> str:
    size = min(len(one), len(other))
    return one[: next((at for at in range(size) if one[at] != other[at]), size)]


def _altered(texts: Collection[str]) -> SessionError:
    return SessionError(
        "special_token_in_content",
        f"messages or tools have the text of special tokens ({', '.join(sorted(texts)[:8])}), and the chat template or"
        " the tokenizer changes it; allowed: content without such text",
    )


def _marked(answer: JsonObject) -> JsonObject:
    """Return an answer whose text ends with the mark."""
    calls = answer.get("tool_calls")
    plain = without_reasoning(answer)
    if not calls:
        return {**plain, "content": MARK}
    # Some templates show only the first call.
    marked = [{**call, "function": {**call["function"], "arguments": {"a": MARK}}} for call in calls]
    return {**plain, "tool_calls": marked}


def _with_text_arguments(message: JsonObject) -> JsonObject:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _after_mark(text: str) -> str:
    at = text.rfind(MARK)
    if at < 0:
        raise CannotJoin
    return text[at + len(MARK) :]
