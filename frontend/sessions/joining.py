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
from itertools import pairwise, product
from typing import Any, Final

from ...schemas.decoding import JsonObject
from ...schemas.errors import InvalidRequest
from ..tokenization import Tokenizer
from .messages import first_exchange, map_strings, without_reasoning
from .tree import SessionError

MARK: Final = f"rbmark{os.urandom(8).hex()}"
"""Stands for text in a rendering, and is in no message."""
TEXT_MARK: Final = f"rbtext{os.urandom(8).hex()}"
"""Stands for the text of a special token in what a client sent."""
TEXT_MARKS: Final = re.compile(rf"{TEXT_MARK}x(\d+)x")
INSTRUCTIONS: Final = ("system", "developer")
"""Roles of messages that some templates move to the beginning."""
PROBE: Final = {"role": "user", "content": "a"}
MAX_OPENERS: Final = 8
"""Other settings of a history whose openings of answers are looked for: each costs some renderings."""
Form = Callable[[Mapping[str, Any]], JsonObject]
"""Converts a message into the form that templates expect."""


class CannotJoin(Exception):
    """The tail after an answer cannot be rendered alone. The prompt is then rendered as a whole.

    The argument is the reason: the field of the fork.
    """


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

    def tail(
        self, answer: JsonObject, ended_by: str, messages: Sequence[JsonObject], earlier: Sequence[JsonObject] = ()
    ) -> list[int]:
        """Return the ids after a sampled answer: the end of the turn if it was not sampled, and the new messages.

        Args:
            answer: the answer, as it was served.
            ended_by: text of the special token with which the sampled ids end; empty: they end otherwise.
            earlier: the messages before the answer. Some templates write the first results of calls in another way than
                later ones.

        Raises:
            CannotJoin: the template does not show where the answer ends.
            SessionError: `special_token_in_content`.
        """
        begin = [PROBE, *first_exchange(earlier)]
        for change in (dict, _with_first_call):
            with contextlib.suppress(InvalidRequest):
                return self._tail([change(each) for each in begin], change(answer), ended_by, messages)
        # The template does not accept the messages after a single question. It may accept them after all others.
        raise CannotJoin("rejected_alone")

    def _tail(
        self, begin: Sequence[JsonObject], answer: JsonObject, ended_by: str, messages: Sequence[JsonObject]
    ) -> list[int]:
        before, has_calls = [*begin, _marked(answer)], bool(answer.get("tool_calls"))
        if has_calls and MARK not in self.render(before, opens=False):
            # The template has no calls. The sampled ids have them.
            before, has_calls = [*begin, _marked({**answer, "tool_calls": None})], False
        if any(message["role"] in INSTRUCTIONS for message in messages):
            before = [{**PROBE, "role": "system"}, *before]
            marked = [{**message, "content": TEXT_MARK} for message in messages if message["role"] in INSTRUCTIONS]
            if TEXT_MARK in self.render([*before, *marked, PROBE]).rpartition(MARK)[0]:
                raise CannotJoin("instructions_moved")

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
        plain = self.render([PROBE, _marked({"role": "assistant"})], opens=False)
        end = self._special_at_start(_after_mark(plain))
        if not end and not ended_by and after.startswith(alone):
            # The template ends no turn.
            return len(alone)
        at = common.rfind(end) if end else -1
        if at < 0:
            raise CannotJoin("end_hidden")
        return at + (len(end) if ended_by else 0)

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
        self,
        pieces: Sequence[Sequence[int]],
        messages: Sequence[JsonObject],
        kept: Sequence[str] = (),
        others: Sequence["ChatTemplate"] = (),
    ) -> int | None:
        """Return how many pieces between the sampled answers, from the first on, the template makes of all messages.

        Compared is decoded text. What the template makes of the answers themselves does not count, nor what opens them:
        the sampled ids stand for them.

        Args:
            pieces: ids of the prompt before each answer, in order; the last one ends the prompt.
            messages: all messages, with the answers as they were served.
            kept: texts that the template must not drop from the answers, one for each piece but the last.
            others: the template with the settings of earlier turns, which opened their answers.

        Returns:
            None: the tokenizer changes text, and what it makes of the whole differs too, so this shows nothing.
        """
        try:
            text = self.render(messages)
        except InvalidRequest:
            # No turn begins with a message that the template rejects. So it rejects the calls of an answer.
            messages = [_with_first_call(each) for each in messages]
            text = self.render(messages)
        openings = self._openings(messages, others)
        num_equal = self._num_equal(text, pieces, kept, openings)
        if num_equal < len(pieces):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            decoded = self.tokenizer.decode(ids, skip_special_tokens=False)
            if decoded != text:
                num_equal = self._num_equal(decoded, pieces, kept, openings)
                return num_equal if num_equal == len(pieces) else None
        return num_equal

    def _num_equal(
        self, text: str, pieces: Sequence[Sequence[int]], kept: Sequence[str], openings: Sequence[tuple[str, str]]
    ) -> int:
        at = 0
        for place, ids in enumerate(pieces, 1):
            piece = self.tokenizer.decode(ids, skip_special_tokens=False)
            begin = len(text) - len(piece)
            if place < len(pieces):
                shorter = [piece.removesuffix(opens) + stays for opens, stays in openings if piece.endswith(opens)]
                piece = min(shorter, key=len, default=piece)
                begin = text.find(piece, at)
            is_kept = place == 1 or not kept or kept[place - 2].strip() in text[at:begin]
            if begin < at or not text.startswith(piece, begin) or (place == 1 and begin) or not is_kept:
                return place - 1
            at = begin + len(piece)
        return len(pieces)

    def _openings(self, messages: Sequence[JsonObject], others: Sequence["ChatTemplate"]) -> list[tuple[str, str]]:
        """Return what opens an answer after the last message's content, and the part of it that stays in histories."""
        exchange, found = first_exchange(messages), []
        asked: list[list[JsonObject]] = [[PROBE]]
        answers: list[list[JsonObject]] = [[_marked({"role": "assistant"}), PROBE]]
        if exchange:
            asked += [[PROBE, *exchange], [PROBE, *exchange, PROBE]]
            answers.append([_marked(exchange[0]), *exchange[1:]])
        for before, answer, opener in product(asked, answers, (self, *others[-MAX_OPENERS:])):
            question = [*before[:-1], {**before[-1], "content": TEXT_MARK}]
            with contextlib.suppress(InvalidRequest, CannotJoin):
                opened = _after_mark(opener.render(question), TEXT_MARK)
                shown = _after_mark(self.render([*question, *answer], opens=False), TEXT_MARK)
                if MARK in shown:
                    found.append((opened, _common_start(opened, shown[: shown.index(MARK)])))
        return found


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


def _with_first_call(message: JsonObject) -> JsonObject:
    """Return an answer with only its first call: some templates reject several. The sampled ids have them."""
    is_answer = message["role"] == "assistant" and message.get("tool_calls")
    return {**message, "tool_calls": message["tool_calls"][:1]} if is_answer else message


def _with_text_arguments(message: JsonObject) -> JsonObject:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def _after_mark(text: str, mark: str = MARK) -> str:
    _, found, after = text.rpartition(mark)
    if not found:
        raise CannotJoin("end_hidden")
    return after
