import json
from pathlib import Path

import numpy as np
import pytest

from rollbus.workers.engines.vllm.tiny_moe import SENTENCES, VOCAB_SIZE, main, make_tiny_moe

pytestmark = pytest.mark.vllm


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file of `folder`."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_same_arguments_make_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    """The arguments determine the bytes of a model."""
    first = contents(make_tiny_moe(tmp_path / "first", seed=3))
    second = contents(make_tiny_moe(tmp_path / "second", seed=3))
    other = contents(make_tiny_moe(tmp_path / "other", seed=4))

    assert first == second
    assert first["model.safetensors"] != other["model.safetensors"]
    assert {path.name for path in tmp_path.iterdir()} == {"first", "second", "other"}


def test_an_existing_model_is_kept_and_other_content_is_not_overwritten(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    """Making a model again changes nothing. A folder with other content is rejected and does not change."""
    marker = models["moe"] / "tiny_moe.json"
    before = marker.stat().st_mtime_ns
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")

    assert make_tiny_moe(models["moe"], dtype="float32") == models["moe"]
    assert marker.stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="not the requested model"):
        make_tiny_moe(tmp_path / "mine")
    assert main(["--output", str(tmp_path / "mine")]) == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]


def test_the_tokenizer_restores_any_text(models: dict[str, Path]) -> None:
    """The tokenizer encodes every byte, special tokens are single ids, and a chat template exists."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["moe"])
    text = bytes(range(256)).decode("latin-1") + "日本 😀\n\t" + SENTENCES[0]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_every_expert_is_used_and_the_best_token_is_clear(models: dict[str, Path]) -> None:
    """Every expert is used and the best token is clear, so rounding decides neither routing nor greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["moe"])
    model = AutoModelForCausalLM.from_pretrained(models["moe"], dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("\n".join(SENTENCES))])
    with torch.no_grad():
        output = model(ids, output_router_logits=True)
    experts = [logits.topk(4).indices for logits in output.router_logits]
    best = output.logits[0].topk(2).values
    gaps = (best[:, 0] - best[:, 1]).numpy()

    assert len(experts) == 4
    for layer in experts:
        shares = np.bincount(layer.flatten().numpy(), minlength=16) / layer.numel()
        assert shares.min() > 0.004
    assert np.median(gaps) > 0.1
    assert len(set(output.logits[0].argmax(-1).tolist())) > 100


def test_dense_model_has_no_experts(models: dict[str, Path]) -> None:
    """The dense variant is a Qwen3 with the same tokenizer."""
    config = json.loads((models["dense"] / "config.json").read_text())

    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (models["dense"] / "tokenizer.json").read_bytes() == (models["moe"] / "tokenizer.json").read_bytes()
