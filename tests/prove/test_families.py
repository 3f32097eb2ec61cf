"""Five families on a real vLLM: faults put in on purpose are found and named, and sound models are not `wrong`.

`make test-prove` runs these tests. They take half an hour, so `make test` skips them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.routing,
    pytest.mark.skipif("ROLLBUS_TEST_PROVE" not in os.environ, reason="takes half an hour; make test-prove runs it"),
]

FAMILIES = ("llama-tied-biases", "mixtral", "olmoe", "qwen3_moe-padded", "deepseek_v3")
SEEDS = range(20)
NAMED: dict[str, tuple[str, ...]] = {
    "scaled-expert": ("expert 1 of layer",),
    "stale-layer": ("stale or wrong weights at layer 1", "stale weights"),
    "stale-head": ("head",),
    "bf16-routers": ("dtype of the router",),
    "top-p": ("top-p is left on",),
    "top-p-processed": ("processed_logprobs",),
    "penalty": ("a repetition",),
    "bias": ("a logit bias on token 77",),
    "seed": ("one seed for all requests",),
    "stale-kv": ("stale KV",),
}
"""Words of the causes, one of which names the fault."""
OF_EXPERTS = ("scaled-expert", "bf16-routers")
CANNOT_HAVE = {"llama-tied-biases": OF_EXPERTS, "deepseek_v3": ("stale-kv",)}
"""Faults by family that cannot be put in: vLLM has no prefix cache for latent attention on a CPU."""


def run_cases(folder: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Run the cases in one process without pytest, and return their outcomes."""
    command = [sys.executable, "-m", "tests.prove.in_process", str(folder), *cases]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


def causes_of(outcome: dict[str, Any]) -> str:
    """Return the causes of both stages as one text."""
    found = [finding.get("causes", ()) for stage in outcome.values() for finding in stage["findings"]]
    return " | ".join(cause for causes in found for cause in causes)


@pytest.mark.parametrize("family", FAMILIES)
def test_faults_are_found_and_named(family: str, tmp_path: Path) -> None:
    """Each fault is `wrong`, and its cause is named."""
    faults = [fault for fault in NAMED if fault not in CANNOT_HAVE.get(family, ())]

    outcomes = run_cases(tmp_path, [f"{family}:{fault}:0" for fault in faults])

    found = {case.split(":")[1]: (verdicts_of(outcome), causes_of(outcome)) for case, outcome in outcomes.items()}
    missed = {name: each for name, each in found.items() if "wrong" not in each[0] or not is_named(name, each[1])}
    assert missed == {}


def verdicts_of(outcome: dict[str, Any]) -> list[str]:
    """Return the verdicts of the stages."""
    return [stage["verdict"] for stage in outcome.values()]


def is_named(fault: str, causes: str) -> bool:
    """Return True if the causes name the fault."""
    return any(words in causes for words in NAMED[fault])


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_models_are_not_wrong(family: str, tmp_path: Path) -> None:
    """No stage of twenty sound models is `wrong`."""
    outcomes = run_cases(tmp_path, [f"{family}:none:{seed}" for seed in SEEDS])
    assert {case: outcome for case, outcome in outcomes.items() if "wrong" in verdicts_of(outcome)} == {}
