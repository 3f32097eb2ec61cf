"""A worker's acks of commands that change nothing, are wrong, or address other workers."""

import asyncio

import pytest

from rollbus.schemas.acks import AckStatus
from rollbus.schemas.errors import ControlCode, ErrorCode
from rollbus.schemas.presence import WorkerState
from tests.support.requests import endless, short
from tests.support.waits import SOON_S
from tests.workers.support import StartControlled


async def test_the_ack_of_state_contains_the_workers_presence(controlled_worker: StartControlled) -> None:
    """The ack of `state` contains the worker's presence."""
    async with controlled_worker(weight_version=7) as (_, boss, *_):
        ack = await boss.applied("state")

        assert (ack.state["worker"], ack.state["state"], ack.state["weight_version"]) == ("w", "serving", 7)
        assert ack.state["target_version"] == 7


async def test_an_invalid_command_with_an_id_fails_and_without_an_id_is_counted(
    controlled_worker: StartControlled,
) -> None:
    """A command that cannot be decoded fails as invalid_command if it has an id, and is counted otherwise.

    Neither changes anything.
    """
    async with controlled_worker() as (client, boss, worker, _):
        bad = [
            await boss.command("pause", mode="gently"),
            await boss.command("pause", moed="keep"),
            await boss.command("explode"),
            await boss.command("pause", workers=["a.b"]),
        ]
        await boss.say(b'{"command": "pause", "id": ""}')
        await boss.say(b"\xff no json")
        finals = [await boss.final(command_id) for command_id in bad]
        await boss.applied("state")

        codes = [ack.error.code for ack in finals if ack.error is not None]
        assert codes == [ControlCode.INVALID_COMMAND] * len(bad)
        assert worker.stats().bad_commands == 2
        assert (await boss.desired()).epoch == 0
        assert client.presences["w"].state is WorkerState.SERVING


async def test_a_worker_does_not_answer_commands_for_other_models_or_workers(
    controlled_worker: StartControlled,
) -> None:
    """A worker does not answer a command for another model or for other workers."""
    async with controlled_worker() as (_, boss, *_):
        foreign = [await boss.command("pause", model="else"), await boss.command("pause", workers=["v"])]
        await boss.applied("state", workers=["w"], model="synthetic")

        assert [boss.acks(command_id) for command_id in foreign] == [[], []]


async def test_an_unload_of_an_unknown_adapter_fails_and_is_not_recorded(controlled_worker: StartControlled) -> None:
    """The unload of an adapter that is neither loaded nor desired fails by name, also if no controller records it."""
    async with controlled_worker() as (client, boss, *_):
        ack = await boss.do("unload_lora", name="nope")
        await client.until_serving("w")

        assert (ack.status, ack.error and ack.error.code) == (AckStatus.FAILED, ControlCode.NOT_FOUND)
        assert "adapter 'nope' is not loaded" in str(ack.error)
        assert (ack.epoch, client.presences["w"].epoch) == (None, 0)


async def test_a_fence_command_leaves_the_worker_poisoned_despite_a_resume(controlled_worker: StartControlled) -> None:
    """`fence` ends requests in flight as retryable and leaves the worker poisoned. A resume does not change that."""
    async with controlled_worker() as (client, boss, *_):
        await client.begin(endless("r"))
        await boss.applied("fence", reason="its canary differs")
        await client.until_ended("r")
        await client.until_state("w", WorkerState.POISONED)
        await boss.applied("resume")
        await client.enqueue(short("s"))
        await client.until_left(1)

        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert client.presences["w"].last_error == "its canary differs"
        assert client.presences["w"].state is WorkerState.POISONED


async def test_a_fence_is_stale_if_the_worker_has_later_weights(controlled_worker: StartControlled) -> None:
    """A fence after the comparison of an update's canaries is stale if the worker has later weights by then."""
    async with controlled_worker(weight_version=3) as (client, boss, *_):
        old = await boss.applied("update_weights", version=3, source={"path": "/any"})
        new = await boss.applied("update_weights", version=3, source={"path": "/any"})
        late = await boss.do("fence", epoch=old.epoch)
        await client.until_serving("w")
        in_time = await boss.do("fence", epoch=new.epoch)

        assert (late.status, late.error and late.error.code) == (AckStatus.STALE, ControlCode.STALE)
        assert in_time.status is AckStatus.APPLIED


async def test_a_command_applied_before_its_message_arrives_is_acked_immediately(
    controlled_worker: StartControlled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker applied a recorded command before the message arrives, it acks the message without a timer."""
    monkeypatch.setattr("rollbus.workers.worker.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("rollbus.workers.control.desired.READ_S", 3600.0)
    async with controlled_worker() as (client, boss, *_):
        epoch = await boss.record("pause", id="one")
        await client.until_state("w", WorkerState.PAUSED)
        await boss.command("pause", id="one", epoch=epoch)
        async with asyncio.timeout(SOON_S):
            assert (await boss.final("one")).status is AckStatus.APPLIED
