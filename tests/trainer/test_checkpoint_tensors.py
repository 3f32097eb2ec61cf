"""Rule: a model's tensors have the checkpoint's names and the bytes of `save_pretrained`, or raise an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rollbus.trainer import CheckpointMismatch
from rollbus.trainer.checkpoint import checkpoint_tensors
from tests.support.tiny_families import FAMILIES, make_family


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def load(folder: Path) -> Any:
    """Load a model with the dtype of its checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """The tensors equal those of `save_pretrained` for MoE, dense and tied models, also after a weight change."""
    folder = make_family(tmp_path / "first", family, seed=1)
    model = load(folder)
    assert_equal(dict(checkpoint_tensors(model, folder)), read(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "second")
    assert_equal(dict(checkpoint_tensors(model, folder)), read(tmp_path / "second"))


def test_small_files_have_the_same_tensors(tmp_path: Path) -> None:
    """The tensors of a checkpoint with several files have the names of all its files."""
    model = load(make_family(tmp_path / "one", "mixtral", seed=1))
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert_equal(dict(checkpoint_tensors(model, tmp_path / "many")), read(tmp_path / "many"))


def test_a_tied_weight_that_the_checkpoint_stores_twice_is_yielded_twice(tmp_path: Path) -> None:
    """A tied weight is yielded under both names if the checkpoint stores both."""
    from safetensors.torch import save_file

    folder = make_family(tmp_path, "qwen2-tied", seed=1)
    tensors = read(folder)
    model = load(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert_equal(dict(checkpoint_tensors(model, folder)), tensors)
    assert "lm_head.weight" not in dict(checkpoint_tensors(model))


def test_another_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    """A model that does not fit the checkpoint is rejected with the first differing name."""
    model = load(make_family(tmp_path / "llama", "llama", seed=1))
    gpt2 = make_family(tmp_path / "gpt2", "gpt2", seed=1)
    with pytest.raises(CheckpointMismatch, match=r"the model has lm_head\.weight, which is not in"):
        dict(checkpoint_tensors(model, gpt2))
    with pytest.raises(CheckpointMismatch, match="has no safetensors files"):
        dict(checkpoint_tensors(model, tmp_path))


def test_weights_on_the_meta_device_are_rejected_by_name(tmp_path: Path) -> None:
    """A model on the meta device is rejected, because its weights have no content."""
    model = load(make_family(tmp_path, "llama", seed=1)).to("meta")
    with pytest.raises(CheckpointMismatch, match=r"model\.embed_tokens\.weight is a slice, or not in"):
        dict(checkpoint_tensors(model))
