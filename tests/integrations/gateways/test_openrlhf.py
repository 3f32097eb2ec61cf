"""OpenRLHF 0.11.2 from PyPI, unchanged: its agent executors and the conversion to experiences, on two vLLM workers.

Its trainer needs CUDA, and has no remote engine: examples/openrlhf_agent.py is the agent function of a user.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbus.workers.engines.vllm.tiny_moe import SPECIAL_TOKENS, TURN_END
from tests.http.support import http_before
from tests.integrations.gateways.conftest import LogProbs, run_disturbed
from tests.integrations.support import ROOT, needs
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs("gateways")]

PROGRAM = Path(__file__).parent / "programs/openrlhf_agent.py"
SEEDS = (21, 22, 23)
STOPS = range(10, 40)
"""Many stop ids keep the turns of a random model short: the executor asks for all of the rest in each turn."""
END = SPECIAL_TOKENS.index(TURN_END)
TOLERANCE = 1e-3
"""Largest difference of float32 log probabilities of vLLM and of Hugging Face."""


def check(logprobs: LogProbs, checkpoints: tuple[Path, Path], made: dict[str, Any], versions: list[int]) -> None:
    """Assert that each sampled token has the log probability that the checkpoint of its version gives it.

    OpenRLHF samples with `min_tokens=1`: the first token of a turn has its probability among those that do not stop.
    Tokens after an update in the middle of a turn are left out: they attend to KV of the old weights (P17).
    """
    mask = np.array(made["mask"], bool)
    firsts = mask & ~np.append(False, mask[:-1])
    given = np.array(made["logprobs"])[mask]
    turns = np.cumsum(firsts)[mask]
    assert len(versions) == len(given) == len(turns)
    began = dict(reversed(list(zip(turns, versions, strict=True))))
    for version in set(versions):
        expected = logprobs(checkpoints[version], made["token_ids"], firsts, (*STOPS, END))[mask]
        of_version = (np.array(versions) == version) & [began[turn] == version for turn in turns]
        np.testing.assert_allclose(given[of_version], expected[of_version], atol=TOLERANCE)


async def test_openrlhf_executors_sample_from_a_fleet_that_loses_a_worker_and_gets_weights(
    nats_url: str, workers: RealWorkers, callers: tuple[Path, Path], logprobs: LogProbs, tmp_path: Path
) -> None:
    """Single turns and conversations become experiences whose log probabilities are those of each token's weights."""
    await workers.have(2)
    agent = ROOT / "examples/openrlhf_agent.py"
    settings = {"agent": str(agent), "seeds": SEEDS, "stops": list(STOPS), "gate": str(tmp_path / "go")}
    async with http_before(nats_url, workers.fleet) as http:
        seen = await run_disturbed(PROGRAM, http, workers, callers, settings, after=("first", len(SEEDS)))

    for made in seen["single"]:
        check(logprobs, callers, made, [0] * sum(made["mask"]))
    for made, versions in zip(seen["multi"], seen["versions"], strict=True):
        check(logprobs, callers, made, versions)
        assert set(versions) == {0, 1}
