"""Words that an answer must not have: the bus carries token ids, so they are turned into these here."""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ..tokenization import Tokenizer
from .errors import invalid
from .stops import StopString

__all__ = ["BadWords", "bad_words_ids"]

MAX_BAD_WORDS: Final = 1024

BadWords: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None
"""As bodies have them."""


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer, field: str) -> list[list[int]]:
    """As vLLM: each word at the beginning of a text, and behind a blank where that is another single token.

    Raises:
        HttpError: 400, a word has no tokens.
    """
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise invalid(field, "has one without tokens", "words that the tokenizer knows")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
