"""Tokenizers of a few hundred tokens, one for each family of models."""

import functools
import json
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollbus.frontend import tokenization

SPECIAL = "<|end|>"
ROLE = "<|role|>"
"""A special token that the configuration does not name."""
ADDED = "<tool▁call>"
"""An added token that is not special, with a character that byte-level vocabularies do not contain."""
CHAT_TEMPLATE = (
    "{% if messages[0].role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opening }}{% endif %}"
)


@functools.cache
def byte_level() -> tokenization.Tokenizer:
    """Return a tokenizer like those of GPT-2, Llama 3 and Qwen: all bytes are tokens, and some texts."""
    return _loaded(make_byte_level())


def make_byte_level() -> Tokenizer:
    """Return the byte-level tokenizer in a form that can be saved."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ã", "©"), ("ð", "Ł"), ("ł", "Ģ")]
    vocabulary = {token: index for index, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def byte_fallback() -> tokenization.Tokenizer:
    """Return a tokenizer like those of Llama 2 and Gemma: pieces of text, and bytes for all other text."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "é", "th", "the", "▁the"]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _loaded(tokenizer)


@functools.cache
def word_piece() -> tokenization.Tokenizer:
    """Return a tokenizer like that of BERT, whose decoder adds the spaces."""
    vocabulary = {token: index for index, token in enumerate(["[UNK]", "the", "##re", "cat", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _loaded(tokenizer)


def _loaded(tokenizer: Tokenizer) -> tokenization.Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return tokenization.load_tokenizer(save(tokenizer, Path(folder)))


def save(tokenizer: Tokenizer, folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer in the layout of a checkpoint, with two special tokens and one other added token."""
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (SPECIAL, ROLE)])
    tokenizer.add_tokens([AddedToken(ADDED, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL, "chat_template": chat_template}
    # Clean-up would remove spaces.
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "clean_up_tokenization_spaces": True}))
    return folder
