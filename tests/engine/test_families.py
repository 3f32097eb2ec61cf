"""Models of many families give, after an update, what transformers give on the new checkpoint; or it fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.errors import ControlCode
from tests.support.tiny_families import FAMILIES, HALF

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-4
"""Of logprobs in float32."""
HALF_TOLERANCE = 0.1
"""Of logprobs in bfloat16."""


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what `family_updates` has seen, and under `log` what vLLM has logged."""
    folder = tmp_path_factory.mktemp("families")
    command = [sys.executable, "-m", "tests.engine.family_updates", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results | {"log": done.stdout + done.stderr}


@pytest.mark.proves("P20")
@pytest.mark.parametrize("family", [*FAMILIES, "adapters"])
def test_updated_model_equals_transformers(updates: dict[str, Any], family: str) -> None:
    """With other weights loaded, each family computes what they give, and each of its modules was compared."""
    seen = updates[family]
    tolerance, different = (HALF_TOLERANCE, 10 * HALF_TOLERANCE) if family in HALF else (TOLERANCE, 100 * TOLERANCE)

    assert seen["started"] < tolerance
    assert seen["updated"] < tolerance
    assert seen["stale"] > different
    assert seen["answer"]["code"] is None
    assert seen["answer"]["probed"] >= 9
    assert seen["answer"]["unprobed"] == []


@pytest.mark.proves("P20")
@pytest.mark.parametrize(
    ("family", "breakage", "module"),
    [
        ("llama-tied-biases", "keeps packed", "model.layers.1.self_attn.o_proj"),
        ("llama-tied-biases", "keeps head", "lm_head"),
        ("qwen3_moe-padded", "keeps packed", "model.layers.1.self_attn.o_proj"),
        ("qwen3_moe-padded", "swaps experts", "model.layers.0.mlp.experts"),
    ],
)
def test_broken_kernel_is_found(updates: dict[str, Any], family: str, breakage: str, module: str) -> None:
    """A module that does not compute with its new weights makes the load fail, by name; a good load puts it right."""
    answer = updates[family]["broken"][breakage]

    assert answer["code"] == ControlCode.HALF_WRITTEN
    assert module in answer["error"]
    assert "differs in" in answer["error"]
    assert updates[family]["broken"]["repaired"]["updated"] < TOLERANCE


def test_names_of_parameters_do_not_flood_the_log(updates: dict[str, Any]) -> None:
    """VLLM's list of parameters of which it does not know that they were loaded is not logged at each update."""
    assert "WARNING" in updates["log"]
    assert "weights were not loaded" not in updates["log"]
