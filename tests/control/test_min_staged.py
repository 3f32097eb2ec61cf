"""Updates that switch as soon as some workers have staged the weights."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import rollbus
from rollbus.frontend.cli.exits import ExitCode, exit_code_of_ledger
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import WeightSource
from rollbus.workers.sources.sources import WeightSources
from tests.support.checkpoints import write_checkpoint
from tests.support.fleet import synthetic_worker, until_state


class OneAtOnce:
    """A store that serves the first worker immediately, and other workers only after `gate` is set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.gate = asyncio.Event()
        self._first: WeightSources | None = None

    async def checkpoint(self, sources: WeightSources, report: Callable[[str], None]) -> Path:
        """Return the folder as `WeightSources.checkpoint` does."""
        report("fetching")
        self._first = self._first or sources
        if sources is not self._first:
            await self.gate.wait()
        return self._folder


async def test_an_update_with_min_staged_waits_only_for_that_number_of_workers(
    nats_url: str, fleet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update with `min_staged` waits only for that number of workers.

    The other workers serve nothing after the record, are in the ledger as not awaited, and load the weights later.
    """
    store = OneAtOnce(write_checkpoint(tmp_path / "2", fill=2))

    async def checkpoint(self: WeightSources, _source: WeightSource, report: Callable[[str], None]) -> Path:
        return await store.checkpoint(self, report)

    monkeypatch.setattr(WeightSources, "checkpoint", checkpoint)
    async with (
        synthetic_worker(nats_url, fleet, worker_id="a", weight_version=1),
        synthetic_worker(nats_url, fleet, worker_id="b", weight_version=1),
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(2)
        with pytest.raises(InvalidRequest, match="min_staged"):
            await rb.fleet.update_weights(objects="bucket/2", version=2, min_staged=3)
        assert {worker.weight_version for worker in (await rb.fleet.state()).workers} == {1}
        ledger = await rb.fleet.update_weights(objects="bucket/2", version=2, min_staged=1)

        [staged] = ledger.applied
        [behind] = ledger.not_awaited
        assert ledger.is_complete
        assert exit_code_of_ledger(ledger) is ExitCode.OK
        assert {staged, behind} == {"a", "b"}
        assert behind in (ledger.late | ledger.missing)
        timing = ledger.applied[staged].timing
        assert ledger.paused_s == pytest.approx(timing.paused_s, abs=0.001)
        state = await until_state(
            rb, lambda state: {worker.worker: worker.staging is not None for worker in state.workers}[behind]
        )
        told = {worker.worker: worker for worker in state.workers}
        assert (told[behind].state, told[behind].weight_version) == (WorkerState.UPDATING, 1)
        assert (told[staged].state, told[staged].weight_version) == (WorkerState.SERVING, 2)

        store.gate.set()
        await rb.fleet.wait_for_workers(2)
        assert {worker.weight_version for worker in (await rb.fleet.state()).workers} == {2}
