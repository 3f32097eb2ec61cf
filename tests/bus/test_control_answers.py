"""Command acks of workers that are lost, late, stale, repeated or forged, and workers that die before they answer."""

import asyncio

import pytest

from rollbus.bus.control import controller
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import AnyCommand, FlushCache
from rollbus.schemas.errors import InvalidRequest
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from tests.support.hand_control import ACCEPTED, APPLIED, controlled, silent
from tests.support.requests import incomplete
from tests.support.tcp_proxy import tcp_proxy


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat commands soon, and wait for answers exactly as long as the command allows."""
    monkeypatch.setattr(controller, "REPEAT_S", 0.1)
    monkeypatch.setattr(controller, "MARGIN_S", 0.0)


@pytest.mark.proves("P76")
async def test_a_worker_that_stops_before_its_ack_is_missing_immediately(nats_url: str, fleet: str) -> None:
    """If a worker stops before it answers, the command ends without waiting for its timeout.

    The command result states the reason and includes the other workers.
    """
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["b"].reply = lambda _: (ACCEPTED,)
        pausing = tasks.create_task(incomplete(control.rb.fleet.pause(timeout_s=50)))
        await control["b"].waiting.get()
        await control["b"].announce(WorkerState.STOPPED)
        error = await pausing

        assert error.ledger.missing == {"b": "it is stopped"}
        assert set(error.ledger.applied) == {"a"}
        assert error.ledger.seconds < 50


@pytest.mark.usefixtures("brief")
async def test_a_lost_command_is_repeated_to_workers_without_a_final_ack(nats_url: str, fleet: str) -> None:
    """Workers without a final ack receive the command again with the same id and epoch.

    Workers with a final ack do not.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = lambda _: (ACCEPTED, APPLIED) if len(control["b"].heard) > 2 else ()
        ledger = await control.rb.fleet.pause()
        repeats = control["b"].heard

        assert ledger.is_complete
        assert len(control["a"].heard) == 1
        assert {(command.id, command.epoch) for command in repeats} == {(ledger.id, 1)}
        assert [command.workers for command in repeats] == [None, ("b",), ("b",)]


@pytest.mark.usefixtures("brief")
async def test_a_lost_final_ack_is_requested_again(nats_url: str, fleet: str) -> None:
    """If only the ack `accepted` has arrived, the worker receives the command again and repeats its final ack."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (ACCEPTED,) if len(control["a"].heard) < 2 else (APPLIED,)

        assert (await control.rb.fleet.pause()).is_complete


async def test_invalid_acks_and_acks_for_other_workers_are_ignored(nats_url: str, fleet: str) -> None:
    """The controller counts acks that do not decode or that name another worker, and ignores them."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        subjects = control["a"].subjects

        async def noise(command: AnyCommand) -> None:
            await control.nats.publish(subjects.ack("me", "a"), b"garbage")
            forged = Ack(
                id=command.id, command="pause", worker="b", incarnation="life-1", model="m", status=AckStatus.FAILED
            )
            await control.nats.publish(subjects.ack("me", "a"), encode_json(forged))
            await control["a"].ack(command, **APPLIED)

        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            await noise(await control["a"].waiting.get())

        assert pausing.result().is_complete
        assert control.rb.fleet.bad_messages == 2


async def test_a_command_that_is_sent_again_keeps_its_epoch(nats_url: str, fleet: str) -> None:
    """A command that is sent again keeps its epoch. While it is open, it cannot be sent again."""
    async with controlled(nats_url, fleet, "a") as control:
        command = FlushCache(id="once")
        first = await control.rb.fleet.send(command)
        second = await control.rb.fleet.send(command)
        assert first.epochs == second.epochs == {"m": 1}

        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(control.rb.fleet.send(FlushCache(id="slow")))
            while (heard := await control["a"].waiting.get()).id != "slow":
                pass
            with pytest.raises(InvalidRequest, match="id is slow, the id of an open command"):
                await control.rb.fleet.send(FlushCache(id="slow"))
            await control["a"].ack(heard, **APPLIED)
        assert running.result().is_complete


async def test_on_ack_receives_each_new_ack_once_and_in_order(nats_url: str, fleet: str) -> None:
    """`on_ack` receives each new ack once and in order. An error that it raises reaches the caller."""
    heard: list[tuple[str, str | None]] = []
    async with controlled(nats_url, fleet, "a") as control:
        loading = {"status": AckStatus.PROGRESS, "stage": "loading"}
        control["a"].reply = lambda _: (ACCEPTED, ACCEPTED, loading, loading, APPLIED, APPLIED)
        await control.rb.fleet.pause(on_ack=lambda ack: heard.append((ack.status, ack.stage)))
        assert heard == [("accepted", None), ("progress", "loading"), ("applied", None)]

        def fail(ack: Ack) -> None:
            raise ZeroDivisionError(ack.worker)

        with pytest.raises(ZeroDivisionError):
            await control.rb.fleet.pause(on_ack=fail)
        assert (await control.rb.fleet.resume()).is_complete


async def test_a_recorded_command_stays_after_its_caller_is_cancelled(nats_url: str, fleet: str) -> None:
    """If the caller is cancelled, the recorded command stays, and the client remains usable."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            command = await control["a"].waiting.get()
            pausing.cancel()
        state = await control.store.read("m")

        assert state.registers["pause"].command.id == command.id
        control["a"].reply = lambda _: (APPLIED,)
        assert (await control.rb.fleet.resume()).is_complete


@pytest.mark.usefixtures("brief")
async def test_acks_that_were_missed_in_an_outage_are_requested_again(nats_url: str, fleet: str) -> None:
    """A controller that is disconnected while its workers answer sends the command again after the reconnect."""
    async with tcp_proxy(nats_url) as proxy, controlled(nats_url, fleet, "a", "b", client_url=proxy.url) as control:
        for name in ("a", "b"):
            control[name].reply = silent
        async with asyncio.TaskGroup() as tasks:
            pausing = tasks.create_task(control.rb.fleet.pause())
            heard = {name: await control[name].waiting.get() for name in ("a", "b")}
            proxy.cut()
            for name, command in heard.items():
                await control[name].ack(command, **APPLIED)
                control[name].reply = lambda _: (APPLIED,)
            await proxy.restore()

        assert set(pausing.result().applied) == {"a", "b"}
        assert {command.epoch for worker in control.workers.values() for command in worker.heard} == {1}
