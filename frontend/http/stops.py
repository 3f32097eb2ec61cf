"""Strings to stop at: the bus carries token ids, so they are found here, in the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ... import bus
from ..tokenization import Tokenizer
from .detokenizer import LONGEST_CHARACTER, Detokenizer

__all__ = ["AnswerText", "StopMatcher", "StopString", "StopStrings", "TextDelta", "stop_strings", "text_of"]

MAX_STOPS: Final = 64
"""Every one is looked for in every piece of text."""
MAX_STOP_CHARS: Final = 4096

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
"""As bodies have them."""


def stop_strings(given: StopStrings) -> Sequence[str]:
    """As a list."""
    return () if given is None else (given,) if isinstance(given, str) else given


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, in time linear in the text.

    The first is the one that is complete first; of several that end at the same place, the first of `stops`. Text that
    may turn out to begin a stop string is held back.

    Args:
        stops: none may be empty.
        include_stop: the text ends with the stop string instead of before it.

    Attributes:
        stop: the one that was found; nothing may be added then.
        include_stop: as given.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stop: str | None = None
        self.include_stop = include_stop
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain now; with `may_stop` false, a stop string that `text` completes does not count."""
        if not self._patterns:
            return text
        for index, char in enumerate(text):
            # All of them move on, also if one is found.
            found = [pattern.text for pattern in self._patterns if pattern.add(char)]
            if found and may_stop:
                self.stop = found[0]
                answer = self._held + text[: index + 1]
                self._held = ""
                return answer if self.include_stop else answer[: -len(self.stop)]
        self._held += text
        unsure = 0 if self.include_stop else max(pattern.matched for pattern in self._patterns)
        sure = len(self._held) - unsure
        answer, self._held = self._held[:sure], self._held[sure:]
        return answer

    def flush(self) -> str:
        """What was held back, when no text follows."""
        answer, self._held = self._held, ""
        return answer


class _Pattern:
    """How much of a string the end of a text is: the method of Knuth, Morris and Pratt."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each prefix of the string: the longest shorter one with which it ends.
        self._shorter = [0] * len(text)
        for index in range(1, len(text)):
            self._shorter[index] = self._next(self._shorter[index - 1], text[index])

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == char)

    def add(self, char: str) -> bool:
        """Whether the string ends with this character."""
        self.matched = self._next(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[-1]
        return True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some more tokens add to an answer."""

    text: str
    kept: int
    """How many of the tokens belong to it; none of those behind them do, nor their logprobs or rows of routing."""
    stop: str | None = None
    """The stop string that ends it, which the last of the kept tokens completed."""


class AnswerText:
    """The text of one answer, and where it ends; how its tokens are split between calls makes no difference.

    Args:
        min_tokens: a stop string counts only if a later token than these completes it.

    Attributes:
        tokens: how many belong to the answer so far.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int = 0) -> None:
        self.tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens

    def add(self, token_ids: Sequence[int], *, final: bool = False, by_stop_token: bool = False) -> TextDelta:
        """Take the next tokens of an answer that no stop string has ended.

        Args:
            final: none follow: nothing is held back.
            by_stop_token: the last of them is a stop token, which ended the answer: it is kept, and its text is treated
                like a stop string's.
        """
        texts: list[str] = []
        unread = by_stop_token and not self._stops.include_stop
        for kept, token_id in enumerate(token_ids, 1):
            self.tokens += 1
            if not (unread and kept == len(token_ids)):
                texts.append(self._stopped(self._detokenizer.add([token_id])))
            if self._stops.stop is not None:
                return TextDelta("".join(texts), kept, self._stops.stop)
        if final:
            texts += [self._stops.add(self._detokenizer.flush(), may_stop=False), self._stops.flush()]
        return TextDelta("".join(texts), len(token_ids))

    def _stopped(self, text: str) -> str:
        return self._stops.add(text, may_stop=self.tokens > self._min_tokens)


def text_of(
    request: bus.GenerateRequest,
    tokenizer: Tokenizer,
    stops: Sequence[str],
    *,
    include_stop: bool,
    skip_special_tokens: bool,
) -> AnswerText:
    """The text of an answer that has not begun."""
    prompt_end = [int(token_id) for token_id in request.prompt_token_ids[-LONGEST_CHARACTER:]]
    return AnswerText(
        Detokenizer(tokenizer, prompt_end, skip_special_tokens=skip_special_tokens),
        StopMatcher(stops, include_stop),
        min_tokens=request.sampling.min_tokens,
    )
