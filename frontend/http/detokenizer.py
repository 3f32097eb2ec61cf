"""Text of tokens that come one after another."""

import codecs
from collections.abc import Sequence

from ..tokenization import Tokenizer

__all__ = ["LONGEST_CHARACTER", "Detokenizer"]

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8: no more tokens than these can be parts of it."""


class Detokenizer:
    """Makes text of tokens, in constant time for each; a character is given out when all of its bytes are there.

    Bytes that can never become a character are U+FFFD, as in the tokenizer's own text.

    Args:
        prompt_token_ids: what comes before. Its text is not repeated, but a character may have begun there.
        skip_special_tokens: special tokens add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else ()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_token_ids[-LONGEST_CHARACTER:])

    def add(self, token_ids: Sequence[int]) -> str:
        """The new text."""
        data = (self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._hidden)
        return self._utf8.decode(b"".join(data))

    def flush(self) -> str:
        """What is left when no tokens follow: U+FFFD if a character has begun, else nothing."""
        return self._utf8.decode(b"", final=True)
