"""After an update, models of many families compute as transformers does with the new checkpoint, or the load fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbus.schemas.errors import ControlCode
from tests.engine.family_updates import FAULTS
from tests.support.tiny_families import FAMILIES, HALF

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
TOLERANCE = 2e-4
"""The tolerance of log probabilities in float32."""
HALF_TOLERANCE = 0.1
"""The tolerance of log probabilities in bfloat16."""


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of `family_updates`, and vLLM's log under `log`."""
    folder = tmp_path_factory.mktemp("families")
    command = [sys.executable, "-m", "tests.engine.family_updates", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results | {"log": done.stdout + done.stderr}


@pytest.mark.proves("P20")
@pytest.mark.parametrize("family", [*FAMILIES, "adapters"])
def test_updated_model_equals_transformers(updates: dict[str, Any], family: str) -> None:
    """After new weights are loaded, each family computes with them, and each of its modules was compared."""
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
    ("family", "fault"), [(family, fault) for family, faults in FAULTS.items() for fault in faults]
)
def test_a_planted_fault_is_found(updates: dict[str, Any], family: str, fault: str) -> None:
    """If a module does not compute with its new weights, the load fails and names it. A correct load repairs it."""
    answer = updates[family]["faults"][fault]
    _, module = FAULTS[family][fault]

    assert answer["code"] == ControlCode.HALF_WRITTEN
    assert module in answer["error"]
    assert updates[family]["faults"]["repaired"]["updated"] < (HALF_TOLERANCE if family in HALF else TOLERANCE)


def test_names_of_parameters_do_not_flood_the_log(updates: dict[str, Any]) -> None:
    """An update does not log vLLM's list of parameters that vLLM does not know to be loaded."""
    assert "WARNING" in updates["log"]
    assert "weights were not loaded" not in updates["log"]
