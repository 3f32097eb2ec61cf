"""Workers that are killed during an update: no part of the update remains, and they load the recorded weights."""

import asyncio
from pathlib import Path
from typing import Any

from rollbus.schemas.acks import Ack
from rollbus.schemas.presence import WorkerState
from tests.control.support import ask, assert_same, folders, serving, start, write_checkpoint
from tests.support.fleet import until_worker
from tests.support.requests import incomplete

SHAPE = (512, 512)
"""The shape of tensors of a megabyte: a worker that fetches 0.1 MB a second needs a long time for them."""


async def test_a_worker_killed_between_load_and_canary_loads_the_recorded_weights(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that is killed during a load, when its engine has lost the old weights, restarts on its own checkpoint.

    It then loads the recorded weights.
    """
    one, two = folders(tmp_path)
    hangs: dict[str, Any] = {"faults": {"load": "hangs", "good_loads": 1}}  # the first load is that of the start
    loading = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_ack(ack: Ack) -> None:
        if ack.stage == "loading":
            loop.call_soon_threadsafe(loading.set)

    async with serving(nats_url, fleet, one, 1, **hangs) as (rb, [process]), asyncio.TaskGroup() as tasks:
        update = tasks.create_task(incomplete(rb.fleet.update_weights(two, version=2, on_ack=on_ack)))
        await loading.wait()
        process.kill()
        error = await update
        async with start(nats_url, fleet, "w0", one):
            again = await until_worker(rb, "w0", WorkerState.SERVING)
            result = await rb.complete(ask())
            async with start(nats_url, fleet, "w1", two, "--weight-version", "2"):
                await rb.fleet.wait_for_workers(2)
                await rb.fleet.drain(["w0"])
                fresh = await rb.complete(ask())

    assert list(error.ledger.missing) == ["w0"]
    assert again.weight_version == 2
    assert {*result.weight_versions.tolist()} == {2}
    assert_same(result, fresh)


async def test_a_worker_killed_during_staging_stages_the_rest_after_its_restart(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A worker that has not staged the recorded weights serves nothing.

    If it is killed and restarted, it stages the rest and switches before it serves.
    """
    one = write_checkpoint(tmp_path / "root" / "one", seed=1, shape=SHAPE)
    two = write_checkpoint(tmp_path / "root" / "two", seed=2, shape=SHAPE)
    own_cache = ("--cache-dir", str(tmp_path / "other-machine"))
    async with serving(nats_url, fleet, one, 1) as (rb, _):
        async with start(nats_url, fleet, "w1", one, *own_cache, "--fetch-rate", "100000") as victim:
            await rb.fleet.wait_for_workers(2)
            ledger = await rb.fleet.update_weights(two, version=2, upload=True, min_staged=1)
            behind = await until_worker(
                rb, "w1", lambda worker: worker.staging is not None and worker.staging.done_bytes > 0
            )
            victim.kill()
            await victim.wait()
        async with start(nats_url, fleet, "w1", one, *own_cache):
            again = await until_worker(rb, "w1", WorkerState.SERVING)

    assert (ledger.is_complete, list(ledger.applied), ledger.not_awaited) == (True, ["w0"], ("w1",))
    assert (behind.state, behind.weight_version, behind.free_slots) == (WorkerState.UPDATING, 1, 0)
    assert again.weight_version == 2
    timing = ledger.applied["w0"].timing
    assert timing.fetched_bytes == sum(file.stat().st_size for file in two.iterdir())
    assert (behind.staging.stage, behind.staging.total_bytes) == ("fetching", timing.fetched_bytes)
