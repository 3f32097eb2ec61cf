"""Loads a tokenizer with the package tokenizers alone, where that is proven to give the ids of transformers.

transformers takes seconds to import, because it imports torch. It also rebuilds the tokenizers of many models from
their vocabulary. The rules here accept only a `tokenizer.json` that transformers uses unchanged. A test compares the
ids.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..schemas.foreign_code import ForeignError, foreign_code
from .tokenization import Tokenizer

__all__ = ["PROVEN_MODELS", "load_fast_tokenizer"]

PROVEN_CLASSES: Final = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Classes that use `tokenizer.json` as it is."""
PROVEN_MODELS: Final = (None, "glm4_moe", "gpt_oss", "llama", "qwen3", "qwen3_moe", "smollm3")
"""Types of models for which transformers takes the class that the tokenizer names."""
NAMED_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HARMLESS: Final = frozenset(
    {
        *("added_tokens_decoder", "additional_special_tokens", "backend", "chat_template", "extra_special_tokens"),
        *(
            "clean_up_tokenization_spaces",
            "is_local",
            "local_files_only",
            "model_input_names",
            "model_max_length",
            "padding_side",
        ),
        *("tokenizer_class", "truncation_side"),
        *NAMED_TOKENS,
    }
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

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: object) -> str:
        # This module of transformers does not import torch.
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{name: value for name, value in message.items() if value is not None} for message in conversation]
        variables: dict[str, Any] = {**self.special_tokens_map, **options}
        del variables["tokenize"]
        rendered, _ = render_jinja_template(conversations=[given], chat_template=self.chat_template, **variables)
        return str(rendered[0])


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise _Unproven(f"it has no {path.name}") from None


def _check(folder: Path, config: Mapping[str, Any], added: Mapping[int, dict[str, Any]]) -> dict[str, str]:
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
