"""Known models on a server with users: who may read, make and forget them."""

from pathlib import Path

import pytest

import rollbus
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.control.updates import provision
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Pause
from rollbus.schemas.errors import InvalidRequest, PermissionDenied
from tests.auth.support import FLEET, MODEL, guarded
from tests.support.fleet import synthetic_worker
from tests.support.requests import greedy


async def test_a_trainer_without_a_model_reads_the_known_models(tmp_path: Path) -> None:
    """A trainer that names no model gets the list of the models that an admin has made, and cannot forget one.

    The worker writes no state. Its server denies nothing, so nothing was tried.
    """
    async with guarded(tmp_path) as guard:
        worker = synthetic_worker(guard.url, FLEET, model=MODEL, worker_id="w0", credentials=guard.credentials("w0"))
        async with worker, rollbus.connect(guard.login("alice")) as rb, rollbus.connect(guard.login("boss")) as admin:
            await rb.fleet.wait_for_workers()
            assert await rb.fleet.known_models() == (MODEL,)
            assert (await rb.complete(greedy(1, 2))).model == MODEL
            await provision(guard.login("boss"), FLEET, ["other"])
            assert (await rb.complete(greedy(1, 2))).model == MODEL
            async with rollbus.connect(guard.login("bob")) as late:
                with pytest.raises(InvalidRequest, match=f"one of {MODEL}, other"):
                    await late.complete(greedy(1, 2))
                assert guard.violations() == []
                with pytest.raises(PermissionDenied):
                    await late.fleet.forget_model("other")
                assert await admin.fleet.forget_model("other")
                assert (await late.complete(greedy(1, 2))).model == MODEL


async def test_a_model_that_was_forgotten_can_come_back(tmp_path: Path) -> None:
    """If a forgotten model is made again, programs that remember its signed states accept its new commands."""
    async with guarded(tmp_path) as guard, guard.connected("boss") as boss, guard.connected("front") as front:
        store, remembers = DesiredStore(boss, Subjects(FLEET)), DesiredStore(front, Subjects(FLEET))
        for number in range(5):
            await store.record(MODEL, Pause(id=f"p{number}"))
        before = await remembers.read(MODEL)
        await store.forget(MODEL)
        await provision(guard.login("boss"), FLEET, [MODEL])
        first = await remembers.read(MODEL)
        await store.record(MODEL, Pause(id="later"))
        after = await remembers.read(MODEL)

    assert (before.epoch >= 5, first.is_first, first.bucket != before.bucket) == (True, True, True)
    assert (after.epoch, after.registers["pause"].command.id, remembers.refused) == (first.epoch + 1, "later", 0)
