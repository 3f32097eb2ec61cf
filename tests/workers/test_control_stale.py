"""Reads that are older than the last read of a worker, for example from a deposed leader."""

import asyncio
from collections.abc import Callable

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.schemas.control import DesiredState
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control import desired as desired_reader
from rollbus.workers.worker import Worker
from tests.support.hand_client import MODEL
from tests.support.hand_control import HandController
from tests.workers.support import StartControlled

Doctor = Callable[[DesiredState | None], None]


def doctored(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return a function that makes the worker read a given state, and shorten the delay between reads."""
    store: DesiredStore = worker._control.reader.store

    def answer(state: DesiredState | None) -> None:
        async def read(_model: str) -> DesiredState | None:
            await asyncio.sleep(0)
            return state

        monkeypatch.setattr(store, "read", read)
        worker._control.reader.request_read()

    monkeypatch.setattr(desired_reader, "RETRY_S", 0.01)
    return answer


async def paused_after_resume(boss: HandController) -> DesiredState:
    """Resume and then pause the worker, and return the desired state of the resume."""
    await boss.applied("resume")
    before = await boss.store.read(MODEL)
    assert before is not None
    await boss.applied("pause")
    return before


@pytest.mark.parametrize("is_missing", [False, True])
async def test_a_stale_read_changes_nothing(
    controlled_worker: StartControlled, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    """After a stale read, a paused worker stays paused, reports the problem, and continues with the next valid read."""
    async with controlled_worker() as (client, boss, worker, _):
        before = await paused_after_resume(boss)
        await client.until_state("w", WorkerState.PAUSED)
        with monkeypatch.context() as patches:
            doctored(worker, patches)(None if is_missing else before)
            await client.until(lambda: "behind its cluster" in str(client.presences["w"].last_error))
            assert client.presences["w"].state is WorkerState.PAUSED
        paused = worker._control.reconciler.outcome_of("pause", 2)
        await boss.applied("resume")
        await client.until_serving("w")

        assert paused is not None
        assert client.presences["w"].last_error is None
