"""What a worker answers to commands that change nothing, are wrong, or are not meant for it."""

import asyncio

import pytest

from schemas.control import AckStatus
from schemas.errors import ControlCode, ErrorCode
from schemas.presence import WorkerState
from tests.support.fleet import synthetic_worker
from tests.support.hand_client import hand_client
from tests.support.hand_controller import hand_controller
from tests.workers.control_requests import (
    SLOW,
    endless,
    request_for,
    until_left,
    until_state,
)

pytestmark = pytest.mark.slow


async def test_a_worker_says_how_it_is(nats_url: str, fleet: str) -> None:
    """`state` is answered with what the worker announces of itself."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=7),
    ):
        await client.until_serving("w")
        ack = await boss.applied("state")

        assert ack.state is not None
        assert (ack.state["worker"], ack.state["state"], ack.state["weight_version"]) == ("w", "serving", 7)
        assert ack.state["target_version"] == 7


async def test_a_bad_command_is_refused_where_anyone_can_be_told(nats_url: str, fleet: str) -> None:
    """What does not decode has failed as invalid_command if it has an id, and is counted if not; nothing changes."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w") as (worker, _),
    ):
        await client.until_serving("w")
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


async def test_commands_for_others_are_left_to_them(nats_url: str, fleet: str) -> None:
    """A command for another model or other workers gets no answer from this one."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w"),
    ):
        await client.until_serving("w")
        foreign = [await boss.command("pause", model="else"), await boss.command("pause", workers=["v"])]
        await boss.applied("state", workers=["w"], model="synthetic")

        assert [boss.acks(command_id) for command_id in foreign] == [[], []]


async def test_a_fenced_worker_serves_nothing(nats_url: str, fleet: str) -> None:
    """`fence` ends what is in flight as retryable and leaves the worker poisoned, and a resume does not change that."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", config=SLOW),
    ):
        await client.until_serving("w")
        await client.enqueue(endless("r"))
        await client.until(lambda: client.chunks["r"])
        await boss.applied("fence", reason="its canary differs")
        await client.until_ended("r")
        await until_state(client, "w", WorkerState.POISONED)
        await boss.applied("resume")
        await client.enqueue(request_for(3, "s"))
        await until_left(client, 1)

        assert client.error_of("r") == ErrorCode.WORKER_FENCED
        assert client.presences["w"].last_error == "its canary differs"
        assert client.presences["w"].state is WorkerState.POISONED


async def test_a_fence_from_before_newer_weights_is_stale(nats_url: str, fleet: str) -> None:
    """Who compared the canaries of an update does not fence a worker that has later weights by now."""
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w", weight_version=3),
    ):
        await client.until_serving("w")
        old = await boss.applied("update_weights", version=3, source={"path": "/any"})
        new = await boss.applied("update_weights", version=3, source={"path": "/any"})
        late = await boss.do("fence", epoch=old.epoch)
        await client.until_serving("w")
        in_time = await boss.do("fence", epoch=new.epoch)

        assert (late.status, late.error and late.error.code) == (AckStatus.STALE, ControlCode.STALE)
        assert in_time.status is AckStatus.APPLIED


async def test_what_was_done_before_the_command_was_heard_is_answered_at_once(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker hears of a recording by itself. The command that follows needs no clock to be answered."""
    monkeypatch.setattr("workers.worker.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("workers.control.reading.READ_S", 3600.0)
    async with (
        hand_client(nats_url, fleet) as client,
        hand_controller(nats_url, fleet) as boss,
        synthetic_worker(nats_url, fleet, worker_id="w"),
    ):
        await client.until_serving("w")
        epoch = await boss.record("pause", id="one")
        await until_state(client, "w", WorkerState.PAUSED)
        await boss.command("pause", id="one", epoch=epoch)
        async with asyncio.timeout(10):
            assert (await boss.final("one")).status is AckStatus.APPLIED
