"""Conversion between text and token ids with the model's own tokenizer.

transformers takes seconds to import, because it imports torch. It also rebuilds the tokenizers of many models from
their vocabulary. So a model's tokenizer is loaded with the package tokenizers alone where that is proven to give the
same ids: the rules accept only a `tokenizer.json` that transformers uses unchanged. A test compares the ids.
"""

import gc
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from ..schemas.decoding import JsonObject
from ..schemas.errors import ForeignError, InvalidRequest, RollbusError, foreign_code
from ..schemas.options import pip_install


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


SHORT_TEXT: Final = 4096
"""Characters that are tokenized or parsed in about the time of a switch to a thread and back, or less."""
RESERVED: Final = frozenset(
    (
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    )
)
"""Names that `chat_template_kwargs` must not set. Requests have separate fields for some of them. The service sets the
others.
"""

TEMPLATE_FAILURES: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Errors, besides jinja2's own, that a chat template raises for messages that its author did not expect."""

INSTRUCTIONS: Final = ("system", "developer")
"""Roles of messages that instruct the model."""
DATE: Final = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
"""Finds where a chat template writes the time, with its format."""

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

    def apply_chat_template(self, conversation: list[JsonObject], **options: object) -> str: ...


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
        self.token_bytes = _TokenBytes(tokenizer).__getitem__
        """Returns the bytes that a token adds to a text, perhaps part of a character, if it exists."""
        # Includes special tokens without a role attribute, such as an end-of-text token.
        self.special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    @cached_property
    def added_texts(self) -> Mapping[str, int]:
        """The texts that become one token wherever they are, special or not, with its id. Blank ones are left out."""
        return {str(token): number for number, token in self.wrapped.added_tokens_decoder.items() if str(token).strip()}

    @cached_property
    def added_pattern(self) -> re.Pattern[str]:
        """Finds `added_texts`."""
        return _any_of(self.added_texts)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds those of `added_texts` whose tokens are special."""
        return _any_of(text for text, token_id in self.added_texts.items() if token_id in self.special_ids)

    @cached_property
    def takes_parts(self) -> bool:
        """True if the chat template writes the text parts of a content, which it may put together in its own way.

        Other templates fail, or write the list as Python or JSON does, with two backslashes.
        """
        probe = "a\\b"
        try:
            return probe in self.apply_chat_template([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except InvalidRequest:
            return False

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

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> str:
        """Return the text of a chat's prompt.

        It contains its special tokens: encode it with `add_special_tokens=False`.

        Args:
            now: the time that the template shows; None: that of the call.

        Raises:
            InvalidRequest: both flags are set, `chat_template_kwargs` contains a reserved name, or the model's template
                does not accept these messages.
            TokenizerUnavailable: the model has no chat template, or jinja2 is not installed.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest("continue_final_message", "is set together with add_generation_prompt", "one of them")
        variables = dict(chat_template_kwargs or {})
        reserved = sorted(variables.keys() & (RESERVED | self.wrapped.special_tokens_map.keys()))
        if reserved:
            raise InvalidRequest(f"chat_template_kwargs.{reserved[0]}", "is reserved", "the template's own variables")
        template = self.wrapped.chat_template
        if not template:
            raise TokenizerUnavailable("the model's tokenizer has no chat template")
        if now is not None and isinstance(template, str) and "strftime_now" in template:
            # transformers passes no functions to templates.
            template = DATE.sub(lambda call: repr(now.strftime(call[2])), template)
            variables["chat_template"] = template
        try:
            from jinja2 import TemplateError
        except ImportError:
            raise TokenizerUnavailable("a chat template needs the package jinja2: pip install jinja2") from None
        try:
            if "developer" not in str(template):
                messages = _without_developers(messages)
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
                "messages", f"cannot be rendered: {exc}", "messages that the model's chat template accepts"
            ) from exc


