"""Weights and adapters for workers by hand: checked, recorded, applied, compared, set back, uploaded."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import rollbus
from rollbus.schemas.control import (
    AckStatus,
    AnyCommand,
    Canary,
    CheckWeights,
    Fence,
    LoadLora,
    UpdateWeights,
    WeightSource,
)
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.presence import WorkerState
from tests.support.fleet_states import until_worker
from tests.support.hand_control import ACCEPTED, APPLIED, Controls, Reply, controlled, failed, obedient, silent, unless
from tests.support.outcomes import incomplete

pytestmark = pytest.mark.slow  # each client waits half a second for who is there

GOOD = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
BAD = Canary(token_ids=(9, 2, 3), logprobs=(-2.1, -0.2, -0.3))


def loads(canary: Canary) -> Reply:
    """A worker whose new weights give this canary."""

    def reply(command: AnyCommand) -> Sequence[dict[str, Any]]:
        if isinstance(command, UpdateWeights):
            return ACCEPTED, {**APPLIED, "canary": canary, "signature": "cpu", "weight_version": command.version}
        return obedient(command)

    return reply


def commands(control: Controls, worker: str) -> list[str]:
    """What a worker has heard."""
    return [command.command for command in control[worker].heard]


async def desired_version(control: Controls) -> int | None:
    """Of the weights that are recorded for all workers."""
    state = await control.store.read("m")
    command = None if state is None or "weights" not in state.registers else state.registers["weights"].command
    return command.version if isinstance(command, UpdateWeights) else None


async def test_weights_are_checked_recorded_and_applied(nats_url: str, fleet: str) -> None:
    """Every worker checks the source first; then the update is recorded and applied with all its options."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        for name in ("a", "b"):
            control[name].reply = loads(GOOD)
        heard: list[str] = []
        ledger = await control.rb.fleet.update_weights(
            "/ckpt/2", version=2, mode="abort", clear_cache=True, on_ack=lambda ack: heard.append(ack.command)
        )
        check, update = control["a"].heard

        assert ledger.is_complete
        assert (ledger.command, ledger.epochs) == ("update_weights", {"m": 1})
        assert isinstance(check, CheckWeights)
        assert isinstance(update, UpdateWeights)
        assert check.source == update.source == WeightSource(path="/ckpt/2")
        assert (update.version, update.mode, update.clear_cache, update.epoch) == (2, "abort", True, 1)
        assert await desired_version(control) == 2
        assert set(heard) == {"check_weights", "update_weights"}


@pytest.mark.proves("P22", "P78")
@pytest.mark.parametrize(
    "answer",
    [
        failed(ControlCode.PATH_REFUSED, "/etc is not below an allowed root"),
        {"status": AckStatus.UNSUPPORTED},
    ],
)
async def test_what_one_worker_refuses_changes_nothing(nats_url: str, fleet: str, answer: dict[str, Any]) -> None:
    """One failed check ends it for all: nothing is recorded, and no worker hears of the update."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = unless(CheckWeights, ACCEPTED, answer)
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))

        assert error.ledger.command == "check_weights"
        assert str(error).startswith("update_weights was not started: 1 of 2 workers passed its check: b ")
        assert str(error).endswith("Nothing was changed.")
        assert commands(control, "a") == ["check_weights"]
        assert await control.store.models() == ()


@pytest.mark.proves("P78")
async def test_a_check_that_is_not_answered_changes_nothing(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that lives and says nothing may be unable to: nothing is recorded."""
    monkeypatch.setattr("rollbus.bus.control.ack_collector.MARGIN_S", 0.0)
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = silent
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1, timeout_s=0.3))

        assert list(error.ledger.missing) == ["b"]
        assert await control.store.models() == ()


async def test_a_worker_that_dies_in_the_check_does_not_hold_up_the_others(nats_url: str, fleet: str) -> None:
    """The rest goes on; the ledger lists it as missing, so that it is no full success."""
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["b"].reply = silent
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        await control["b"].waiting.get()
        await control["b"].announce(WorkerState.FAILED)
        ledger = (await updating).ledger

        assert (set(ledger.applied), ledger.missing) == ({"a"}, {"b": "it is failed"})
        assert ledger.command == "update_weights"
        assert await desired_version(control) == 1


async def test_a_worker_that_dies_in_the_update_is_missing(nats_url: str, fleet: str) -> None:
    """What is desired stays: the survivor has it, and the other finds it when it comes back."""
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["b"].reply = unless(UpdateWeights, ACCEPTED)
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        while not isinstance(await control["b"].waiting.get(), UpdateWeights):
            pass
        await control["b"].announce(WorkerState.STOPPED)
        error = await updating

        assert error.ledger.missing == {"b": "it is stopped"}
        assert error.note == ""
        assert await desired_version(control) == 1


async def test_when_all_die_in_the_check_nothing_changes(nats_url: str, fleet: str) -> None:
    """Nobody is left to apply anything."""
    async with controlled(nats_url, fleet, "a") as control, asyncio.TaskGroup() as tasks:
        control["a"].reply = silent
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        await control["a"].waiting.get()
        await control["a"].announce(WorkerState.FAILED)

        assert (await updating).ledger.missing == {"a": "it is failed"}
        assert await control.store.models() == ()


