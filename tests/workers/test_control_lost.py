"""A desired state that cannot be read, is deleted, or names deleted files."""

import asyncio

import pytest

from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.fleet import desired
from rollbus.schemas.acks import AckStatus
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.presence import WorkerState
from rollbus.workers.control import desired as desired_reader
from rollbus.workers.control import reconciler
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import MODEL, HandClient, hand_client
from tests.support.hand_control import HandController, hand_controller
from tests.support.requests import short
from tests.support.waits import SOON_S, until_true
from tests.workers.support import SLOW, StartControlled, StartHeard, controlled_worker

pytestmark = pytest.mark.slow


async def write_garbage_state(client: HandClient, boss: HandController) -> None:
    """Write a value that is no desired state into the key."""
    await client.nats.jetstream().publish(boss.store.subject(MODEL), b'{"model": 7}')


async def test_a_serving_worker_continues_if_the_desired_state_is_garbage(controlled_worker: StartControlled) -> None:
    """If the desired state is garbage, a worker continues to serve, reports the problem and rejects commands.

    After a reset, commands work again.
    """
    async with controlled_worker() as (client, boss, *_):
        epoch = (await boss.applied("resume")).epoch
        await write_garbage_state(client, boss)
        raw = await boss.do("pause", timeout_s=5)
        recorded = await boss.do("pause", epoch=(epoch or 0) + 1, timeout_s=0.2)
        await client.complete(short("r"))
        await client.until(lambda: "a reset clears it" in str(client.presences["w"].last_error))
        await boss.store.reset(MODEL)
        paused = await boss.applied("pause")
        await client.until_state("w", WorkerState.PAUSED)

        assert [(ack.status, ack.error and ack.error.code) for ack in (raw, recorded)] == [
            (AckStatus.FAILED, ControlCode.STORAGE),
            (AckStatus.FAILED, ControlCode.TIMEOUT),
        ]
        assert "a reset clears it" in raw.error.message
        assert (paused.epoch or 0) > (epoch or 0)
        assert client.presences["w"].last_error is None


async def test_a_worker_that_starts_on_a_garbage_desired_state_waits_for_a_reset(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that starts on a garbage desired state reports the problem, waits, and serves after a reset."""
    monkeypatch.setattr(reconciler, "FIRST_READ_S", 0.2)
    async with hand_client(nats_url, fleet) as client, hand_controller(nats_url, fleet) as boss:
        await boss.record("resume")
        await write_garbage_state(client, boss)
        async with synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW) as (worker, _):
            await client.until_state("w", WorkerState.UPDATING)
            await client.until(lambda: client.presences["w"].last_error is not None)
            assert client.presences["w"].state is WorkerState.UPDATING
            assert worker.stats().puller.handed_over == 0
            await boss.store.reset(MODEL)
            await client.complete(short("r"))


async def test_a_fenced_worker_may_read_the_desired_state_before_its_lease_is_confirmed(
    heard_worker: StartHeard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fenced worker may read the desired state before its presence is confirmed.

    It then serves with that state, without another read.
    """
    gate = asyncio.Event()
    async with heard_worker() as (client, worker, _):
        confirm = worker._nats.confirm

        async def late(*, timeout_s: float) -> bool:
            await gate.wait()
            return await confirm(timeout_s=timeout_s)

        monkeypatch.setattr(desired_reader, "READ_S", 3600.0)
        monkeypatch.setattr(worker._nats, "confirm", late)
        worker._lifecycle.fence("for the test")
        reader = worker._control.reader
        await until_true(lambda: reader.is_fresh)
        assert worker.presence().state is WorkerState.FENCED
        num_read = reader.num_read
        client.presences.clear()
        gate.set()
        async with asyncio.timeout(SOON_S):
            await client.until_serving("w")

        assert reader.num_read == num_read


async def test_after_a_lost_bucket_a_command_with_a_repeated_epoch_is_applied(fleet: str) -> None:
    """A command with the epoch of another command is applied if the bucket was lost between them."""
    async with EmbeddedServer() as server, controlled_worker(server.url, fleet) as (client, boss, *_):
        await boss.applied("pause")
        await client.until_state("w", WorkerState.PAUSED)
        await client.nats.jetstream().delete_stream("KV_rollbus")
        resumed = await boss.applied("resume")
        await client.until_state("w", WorkerState.SERVING)

        assert resumed.epoch == 1


async def test_a_command_that_was_lost_with_the_store_fails_soon(fleet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that was lost with the store fails soon, so its controller does not wait for the command's timeout.

    That timeout may be ten minutes.
    """
    monkeypatch.setattr(desired, "STALE_S", 0.1)
    async with EmbeddedServer() as server, controlled_worker(server.url, fleet) as (client, boss, *_):
        await boss.applied("resume")
        await client.nats.jetstream().delete_stream("KV_rollbus")
        lost = await boss.do("pause", epoch=2, timeout_s=600)
        paused = await boss.applied("pause")
        await client.until_state("w", WorkerState.PAUSED)

    assert (lost.status, lost.error and lost.error.code) == (AckStatus.FAILED, ControlCode.STORAGE)
    assert "has lost the desired state" in str(lost.error)
    assert paused.epoch == 1
