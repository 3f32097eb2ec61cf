"""Text to token ids and back, with a model's own tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from schemas.errors import RollbusError

__all__ = ["Tokenizer", "TokenizerUnavailable", "load_tokenizer"]


class TokenizerUnavailable(RollbusError):
    """A tokenizer cannot be loaded; the message says what is missing."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, with the special tokens that the model expects around it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens, without special tokens."""


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint as vLLM does, with transformers; nothing is downloaded.

    Raises:
        TokenizerUnavailable: no such folder, no tokenizer in it, or transformers is not installed.
    """
    if not folder.is_dir():
        raise TokenizerUnavailable(f"no tokenizer: {folder} is not a folder")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerUnavailable(
            "a tokenizer needs the package transformers: pip install 'rollbus[frontend]'"
        ) from None
    try:
        return _Pretrained(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError, KeyError) as exc:
        raise TokenizerUnavailable(f"no tokenizer in {folder}: {exc}") from exc


class _Encoding(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class _Pretrained:
    def __init__(self, tokenizer: _Encoding) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
