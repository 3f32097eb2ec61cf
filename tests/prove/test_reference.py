"""The reference's forward passes of transformers."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch import nn

from rollbus.schemas.reference import ReferenceJob, ReferenceResult, ReferenceSequence, decode, encode
from rollbus.trainer import reference
from rollbus.trainer.replay import find_routers
from tests.engine.tiny_families import make_family

pytestmark = pytest.mark.slow


def test_layer_by_layer_computes_what_a_whole_model_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer goes to the device for its own computation and back, with and without replay. No score differs."""
    folder = make_family(tmp_path / "olmoe", "olmoe", seed=0)
    rows = np.tile(np.array([[0, 1], [5, 2]], "i4"), (39, 1, 1))
    sequence = ReferenceSequence(token_ids=np.arange(3, 43, dtype="i4"), rows=rows)
    model, _ = reference.load(str(folder), "float32", is_needed=True)
    routers = find_routers(model)
    whole = reference.score(model, sequence, routers, [0, 1], rounds=True)
    moves: list[tuple[object, str]] = []
    move = nn.Module.to

    def note_move(module: nn.Module, device: str) -> nn.Module:
        moves.append((module, device))
        return move(module, "cpu")

    # Without a GPU, the layers only seem to move.
    monkeypatch.setattr(nn.Module, "to", note_move)
    reference.offload(model, "cpu:0")
    layered = reference.score(model, sequence, routers, [0, 1], rounds=True)

    first, second = model.model.layers
    assert moves == [(first, "cpu:0"), (first, "cpu"), (second, "cpu:0"), (second, "cpu")] * 4
    for name, array in msgspec.structs.asdict(whole).items():
        np.testing.assert_array_equal(getattr(layered, name), array, name)


def test_rows_that_do_not_fit_are_told_apart_from_an_unknown_router(tmp_path: Path) -> None:
    """Rows of another number of experts do not cost the log probabilities, and the result says what does not fit."""
    folder = make_family(tmp_path / "olmoe", "olmoe", seed=0)
    sequence = ReferenceSequence(token_ids=np.arange(3, 43, dtype="i4"), rows=np.zeros((39, 2, 1), "i4"))
    job = ReferenceJob(folder=str(folder), dtypes=["float32"], sequences=[sequence], seconds=1.0)
    (tmp_path / "job").write_bytes(encode(job))
    reference.main(tmp_path / "job", tmp_path / "result")
    result = decode((tmp_path / "result").read_bytes(), ReferenceResult)
    assert result.misfit == "rows have 1 experts a layer; the model's top_k is 2"
    [scores] = result.passes[0].sequences
    assert scores.logprobs.shape == (39,)
    assert scores.misses is None
