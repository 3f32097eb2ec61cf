"""Conversion of `bad_words` into token ids, because the bus carries only token ids."""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ..tokenization import Tokenizer
from .errors import invalid
from .stops import StopString

__all__ = ["BadWords", "bad_words_ids"]

MAX_BAD_WORDS: Final = 1024

BadWords: TypeAlias = Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None
"""The type of the field in request bodies."""


def bad_words_ids(words: Sequence[str], tokenizer: Tokenizer, field: str) -> list[list[int]]:
    """Return the token ids of each word, as vLLM does.

    Each word is encoded as at the start of a text. It is also encoded after a blank if that gives another single token.

    Raises:
        HttpError: 400, a word has no tokens.
    """
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise invalid(field, "contains a word without tokens", "words that the tokenizer knows")
        found.append(plain)
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