def joined(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a message's content, whose parts are joined by line ends."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _without_developers(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return messages for a template that omits developers: as in vLLM, all instructions become one system message."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    told = [joined(message["content"]) for message in messages if message["role"] in INSTRUCTIONS]
    others = [message for message in messages if message["role"] not in INSTRUCTIONS]
    return [{"role": "system", "content": "\n\n".join(filter(None, told))}, *others]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of some texts. Of no texts, it finds nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


class _TokenBytes(dict[int, bytes]):
    """The known bytes of tokens. A lookup of a known token runs no Python."""

    def __init__(self, tokenizer: _HuggingFace) -> None:
        self._tokenizer = tokenizer
        self._anchor = len(tokenizer.convert_tokens_to_string([ANCHOR]))

    def __missing__(self, token_id: int) -> bytes:
        (token,) = self._tokenizer.convert_ids_to_tokens([token_id])
        if not token:
            return b""
        text = self._tokenizer.convert_tokens_to_string([ANCHOR, token])[self._anchor :]
        found = self[token_id] = _spell_bytes(token) if "\ufffd" in text else text.encode()
        return found


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
        is_first = "transformers" not in sys.modules
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerUnavailable(f"a tokenizer needs the package transformers: {pip_install('frontend')}") from None
    if is_first:
        # The import makes 190,000 objects that stay. Each full garbage collection would take a tenth of a second.
        gc.freeze()
    return Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def _spell_bytes(token: str) -> bytes:
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


PROVEN_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that use `tokenizer.json` as it is."""
PROVEN_MODELS: Final = (None, "glm4_moe", "gpt_oss", "llama", "qwen3", "qwen3_moe", "smollm3")
"""Types of models for which transformers takes the class that the tokenizer names."""
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HARMLESS: Final = frozenset(
    (
        *("added_tokens_decoder", "additional_special_tokens", "backend", "chat_template", "extra_special_tokens"),
        *("clean_up_tokenization_spaces", "is_local", "local_files_only", "model_input_names", "model_max_length"),
        *("padding_side", "tokenizer_class", "truncation_side", *NAMED_TOKENS),
    )
)
"""Fields of `tokenizer_config.json` that do not change the ids, after the checks of this module."""


class _Unproven(Exception):
    """The text says what is not proven."""


def load_fast_tokenizer(folder: Path) -> Tokenizer | str:
    """Load a tokenizer without transformers. Return the reason if its ids might differ from those of transformers."""
    try:
        with foreign_code(_Unproven):
            return Tokenizer(_FastTokenizer(folder))
    except (_Unproven, ForeignError) as exc:
        return str(exc)


class _FastTokenizer:
    """Has the methods of transformers' tokenizers that `Tokenizer` calls."""

    def __init__(self, folder: Path) -> None:
        config = _read(folder / "tokenizer_config.json")
        file = folder / "tokenizer.json"
        content = _read(file)
        added = {token.pop("id"): token for token in content.get("added_tokens", [])}
        if content.get("padding") is not None and config.get("pad_token") is None:
            raise _Unproven("its tokenizer.json names a token for padding")
        self.special_tokens_map: Mapping[str, object] = _check(folder, config, added)
        self.chat_template: object = _chat_template(folder, config)
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(file))
        self._backend.no_truncation()
        self._backend.no_padding()
        self.added_tokens_decoder: Mapping[int, Any] = self._backend.get_added_tokens_decoder()

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._backend.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def apply_chat_template(self, conversation: list[JsonObject], **options: object) -> str:
        # This module of transformers does not import torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{name: value for name, value in message.items() if value is not None} for message in conversation]
        variables: JsonObject = {"chat_template": self.chat_template, **self.special_tokens_map, **options}
        del variables["tokenize"]
        rendered, _ = render_jinja_template(conversations=[given], **variables)
        return str(rendered[0])


def _read(path: Path) -> JsonObject:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise _Unproven(f"it has no {path.name}") from None


def _check(folder: Path, config: Mapping[str, Any], added: Mapping[int, JsonObject]) -> dict[str, str]:
    """Check that transformers uses `tokenizer.json` as it is. Return the named special tokens.

    Args:
        added: added tokens of `tokenizer.json`, by id.
    """
    name = config.get("tokenizer_class")
    if name not in PROVEN_CLASSES:
        raise _Unproven(f"its class is {name}")
    unproven = sorted(config.keys() - HARMLESS)
    if unproven:
        raise _Unproven(f"its configuration sets {unproven[0]}")
    model = _read(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
    if model not in PROVEN_MODELS:
        raise _Unproven(f"its model is {model}")
    if (folder / "additional_chat_templates").exists():
        raise _Unproven("it has several chat templates")
    stated = config.get("added_tokens_decoder")
    if stated is None:
        legacy = [file for file in ("added_tokens.json", "special_tokens_map.json") if (folder / file).exists()]
        if legacy:
            raise _Unproven(f"it has a {legacy[0]}")
    elif {int(token_id): token for token_id, token in stated.items()} != added:
        raise _Unproven("its files differ in added tokens")
    named = {name: config[name] for name in NAMED_TOKENS if config.get(name) is not None}
    extra = [*(config.get("additional_special_tokens") or ()), *(config.get("extra_special_tokens") or ())]
    special = {token["content"] for token in added.values() if token["special"]}
    if not all(isinstance(token, str) and token in special for token in (*named.values(), *extra)):
        raise _Unproven("its configuration has special tokens that its tokenizer.json lacks")
    return named


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.is_file() else config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise _Unproven("it has several chat templates")
    return template
