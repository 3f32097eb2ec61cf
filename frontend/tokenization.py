"""Conversion between text and token ids with the model's own tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from ..schemas.errors import InvalidRequest, RollbusError
from ..schemas.foreign_code import ForeignError, foreign_code
from ..schemas.install import pip_install

__all__ = ["Encoder", "Tokenizer", "TokenizerUnavailable", "load_tokenizer", "token_text"]


class TokenizerUnavailable(RollbusError):
    """A tokenizer cannot be loaded, or one of its dependencies is missing. The message names the missing part."""


class Encoder(Protocol):
    """Converts a prompt into token ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, with the special tokens that the model expects around it."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Return the text of a chat's prompt, with its special tokens."""


def token_text(data: bytes) -> str:
    r"""Return the display form of one token's bytes: text, or `bytes:\xe2\x82` if they are only part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


RESERVED: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that `chat_template_kwargs` must not set. Requests have separate fields for some of them. The service sets the
others.
"""

TEMPLATE_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors, besides jinja2's own, that a chat template raises for messages that its author did not expect."""

ANCHOR: Final = "a"
"""A plain-text token that is put before another token. Tokenizers may decode the first token of a text differently."""


class _HuggingFace(Protocol):
    chat_template: object
    special_tokens_map: Mapping[str, object]
    added_tokens_decoder: Mapping[int, Any]

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]: ...

    def convert_tokens_to_string(self, tokens: list[str]) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: object) -> str: ...


class Tokenizer:
    """Converts text into token ids and back. Several threads may use one object at the same time.

    Args:
        tokenizer: a tokenizer of transformers.

    Attributes:
        wrapped: the tokenizer that was passed in.
        special_ids: the ids of special tokens. They are not part of the text that people read.
    """

    def __init__(self, tokenizer: _HuggingFace) -> None:
        self.wrapped = tokenizer
        # The first call sets up truncation and padding if the tokenizer's file defines them. Later calls only read
        # them.
        tokenizer.encode(ANCHOR, add_special_tokens=True, verbose=False)
        self._anchor = len(tokenizer.convert_tokens_to_string([ANCHOR]))
        self._bytes: dict[int, bytes] = {}
        # Includes special tokens without a role attribute, such as an end-of-text token.
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that the model expects around a prompt."""
        # `verbose=True` warns about long texts. The length is checked against the engine's limit elsewhere.
        return self.wrapped.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens. An id without a token adds no text."""
        return self.wrapped.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            # The cleanup would remove spaces that the model generated.
            clean_up_tokenization_spaces=False,
        )

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them, for example `Ġthe`.

        An id without a token gives an empty string.
        """
        return [token or "" for token in self.wrapped.convert_ids_to_tokens(list(token_ids))]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text, possibly part of a character.

        An id without a token gives no bytes.
        """
        found = self._bytes.get(token_id)
        if found is None:
            (token,) = self.tokens([token_id])
            if not token:
                return b""
            text = self.wrapped.convert_tokens_to_string([ANCHOR, token])[self._anchor :]
            found = self._bytes[token_id] = _spelled_bytes(token) if "\ufffd" in text else text.encode()
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat's prompt.

        It contains its special tokens: encode it with `add_special_tokens=False`.

        Raises:
            InvalidRequest: both flags are set, `chat_template_kwargs` contains a reserved name, or the model's template
                does not accept these messages.
            TokenizerUnavailable: the model has no chat template, or jinja2 is not installed.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                field="continue_final_message",
                problem="is set together with add_generation_prompt",
                allowed="one of them",
            )
        variables = dict(chat_template_kwargs or {})
        reserved = sorted(variables.keys() & (RESERVED | self.wrapped.special_tokens_map.keys()))
        if reserved:
            raise InvalidRequest(
                field=f"chat_template_kwargs.{reserved[0]}",
                problem="is reserved",
                allowed="the template's own variables",
            )
        if not self.wrapped.chat_template:
            raise TokenizerUnavailable("the model's tokenizer has no chat template")
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise TokenizerUnavailable("a chat template needs the package jinja2: pip install jinja2") from None
        try:
            return self.wrapped.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **variables,
            )
        except (TemplateError, *TEMPLATE_FAILURES) as exc:
            raise InvalidRequest(
                field="messages",
                problem=f"cannot be rendered: {exc}",
                allowed="messages that the model's chat template accepts",
            ) from exc


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint with transformers, as vLLM does. This downloads nothing.

    Raises:
        TokenizerUnavailable: the folder does not exist, it has no readable tokenizer, or transformers is not installed.
    """
    try:
        with foreign_code(TokenizerUnavailable):
            return _load(folder)
    except ForeignError as exc:
        raise TokenizerUnavailable(f"no tokenizer in {folder}: {exc}") from exc.cause


def _load(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise TokenizerUnavailable(f"no tokenizer: {folder} is not a folder")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerUnavailable(f"a tokenizer needs the package transformers: {pip_install('frontend')}") from None
    return Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _spelled_bytes(token: str) -> bytes:
    """Return the bytes of a token that is not whole characters. Decode them from the spelling in the vocabulary."""
    if len(token) == len("<0xFF>") and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    if all(char in BYTE_OF for char in token):
        return bytes(BYTE_OF[char] for char in token)
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary (GPT-2 and later) represents."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF: Final = _byte_alphabet()
