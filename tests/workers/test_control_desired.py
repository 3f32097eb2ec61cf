"""The desired state, and how workers reach it: several workers, late, out of order, and after an absence."""

import contextlib
import os
import signal
from typing import Any

import pytest

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.schemas.acks import AckStatus
from rollbus.schemas.control import AnyCommand, DesiredState
from rollbus.schemas.errors import BusBroken, ControlCode, ErrorCode
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import is_idle, synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_control import hand_controller
from tests.support.hand_worker import GatedEngine, running
from tests.support.requests import endless, short
from tests.support.waits import until_true
from tests.workers.support import SLOW, StartControlled, controlled_worker

pytestmark = pytest.mark.slow


async def test_a_command_without_an_epoch_is_recorded_by_only_one_worker(nats_url: str, fleet: str) -> None:
    """If several workers receive a command without an epoch, only one records it. All ack it with the same epoch."""
    names = ("a", "b", "c", "d")
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        contextlib.AsyncExitStack() as workers,
    ):
        for name in names:
            await workers.enter_async_context(synthetic_worker(nats_url, fleet, worker_id=name))
        await client.until_serving(*names)
        pause = await boss.command("pause")
        await boss.until(lambda: len(boss.finals(pause)) == len(names))
        state = await boss.desired()

        assert {(ack.worker, ack.status, ack.epoch) for ack in boss.finals(pause)} == {
            (name, AckStatus.APPLIED, 1) for name in names
        }
        assert (state.epoch, [seen.id for seen in state.seen]) == (1, [pause])


@pytest.mark.proves("P75")
async def test_a_command_is_stale_if_its_register_was_set_again(controlled_worker: StartControlled) -> None:
    """A command whose register was set again since then is stale in every form, and changes nothing."""
    async with controlled_worker() as (client, boss, *_):
        first = await boss.record("pause", id="late")
        second = await boss.record("resume")
        # Before this, the worker may know only the first command, and would correctly ack it as applied.
        await client.until(lambda: client.presences["w"].epoch == second)
        late = await boss.do("pause", id="late", epoch=first)

        assert (late.status, late.epoch) == (AckStatus.STALE, first)
        assert late.error.code is ControlCode.STALE
        await client.until_state("w", WorkerState.SERVING)


@pytest.mark.proves("P72")
async def test_a_recorded_command_is_applied_without_its_command_message(controlled_worker: StartControlled) -> None:
    """A worker that receives a write to the desired state applies it. The later command message gets its ack."""
    async with controlled_worker() as (client, boss, *_):
        epoch = await boss.record("pause", id="p")
        await client.until_state("w", WorkerState.PAUSED)
        ack = await boss.applied("pause", id="p", epoch=epoch)

        assert client.presences["w"].epoch == ack.epoch == 1


@pytest.mark.proves("P72")
async def test_a_worker_that_starts_during_a_pause_pulls_no_requests(nats_url: str, fleet: str) -> None:
    """A worker that starts during a pause reads the desired state first, and pulls nothing until the resume."""
    async with hand_client(nats_url, fleet) as client, hand_controller(nats_url, fleet) as boss:
        await boss.record("pause")
        await client.enqueue(short("r"))
        async with synthetic_worker(nats_url, fleet, worker_id="w") as (worker, _):
            await client.until_state("w", WorkerState.PAUSED)
            assert worker.stats().puller.handed_over == 0
            assert not client.offers
            await client.until_left(1)
            await boss.applied("resume")
            await client.until_ended("r")


@pytest.mark.proves("P18", "P72")
async def test_commands_recorded_during_a_start_are_applied_before_the_worker_serves(nats_url: str, fleet: str) -> None:
    """A worker applies commands that were recorded during its start before it serves, and acks none of them."""
    engine = GatedEngine("start", config=SLOW)
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        running(nats_url, fleet, engine),
    ):
        await engine.reached["start"].wait()
        heard = await boss.command("pause", id="unheard")
        await boss.record("pause", mode="wait")
        await boss.record("flush_cache")
        engine.gates["start"].set()
        await client.until_state("w", WorkerState.PAUSED)
        # The worker may have read the state before the second command was recorded.
        await client.until(lambda: client.presences["w"].epoch == 2)

        assert boss.acks(heard) == []
        assert (client.presences["w"].state, client.presences["w"].pause_mode) == (WorkerState.PAUSED, "wait")


async def test_a_drained_worker_hands_its_requests_to_another_worker(
    nats_url: str, fleet: str, controlled_worker: StartControlled
) -> None:
    """`drain` ends a worker's streams as retryable immediately, and another worker serves. `resume` reverses it."""
    async with controlled_worker(worker_id="a") as (client, boss, _, engine):
        await client.begin(endless("r"))
        async with synthetic_worker(nats_url, fleet, worker_id="b", config=SLOW):
            await client.until_serving("b")
            await boss.applied("drain", workers=["a"])
            await client.until_ended("r")
            await client.until_state("a", WorkerState.DRAINED)
            await client.complete(short("s"))
            await boss.applied("resume", workers=["a"])
            await client.until_state("a", WorkerState.SERVING)

        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert client.offers[-1][0] == "b"
        await client.complete(short("t"))
        assert is_idle(engine)


