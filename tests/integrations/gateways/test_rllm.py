"""rllm-model-gateway 0.1.0 from PyPI, unchanged, before the HTTP service with two vLLM workers.

Its release has no cumulative mode: the test's agent sends the calls of that mode through the gateway.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.http.support import http_before
from tests.integrations.gateways.conftest import LogProbs, run_disturbed
from tests.integrations.support import needs
from tests.support.real_fleet import RealWorkers

pytestmark = [pytest.mark.vllm, pytest.mark.slow, needs("gateways")]

PROGRAM = Path(__file__).parent / "programs/rllm_agent.py"
SESSIONS = 4
TOLERANCE = 1e-3
"""Largest difference of float32 log probabilities of vLLM and of Hugging Face."""


def logprobs_of(trace: dict[str, Any]) -> list[float] | None:
    """Return the log probabilities of a trace. The gateway reads only those of chats, but stores whole answers."""
    values: list[float] | None = trace["logprobs"]
    if not values and trace["raw_response"] is not None:
        values = trace["raw_response"]["choices"][0]["logprobs"]["token_logprobs"]
    return values or None


async def test_traces_are_what_the_engine_sampled_through_a_killed_worker_and_new_weights(
    nats_url: str, workers: RealWorkers, callers: tuple[Path, Path], logprobs: LogProbs, tmp_path: Path
) -> None:
    """The tokens of each turn continue those of the turn before, and have the log probabilities of their weights.

    Half of the sessions are streamed. After the first turn, one worker is killed and the other gets new weights.
    """
    await workers.have(2)
    settings = {"model": "caller-0", "sessions": SESSIONS, "gate": str(tmp_path / "go")}
    async with http_before(nats_url, workers.fleet) as http:
        seen = await run_disturbed(PROGRAM, http, workers, callers, settings, after=("second", SESSIONS))

    for name, traces in seen.items():
        sequence: list[int] = []
        for turn, trace in enumerate(traces):
            prompt = trace["prompt_token_ids"] or trace["raw_request"]["prompt"]
            ids = trace["completion_token_ids"]
            assert 0 < len(ids) <= 24
            assert prompt[: len(sequence)] == sequence, (name, turn)
            sequence = [*prompt, *ids]
            given = logprobs_of(trace)
            # The release drops the log probabilities of streamed completions.
            assert (given is None) == (turn > 0 and name in ("s1", "s3"))
            if given is None or turn == 1:
                continue  # the second turn may have tokens of both versions
            expected = logprobs(callers[int(turn >= 2)], sequence)[len(prompt) - 1 :]
            np.testing.assert_allclose(given, expected, atol=TOLERANCE)
        assert len(traces) == 4
