"""Incremental conversion of tokens to text."""

import codecs
from collections.abc import Sequence

from ..tokenization import Tokenizer

__all__ = ["LONGEST_CHARACTER", "Detokenizer"]

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8. At most this many tokens can be parts of one character."""


class Detokenizer:
    """Converts tokens to text in constant time per token.

    A character is returned as soon as all of its bytes are known.

    Bytes that can never become a character are U+FFFD, as in the tokenizer's own text.

    Args:
        prompt_token_ids: the preceding tokens. Their text is not repeated, but a character may begin in them.
        skip_special_tokens: if True, special tokens add no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else ()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.add(prompt_token_ids[-LONGEST_CHARACTER:])

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the new text."""
        data = (self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._hidden)
        return self._utf8.decode(b"".join(data))

    def flush(self) -> str:
        """Return the text that remains at the end: U+FFFD if a character is incomplete, else an empty string."""
        return self._utf8.decode(b"", final=True)