async def test_a_command_for_one_worker_holds_for_that_worker_only(nats_url: str, fleet: str) -> None:
    """A command for one worker holds until all workers get the same command, also for its next incarnation."""
    async with hand_client(nats_url, fleet) as client, hand_controller(nats_url, fleet) as boss:
        async with synthetic_worker(nats_url, fleet, worker_id="a"), synthetic_worker(nats_url, fleet, worker_id="b"):
            await client.until_serving("a", "b")
            pause = await boss.command("pause", workers=["a"])
            await boss.final(pause)
            await client.until_state("a", WorkerState.PAUSED)
            await boss.applied("state", workers=["b"])
            assert client.presences["b"].state is WorkerState.SERVING
            assert {ack.worker for ack in boss.acks(pause)} == {"a"}
        async with synthetic_worker(nats_url, fleet, worker_id="a"):
            await client.until(lambda: client.presences["a"].state is WorkerState.STOPPED)
            await client.until_state("a", WorkerState.PAUSED)
            await boss.applied("resume")
            await client.until_state("a", WorkerState.SERVING)


async def test_a_worker_whose_lease_expired_during_a_pause_restarts_paused(fleet: str) -> None:
    """If a lease expires during a pause, the worker discards its requests.

    Its next incarnation reads the pause and pulls nothing.
    """
    async with (
        EmbeddedServer() as server,
        controlled_worker(server.url, fleet, lease_s=2.0) as (client, boss, worker, engine),
    ):
        await client.begin(endless("r"))
        await boss.applied("pause", mode="keep")
        life = worker.presence().incarnation
        os.kill(server.pid, signal.SIGSTOP)
        await until_true(lambda: worker.presence().state is WorkerState.FENCED)
        os.kill(server.pid, signal.SIGCONT)
        await client.until(lambda: client.presences["w"].incarnation != life)
        await client.until_state("w", WorkerState.PAUSED)
        await client.enqueue(short("s"))
        await client.until_left(1)
        assert worker.presence().in_flight == 0
        await boss.applied("resume")
        await client.until_ended("s")

    assert is_idle(engine)
    assert not client.ended("r")


async def test_a_command_is_recorded_when_jetstream_is_back(
    controlled_worker: StartControlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker retries to record a command while JetStream is away. The command fails when its time is over."""
    is_away = True
    record = DesiredStore.record

    async def away(self: DesiredStore, model: str, command: AnyCommand, by: str, **_: Any) -> tuple[DesiredState, int]:
        if is_away:
            raise BusBroken("JetStream is away")
        return await record(self, model, command, by)

    monkeypatch.setattr(DesiredStore, "record", away)
    async with controlled_worker() as (_, boss, *_):
        failed = await boss.do("pause", timeout_s=0.1)
        pause = await boss.command("pause")
        await boss.until(lambda: boss.acks(pause))
        is_away = False
        applied = await boss.final(pause)

        assert (failed.status, failed.error.code) == (AckStatus.FAILED, ControlCode.TIMEOUT)
        assert (applied.status, applied.epoch) == (AckStatus.APPLIED, 1)


async def test_a_worker_undoes_commands_that_are_no_longer_desired(controlled_worker: StartControlled) -> None:
    """After a reset of the desired state, a paused and sleeping worker serves again."""
    async with controlled_worker() as (client, boss, *_):
        await boss.applied("pause")
        await boss.applied("sleep")
        await client.until_state("w", WorkerState.ASLEEP)
        await boss.store.reset("synthetic")
        await client.complete(short("r"))

        assert client.error_of("r") is None


@pytest.mark.proves("P79")
async def test_an_update_from_a_forbidden_path_makes_the_worker_outdated(controlled_worker: StartControlled) -> None:
    """An update from a forbidden path keeps the version and makes the worker outdated.

    Its streams end as retryable.
    """
    async with controlled_worker(weight_version=3) as (client, boss, *_):
        await client.begin(endless("r"))
        failed = await boss.do("update_weights", version=4, source={"path": "/etc"})
        await client.until_ended("r")
        await client.until_state("w", WorkerState.OUTDATED)
        presence = client.presences["w"]

        assert (failed.status, failed.error.code) == (AckStatus.FAILED, ControlCode.PATH_REFUSED)
        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert (presence.weight_version, presence.target_version) == (3, 4)
        assert presence.last_error == failed.error.message
        await boss.applied("update_weights", version=3, source={"path": "/any"}, allow_rollback=True)
        await client.complete(short("s"))
        assert {chunk.weight_version for chunk in client.chunks["s"]} == {3}
