"""The package tokenizers alone gives the ids of transformers, or is not used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from rollbus.frontend.tokenization import PROVEN_MODELS, Tokenizer, load_fast_tokenizer, load_tokenizer
from tests.http.small_tokenizers import ADDED, CHAT_TEMPLATE, ROLE, SPECIAL, make_byte_level, save

pytestmark = pytest.mark.slow
TEXTS = ("the théâtre 🙂", f"{SPECIAL}the {ROLE}\n\n the{ADDED}x", " the  the", "\x00\u200b", "")
MESSAGES = [
    {"role": "user", "content": "the"},
    {"role": "assistant", "content": "thé", "tool_calls": None},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def configure(folder: Path, **fields: Any) -> None:
    """Set fields of the configuration of a tokenizer. None removes a field."""
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def add_beginning(folder: Path) -> None:
    """Make the tokenizer put a special token before each text, as that of Llama 3."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single=f"{ROLE} $A", special_tokens=[(ROLE, backend.token_to_id(ROLE))]
    )
    backend.enable_truncation(2)
    backend.enable_padding(length=9, pad_token=SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token=ROLE, pad_token=SPECIAL)


def assert_equal(folder: Path) -> None:
    """Check that both packages give the same ids, texts and prompts of chats."""
    fast, slow = load_fast_tokenizer(folder), load_tokenizer(folder)
    assert isinstance(fast, Tokenizer), fast
    for text in TEXTS:
        for special in (True, False):
            assert fast.encode(text, add_special_tokens=special) == slow.encode(text, add_special_tokens=special)
        ids = slow.encode(text)
        for special in (True, False):
            assert fast.decode(ids, skip_special_tokens=special) == slow.decode(ids, skip_special_tokens=special)
        assert fast.tokens(ids) == slow.tokens(ids)
    assert fast.special_ids == slow.special_ids
    for options in (
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"opening": "x"}},
    ):
        assert fast.apply_chat_template(MESSAGES, **options) == slow.apply_chat_template(MESSAGES, **options)


@pytest.mark.parametrize("model", [*PROVEN_MODELS])
def test_ids_are_equal_to_those_of_transformers(tmp_path: Path, model: str | None) -> None:
    """For each type of model for which tokenizers is used alone, ids and texts equal those of transformers."""
    save(make_byte_level(), tmp_path)
    add_beginning(tmp_path)
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))

    assert_equal(tmp_path)


def test_a_saved_tokenizer_is_loaded_without_transformers(tmp_path: Path) -> None:
    """A tokenizer that transformers has saved is used too, with its added tokens and its template in a file."""
    load_tokenizer(save(make_byte_level(), tmp_path)).wrapped.save_pretrained(tmp_path / "saved")  # type: ignore[attr-defined]
    (tmp_path / "saved" / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<assistant>", "<bot>"))

    assert_equal(tmp_path / "saved")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_class": "Qwen2Tokenizer"}, "its class is Qwen2Tokenizer"),
        ({"tokenizer_class": None}, "its class is None"),
        ({"add_bos_token": False}, "its configuration sets add_bos_token"),
        ({"add_eos_token": True}, "its configuration sets add_eos_token"),
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "its configuration sets auto_map"),
        ({"eos_token": "<other>"}, "its configuration has special tokens that its tokenizer.json lacks"),
        ({"eos_token": ADDED}, "its configuration has special tokens that its tokenizer.json lacks"),
        ({"added_tokens_decoder": {}}, "its files differ in added tokens"),
        ({"chat_template": [{"name": "default", "template": ""}]}, "it has several chat templates"),
    ],
)
def test_an_unproven_tokenizer_is_left_to_transformers(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    """A class of its own, a setting of BOS or EOS, or files that differ are reasons to use transformers."""
    configure(save(make_byte_level(), tmp_path), **fields)

    assert load_fast_tokenizer(tmp_path) == reason


def test_a_directory_without_a_proven_tokenizer_gives_the_reason(tmp_path: Path) -> None:
    """A missing file, an unknown type of model and a broken file are reasons, not errors."""
    assert load_fast_tokenizer(tmp_path) == "it has no tokenizer_config.json"
    save(make_byte_level(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    assert load_fast_tokenizer(tmp_path) == "its model is gemma"
    (tmp_path / "config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert load_fast_tokenizer(tmp_path) == "it has a special_tokens_map.json"
    (tmp_path / "special_tokens_map.json").unlink()
    backend = make_byte_level()
    backend.enable_padding()
    save(backend, tmp_path)
    assert load_fast_tokenizer(tmp_path) == "its tokenizer.json names a token for padding"
    (tmp_path / "tokenizer.json").write_text("{")
    assert "JSONDecodeError" in str(load_fast_tokenizer(tmp_path))
