"""Stop strings. The bus transports token ids, so the service searches the text for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ... import bus
from ..tokenization import Tokenizer
from .detokenizer import LONGEST_CHARACTER, Detokenizer

__all__ = ["AnswerText", "StopMatcher", "StopString", "StopStrings", "TextDelta", "stop_strings", "text_of"]

MAX_STOPS: Final = 64
"""Limit on stop strings. Each of them is searched in each piece of text."""
MAX_STOP_CHARS: Final = 4096

StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None
"""Stop strings in a request body."""


def stop_strings(given: StopStrings) -> Sequence[str]:
    """Return the stop strings of a body as a sequence."""
    return () if given is None else (given,) if isinstance(given, str) else given


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, in time linear in the text.

    The first stop string is the one that is complete first. If several end at the same place, it is the first of them
    in `stops`. Text that may be the beginning of a stop string is held.

    Args:
        stops: the stop strings. None of them may be empty.
        include_stop: if True, the text includes the stop string at its end.

    Attributes:
        stop: the stop string that was found. Do not add text after that.
        include_stop: the argument `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.stop: str | None = None
        self.include_stop = include_stop
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> str:
        """Return the text that is final now. If `may_stop` is False, ignore stop strings that `text` completes."""
        if not self._patterns:
            return text
        for index, char in enumerate(text):
            # Advance all patterns, even if one is found.
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
        """Return the held text. Call this if no more text follows."""
        answer, self._held = self._held, ""
        return answer


class _Pattern:
    """Length of the prefix of a string with which a text ends, by the Knuth-Morris-Pratt algorithm."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each prefix of the string: the length of the longest shorter prefix with which it ends.
        self._shorter = [0] * len(text)
        for index in range(1, len(text)):
            self._shorter[index] = self._next(self._shorter[index - 1], text[index])

    def _next(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.text[matched] == char)

    def add(self, char: str) -> bool:
        """Add a character of the text. Return True if the text now ends with the string."""
        self.matched = self._next(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[-1]
        return True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The text that some tokens add to an answer."""

    text: str
    kept: int
    """Number of the tokens that belong to the answer. Discard later tokens with their logprobs and routed experts."""
    stop: str | None = None
    """The stop string that ended the answer. The last of the kept tokens completed it."""


class AnswerText:
    """The text of one answer, up to its end. The split of the tokens between calls does not affect it.

    Args:
        min_tokens: a stop string counts only if a token after this number of tokens completes it.

    Attributes:
        tokens: number of tokens that belong to the answer so far.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int = 0) -> None:
        self.tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens

    def add(self, token_ids: Sequence[int], *, final: bool = False, by_stop_token: bool = False) -> TextDelta:
        """Add the next tokens of an answer that no stop string has ended.

        Args:
            final: no more tokens follow, so no text is held.
            by_stop_token: the last token is a stop token, which ended the answer. The token is kept, and its text is
                treated like that of a stop string.
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
    """Return the empty text of a new answer."""
    prompt_end = [int(token_id) for token_id in request.prompt_token_ids[-LONGEST_CHARACTER:]]
    return AnswerText(
        Detokenizer(tokenizer, prompt_end, skip_special_tokens=skip_special_tokens),
        StopMatcher(stops, include_stop),
        min_tokens=request.sampling.min_tokens,
    )