async def test_an_update_that_all_fail_is_set_back(nats_url: str, fleet: str) -> None:
    """What is desired is as before, so that workers that start later do not fail too."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        await control.rb.fleet.update_weights("/ckpt/1", version=1)
        for name in ("a", "b"):
            control[name].reply = unless(UpdateWeights, failed(ControlCode.HALF_WRITTEN))
        error = await incomplete(control.rb.fleet.update_weights("/ckpt/2", version=2))

        assert "was restored" in error.note
        assert await desired_version(control) == 1


async def test_an_update_that_some_fail_stays(nats_url: str, fleet: str) -> None:
    """The fleet has moved on; those that failed say so and serve nothing."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = unless(UpdateWeights, failed(ControlCode.STORAGE, "no space left"))
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=3))

        assert "b failed: storage: no space left" in str(error)
        assert await desired_version(control) == 3


async def test_the_worker_whose_canary_differs_is_fenced(nats_url: str, fleet: str) -> None:
    """It said `applied`; it counts as failed, and is told to serve nothing. The majority goes on."""
    async with controlled(nats_url, fleet, "a", "b", "c") as control:
        for name, canary in (("a", GOOD), ("b", BAD), ("c", GOOD)):
            control[name].reply = loads(canary)
        ledger = (await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))).ledger
        error = ledger.failed["b"].error

        assert (set(ledger.applied), set(ledger.failed)) == ({"a", "c"}, {"b"})
        assert error is not None
        assert error.code is ControlCode.NOT_VERIFIED
        assert error.message.startswith("its canary differs from the majority's: ")
        assert error.message.endswith("; it serves nothing")
        assert [isinstance(command, Fence) for command in control["b"].heard] == [False, False, True]
        # So that it spares a worker for which another controller has recorded later weights meanwhile.
        assert control["b"].heard[-1].epoch == control["b"].heard[1].epoch == 1
        assert commands(control, "a") == commands(control, "c") == ["check_weights", "update_weights"]
        assert await desired_version(control) == 1


async def test_without_a_majority_all_are_fenced_and_it_is_set_back(nats_url: str, fleet: str) -> None:
    """One against one: nobody knows which is right."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["a"].reply = loads(GOOD)
        control["b"].reply = loads(BAD)
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))

        assert set(error.ledger.failed) == {"a", "b"}
        assert "was restored" in error.note
        assert control.count("fence") == 2
        assert await desired_version(control) is None


async def test_a_fence_that_is_not_confirmed_is_said(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error tells that the worker may serve on with weights that are not verified."""
    monkeypatch.setattr("rollbus.bus.control.updates.FENCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("rollbus.bus.control.ack_collector.MARGIN_S", 0.0)
    async with controlled(nats_url, fleet, "a", "b", "c") as control:
        for name in ("a", "c"):
            control[name].reply = loads(GOOD)
        bad = loads(BAD)
        control["b"].reply = lambda command: () if isinstance(command, Fence) else bad(command)

        assert "it did not confirm that it serves nothing" in str(
            await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))
        )


async def test_old_versions_are_refused_before_anybody_hears(nats_url: str, fleet: str) -> None:
    """Older than recorded, or than what workers were started with; a rollback must be asked for."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].weight_version = 5
        await control["a"].announce()
        await until_worker(control.rb, "a", lambda worker: worker.weight_version == 5)
        for version in (4, 5):
            with pytest.raises(ControlError, match=f"version {version} is not newer than 5, which workers were") as old:
                await control.rb.fleet.update_weights("/ckpt", version=version)
            assert old.value.code is ControlCode.OLD_VERSION
        await control.rb.fleet.update_weights("/ckpt/7", version=7)
        with pytest.raises(ControlError, match="version 6 is older than the recorded 7"):
            await control.rb.fleet.update_weights("/ckpt/6", version=6)
        assert control.count("check_weights") == 1
        assert await desired_version(control) == 7

        await control.rb.fleet.update_weights("/ckpt/6", version=6, allow_rollback=True)
        assert await desired_version(control) == 6


async def test_two_updates_at_once_are_ordered(nats_url: str, fleet: str) -> None:
    """The newer version stays, whichever is recorded first; the older may be refused, and is never recorded over it."""
    async with controlled(nats_url, fleet, "a") as control, rollbus.connect(nats_url, fleet=fleet, client="you") as you:
        async with asyncio.TaskGroup() as tasks:
            old = tasks.create_task(_outcome(control.rb, 1))
            new = tasks.create_task(_outcome(you, 2))

        assert new.result() == "applied"
        assert old.result() in {"applied", "old_version"}
        assert await desired_version(control) == 2


async def _outcome(rb: rollbus.Client, version: int) -> str:
    try:
        await rb.fleet.update_weights(f"/ckpt/{version}", version=version)
    except ControlError as exc:
        return exc.code
    return "applied"


async def test_adapters_are_counted_up(nats_url: str, fleet: str) -> None:
    """Without a version each load has the one after what is recorded; also of loads at the same time."""
    async with controlled(nats_url, fleet, "a") as control:
        await control.rb.fleet.load_lora("x", "/x")
        await control.rb.fleet.load_lora("x", "/x", version=7)
        async with asyncio.TaskGroup() as tasks:
            for i in range(4):
                tasks.create_task(control.rb.fleet.load_lora("x", f"/x{i}"))
        versions = [command.version for command in control["a"].heard if isinstance(command, LoadLora)]

        assert versions[:2] == [1, 7]
        assert sorted(versions[2:]) == [8, 9, 10, 11]


async def test_an_adapter_that_all_fail_is_set_back(nats_url: str, fleet: str) -> None:
    """The one of before is desired again, or none."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (failed(ControlCode.BAD_SOURCE),)
        await incomplete(control.rb.fleet.load_lora("x", "/x"))
        state = await control.store.read("m")

        assert state is not None
        assert state.registers == {}
