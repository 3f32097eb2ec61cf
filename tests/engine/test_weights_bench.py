"""`bench.weights` measures what it says: its trainer changes as much as a real one, and saves checkpoints."""

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

from bench.weights_trainer import FILE, INIT_STD, MEASURED, Trainer

NEAR = 0.15
"""Of the measured share: it is that of one run, rounded to a tenth of a percent."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with half a million random weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(512, 1024).normal_(0, INIT_STD, generator=generator).bfloat16()
    save_file({"weights": weights, "norm": torch.ones(64, dtype=torch.bfloat16)}, folder / FILE)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("rate", list(MEASURED))
def test_as_much_changes_as_with_a_real_model(rate: float, checkpoint: Path) -> None:
    """In each step, that was measured, the share of elements."""
    trainer = Trainer(checkpoint, rate=rate)
    shares = {step: trainer.step() for step in range(1, 25)}

    assert {step: shares[step] for step in MEASURED[rate]} == {
        step: pytest.approx(share, rel=NEAR) for step, share in MEASURED[rate].items()
    }


def test_what_changes_is_what_is_saved(checkpoint: Path, tmp_path: Path) -> None:
    """A saved checkpoint has the tensors of the trainer, and the other files of the one before."""
    trainer = Trainer(checkpoint, rate=3e-6)
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    share = trainer.step()
    folder = trainer.save(tmp_path / "saved")
    saved = load_file(folder / FILE)

    assert (folder / "config.json").read_text() == "{}"
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], trainer.tensors[name]) for name in saved)
    num_changed = sum(int((saved[name] != before[name]).sum()) for name in saved)
    assert share == pytest.approx(100 * num_changed / (512 * 1024 + 64))
