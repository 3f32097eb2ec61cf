"""A transfer of weights ends without its owner: the workers load the desired weights again and serve."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from unittest.mock import patch

import pytest

import rollbus
from rollbus import FleetState
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.presence import WorkerState
from tests.control.support import MODEL, ask, assert_same, folders, serving
from tests.support.fleet import all_serve, synthetic_worker, until_state, until_worker
from tests.support.requests import start_stream

CHUNK = {"seed": 9}


async def refused(work: Awaitable[object]) -> ControlCode:
    """Return the code of the error of all workers, or of the controller, with which a command fails."""
    try:
        await work
    except ControlError as error:
        return error.code
    except rollbus.CommandIncomplete as error:
        codes = {ack.error.code for ack in error.ledger.failed.values() if ack.error is not None}
        assert len(codes) == 1
        return codes.pop()
    raise AssertionError("the command was applied")


@contextlib.asynccontextmanager
async def two_workers(nats_url: str, fleet: str, root: Path, **fields: object) -> AsyncIterator[rollbus.Client]:
    """Run two workers with weights of version 1, and a client."""
    one, _ = folders(root)
    own = {"model_path": str(one), "weight_roots": (str(root),), "weight_version": 1, "cache_dir": str(root / "c")}
    async with contextlib.AsyncExitStack() as stack:
        for name in ("w0", "w1"):
            worker = synthetic_worker(nats_url, fleet, model=MODEL, worker_id=name, **own, **fields)  # type: ignore[arg-type]
            await stack.enter_async_context(worker)
        rb = await stack.enter_async_context(rollbus.connect(nats_url, fleet=fleet, client="observer"))
        await rb.fleet.wait_for_workers(2)
        yield rb


def is_open(state: FleetState) -> bool:
    """Return True if a transfer is open on all workers."""
    return all(worker.transfer is not None for worker in state.workers)


def is_stranded(state: FleetState) -> bool:
    """Return True if all workers wait for weights."""
    return {worker.state for worker in state.workers} == {WorkerState.WAITING_FOR_WEIGHTS}


async def test_a_transfer_of_a_lost_client_ends(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """After the loss of its owner, the workers load the desired weights and complete the requests that they held.

    Until then, each worker announces the transfer, its owner and its age. The weights are those of the last update.
    """
    with patch("rollbus.bus.protocol.fleet.leases.OWNER_LOST_S", 2.0):
        async with two_workers(nats_url, fleet, tmp_path) as rb, asyncio.TaskGroup() as tasks:
            await rb.fleet.update_weights(tmp_path / "two", version=2)
            expected = await rb.complete(ask())
            stream = await start_stream(tasks, rb, ask(max_tokens=2_000))
            async with rollbus.connect(nats_url, fleet=fleet, client="trainer") as trainer:
                started = await trainer.fleet.start_weight_update()
                await trainer.fleet.update_weight_chunk(CHUNK)
                state = await until_state(rb, is_open)
            await until_state(rb, all_serve)
            served = await rb.complete(ask())
            await stream.reading
            late = await refused(rb.fleet.finish_weight_update(3))
        assert {worker.transfer.by for worker in state.workers if worker.transfer} == {"trainer"}
        assert {worker.transfer.id for worker in state.workers if worker.transfer} == {started.id}
        assert_same(expected, served)
        assert {*served.weight_versions.tolist(), *stream.versions} == {2}
        assert late is ControlCode.TRANSFER_EXPIRED


async def test_a_silent_transfer_ends_and_transferred_weights_cannot_come_back(
    nats_url: str, fleet: str, tmp_path: Path
) -> None:
    """A live owner that sends nothing for the idle limit loses its transfer.

    The desired weights came by a transfer themselves, so the workers wait for the next update.
    """
    async with two_workers(nats_url, fleet, tmp_path, transfer_idle_s=1.0) as rb:
        await rb.fleet.start_weight_update()
        await rb.fleet.update_weight_chunk(CHUNK)
        await rb.fleet.finish_weight_update(2)
        await rb.fleet.start_weight_update()
        state = await until_state(rb, is_stranded)
        late = await refused(rb.fleet.update_weight_chunk(CHUNK))
        await rb.fleet.update_weights(tmp_path / "two", version=3)
        await until_state(rb, all_serve)
    assert late is ControlCode.TRANSFER_EXPIRED
    assert all("sent no command for 1 s" in str(worker.last_error) for worker in state.workers)
    assert all("cannot be loaded again" in str(worker.last_error) for worker in state.workers)


async def test_a_worker_that_missed_the_chunks_waits_for_weights(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A finish is partial if one worker received nothing: the others use the weights, and it waits for an update."""
    async with two_workers(nats_url, fleet, tmp_path) as rb:
        await rb.fleet.start_weight_update()
        await rb.fleet.update_weight_chunk(CHUNK, workers=["w0"])
        with pytest.raises(rollbus.CommandIncomplete) as caught:
            await rb.fleet.finish_weight_update(2)
        await until_worker(rb, "w1", lambda worker: worker.state is WorkerState.WAITING_FOR_WEIGHTS)
        await until_worker(rb, "w0", lambda worker: worker.state is WorkerState.SERVING)
    assert list(caught.value.ledger.applied) == ["w0"]


async def test_an_engine_that_waits_for_a_lost_peer_is_replaced(nats_url: str, fleet: str, tmp_path: Path) -> None:
    """A transfer call that never returns, as NCCL without its peer, ends with the process of the engine.

    The requests that it held complete on another worker, and none is suspected to have killed the engine.
    """
    one, _ = folders(tmp_path)
    faults = {"transfer_hangs": True}
    async with (
        serving(nats_url, fleet, one, 2, step_s=0.002, faults=faults) as (rb, processes),
        asyncio.TaskGroup() as tasks,
    ):
        streams = [await start_stream(tasks, rb, ask(i, max_tokens=1_000)) for i in range(4)]
        await rb.fleet.start_weight_update(workers=["w0"])
        with pytest.raises(rollbus.CommandIncomplete, match=r"not done within 0\.5 s"):
            await rb.fleet.update_weight_chunk(CHUNK, workers=["w0"], timeout_s=0.5)
        for stream in streams:
            await stream.reading
        code = await processes[0].wait()
        loads = [(await rb.complete(ask(i))).worker_ids for i in range(2)]
    assert code != 0
    assert set(loads) == {("w1",)}
    assert all(len(stream.versions) == 1_000 for stream in streams)
