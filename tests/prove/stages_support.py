"""Runs stages of `rollbus prove` on fleets of tests in place of the command's own."""

import argparse
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import rollbus
from rollbus import GenerateRequest, Generation
from rollbus.frontend.cli.prove.stage import Budget, FleetInUse, Proof, Stage, StageRefused, run_phase, use_fleet
from rollbus.frontend.cli.prove.verdicts import Outcome
from rollbus.schemas.chunk import FinishReason

MODEL = "synthetic"
StartFleet = Callable[[Path, int], AbstractAsyncContextManager[tuple[str, str]]]
"""Runs a fleet with this checkpoint and so many workers, and yields the server and the fleet's name."""


@dataclass(slots=True, kw_only=True)
class TestProof(Proof):
    """A run whose own fleets are those of a test."""

    __test__ = False
    start: StartFleet

    @asynccontextmanager
    async def own_fleet(
        self, *, num_workers: int = 1, num_prefill: int = 0, flags: Sequence[str] = ()
    ) -> AsyncIterator[FleetInUse]:
        """Run a fleet of the test."""
        if num_prefill:
            raise StageRefused("it has tests of its own")
        model = Path(flags[flags.index("--model") + 1]) if "--model" in flags else self.folder
        assert model is not None
        async with self.start(model, num_workers) as (server, fleet), use_fleet(server, fleet) as found:
            # The stage may kill a worker that nobody starts again, so it waits for only one.
            yield replace(found, workers=found.workers[:1])


async def run_stages(
    stages: Sequence[Stage],
    start: StartFleet,
    model: Path,
    scratch: Path,
    *,
    num_workers: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Run both phases of the stages on fleets of the test, and return their outcomes.

    Args:
        num_workers: workers of the fleet that the stages share.
        meanwhile: called after that fleet serves.
    """
    args = argparse.Namespace(kv_transfer_config=None, engine_args=None, disruptive=False)
    proof = TestProof(
        args=args, model=MODEL, folder=model, is_own=True, scratch=scratch, budget=Budget(3600.0, ()), start=start
    )
    outcomes: list[Outcome] = []
    async with proof.own_fleet(num_workers=num_workers) as fleet:
        proof.shared, proof.model = fleet, fleet.workers[0].model
        meanwhile()
        for stage in stages:
            assert stage.refusal(proof) is None
            outcome = await run_phase(stage, proof, 1.0, concluding=False)
            assert outcome is not None
            outcomes.append(outcome)
    later = [await run_phase(stage, proof, 1.0, concluding=True) for stage in stages]
    return [one if two is None else one.joined(two) for one, two in zip(outcomes, later, strict=True)]


def found(outcome: Outcome, beginning: str) -> tuple[str, str]:
    """Return the verdict and the text of the only finding whose text begins so."""
    [finding] = [finding for finding in outcome.findings if finding.what.startswith(beginning)]
    return str(finding.verdict), finding.what


def answer(token_ids: Sequence[int], logprobs: Sequence[float] | None = None, rows: Any = None) -> Generation:
    """Return an answer to a prompt of two tokens."""
    request = GenerateRequest(prompt_token_ids=[1, 2])
    return rollbus.Generation(
        request=request,
        request_id=request.request_id,
        child=0,
        prompt_len=2,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([-1.0] * len(token_ids) if logprobs is None else logprobs, np.float32),
        weight_versions=np.zeros(len(token_ids), np.int32),
        routed_experts=rows,
        start=0,
        finish_reason=FinishReason.LENGTH,
    )
