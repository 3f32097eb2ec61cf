"""Updates of weights and adapters on scripted workers: check, recording, application, comparison and restoration."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import rollbus
from rollbus.schemas.acks import AckStatus
from rollbus.schemas.control import AnyCommand, CheckWeights, Fence, FinishWeightUpdate, LoadLora, UpdateWeights
from rollbus.schemas.errors import ControlCode, ControlError, InvalidRequest
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import Canary, WeightSource
from tests.support.fleet import until_worker
from tests.support.hand_control import ACCEPTED, APPLIED, Controls, Reply, controlled, failed, obedient, silent, unless
from tests.support.requests import incomplete
from tests.support.waits import until_true

GOOD = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
BAD = Canary(token_ids=(9, 2, 3), logprobs=(-2.1, -0.2, -0.3))


def loads(canary: Canary) -> Reply:
    """Return a reply of a worker whose new weights produce this canary."""

    def reply(command: AnyCommand) -> Sequence[dict[str, Any]]:
        if isinstance(command, UpdateWeights):
            return ACCEPTED, {**APPLIED, "canary": canary, "signature": "cpu", "weight_version": command.version}
        return obedient(command)

    return reply


def commands(control: Controls, worker: str) -> list[str]:
    """Return the names of the commands that a worker received."""
    return [command.command for command in control[worker].heard]


async def desired_version(control: Controls) -> int | None:
    """Return the version of the weights that are recorded for all workers."""
    state = await control.store.read("m")
    command = None if state is None or "weights" not in state.registers else state.registers["weights"].command
    return command.version if isinstance(command, UpdateWeights) else None


async def test_weights_are_checked_recorded_and_applied(nats_url: str, fleet: str) -> None:
    """Every worker checks the source first. Then the update is recorded and applied with all its options."""
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
    "answer", [failed(ControlCode.PATH_REFUSED, "/etc is not below an allowed root"), {"status": AckStatus.UNSUPPORTED}]
)
async def test_an_update_whose_check_fails_at_one_worker_is_not_recorded(
    nats_url: str, fleet: str, answer: dict[str, Any]
) -> None:
    """If one worker fails the check, the update is not recorded, and no worker receives it."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = unless(CheckWeights, ACCEPTED, answer)
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))

        assert error.ledger.command == "check_weights"
        assert str(error).startswith("update_weights was not started: 1 of 2 workers passed its check: b ")
        assert str(error).endswith("Nothing was changed.")
        assert commands(control, "a") == ["check_weights"]
        assert await control.store.models() == ()


@pytest.mark.proves("P78")
async def test_an_update_with_an_unanswered_check_is_not_recorded(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a live worker does not answer the check, it may be unable to load the weights, so nothing is recorded."""
    monkeypatch.setattr("rollbus.bus.control.controller.MARGIN_S", 0.0)
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = silent
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1, timeout_s=0.3))

        assert list(error.ledger.missing) == ["b"]
        assert await control.store.models() == ()


async def test_a_worker_that_dies_in_the_check_does_not_delay_other_workers(nats_url: str, fleet: str) -> None:
    """If a worker dies during the check, the other workers apply the update.

    The result lists the dead worker as missing, so it is incomplete.
    """
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["b"].reply = silent
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        await control["b"].waiting.get()
        await control["b"].announce(WorkerState.FAILED)
        ledger = (await updating).ledger

        assert (set(ledger.applied), ledger.missing) == ({"a"}, {"b": "it is failed"})
        assert ledger.command == "update_weights"
        assert await desired_version(control) == 1


async def test_a_worker_that_ends_after_its_check_does_not_delay_other_workers(nats_url: str, fleet: str) -> None:
    """A worker that passes the check and stops before the other workers have passed it is not waited for."""
    async with controlled(nats_url, fleet, "a", "b") as control, asyncio.TaskGroup() as tasks:
        control["a"].reply, control["b"].reply = unless(UpdateWeights), unless(CheckWeights)
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        check = await control["b"].waiting.get()
        await control["a"].waiting.get()
        await control["a"].announce(WorkerState.STOPPED)
        await until_true(lambda: "a" not in {worker.worker for worker in control.rb.fleet.workers})
        await control["b"].ack(check, **APPLIED)
        ledger = (await updating).ledger

        assert (set(ledger.applied), ledger.missing) == ({"b"}, {"a": "it has ended"})
        assert await desired_version(control) == 1


async def test_nothing_is_recorded_if_all_workers_die_in_the_check(nats_url: str, fleet: str) -> None:
    """If all workers die during the check, nothing is recorded."""
    async with controlled(nats_url, fleet, "a") as control, asyncio.TaskGroup() as tasks:
        control["a"].reply = silent
        updating = tasks.create_task(incomplete(control.rb.fleet.update_weights("/ckpt", version=1)))
        await control["a"].waiting.get()
        await control["a"].announce(WorkerState.FAILED)

        assert (await updating).ledger.missing == {"a": "it is failed"}
        assert await control.store.models() == ()


async def test_an_update_that_all_workers_fail_restores_the_previous_state(nats_url: str, fleet: str) -> None:
    """If all workers fail an update, the previous desired state is restored.

    Otherwise workers that start later would fail too.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        await control.rb.fleet.update_weights("/ckpt/1", version=1)
        for name in ("a", "b"):
            control[name].reply = unless(UpdateWeights, failed(ControlCode.HALF_WRITTEN))
        error = await incomplete(control.rb.fleet.update_weights("/ckpt/2", version=2))

        assert "was restored" in error.note
        assert await desired_version(control) == 1


async def test_the_worker_whose_canary_differs_is_fenced(nats_url: str, fleet: str) -> None:
    """A worker whose canary differs counts as failed after its ack `applied`, and receives a fence.

    The majority continues.
    """
    async with controlled(nats_url, fleet, "a", "b", "c") as control:
        for name, canary in (("a", GOOD), ("b", BAD), ("c", GOOD)):
            control[name].reply = loads(canary)
        ledger = (await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))).ledger
        error = ledger.failed["b"].error

        assert (set(ledger.applied), set(ledger.failed)) == ({"a", "c"}, {"b"})
        assert error.code is ControlCode.NOT_VERIFIED
        assert error.message.startswith("its canary differs from the majority's: ")
        assert error.message.endswith("; it serves nothing")
        assert [isinstance(command, Fence) for command in control["b"].heard] == [False, False, True]
        # With the epoch, the fence does not affect a worker for which another controller has recorded later weights.
        assert control["b"].heard[-1].epoch == control["b"].heard[1].epoch == 1
        assert commands(control, "a") == commands(control, "c") == ["check_weights", "update_weights"]
        assert await desired_version(control) == 1


async def test_without_a_canary_majority_all_workers_are_fenced(nats_url: str, fleet: str) -> None:
    """Without a majority of equal canaries, all workers receive a fence, and the previous desired state is restored."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["a"].reply = loads(GOOD)
        control["b"].reply = loads(BAD)
        error = await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))

        assert set(error.ledger.failed) == {"a", "b"}
        assert "was restored" in error.note
        assert control.count("fence") == 2
        assert await desired_version(control) is None


async def test_the_error_states_that_a_fence_was_not_confirmed(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker does not confirm its fence, the error states that it may still serve unverified weights."""
    monkeypatch.setattr("rollbus.bus.control.updates.FENCE_TIMEOUT_S", 0.2)
    monkeypatch.setattr("rollbus.bus.control.controller.MARGIN_S", 0.0)
    async with controlled(nats_url, fleet, "a", "b", "c") as control:
        for name in ("a", "c"):
            control[name].reply = loads(GOOD)
        bad = loads(BAD)
        control["b"].reply = lambda command: () if isinstance(command, Fence) else bad(command)

        assert "it did not confirm that it serves nothing" in str(
            await incomplete(control.rb.fleet.update_weights("/ckpt", version=1))
        )


async def test_old_versions_are_refused_and_reach_no_worker(nats_url: str, fleet: str) -> None:
    """A version older than the recorded one, or not newer than the workers' version, is rejected.

    No worker receives the rejected command. A rollback requires `allow_rollback`.
    """
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


async def test_the_newer_version_of_two_concurrent_updates_stays(nats_url: str, fleet: str) -> None:
    """Of two concurrent updates, the newer version stays.

    The older one may be rejected, and never replaces the newer one.
    """
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


async def test_each_adapter_load_gets_the_next_version(nats_url: str, fleet: str) -> None:
    """Without a version, each adapter load gets the next version after the recorded one, also for concurrent loads."""
    async with controlled(nats_url, fleet, "a") as control:
        await control.rb.fleet.load_lora("x", "/x")
        await control.rb.fleet.load_lora("x", "/x", version=7)
        async with asyncio.TaskGroup() as tasks:
            for i in range(4):
                tasks.create_task(control.rb.fleet.load_lora("x", f"/x{i}"))
        versions = [command.version for command in control["a"].heard if isinstance(command, LoadLora)]

        assert versions[:2] == [1, 7]
        assert sorted(versions[2:]) == [8, 9, 10, 11]


async def test_an_adapter_that_all_workers_fail_restores_the_previous_adapter(nats_url: str, fleet: str) -> None:
    """If all workers fail to load an adapter, the previous adapter is desired again, or none."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (failed(ControlCode.BAD_SOURCE),)
        await incomplete(control.rb.fleet.load_lora("x", "/x"))
        state = await control.store.read("m")

        assert state.registers == {}


@pytest.mark.parametrize("is_older", [True, False])
async def test_a_recorded_command_has_only_fields_that_all_workers_of_the_model_decode(
    nats_url: str, fleet: str, is_older: bool
) -> None:
    """A worker of an earlier release reads the desired state also if the command does not name that worker."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["a"].weight_version = 5  # the finish is repeated
        for name, able in (("a", True), ("b", not is_older)):
            control[name].abilities = {"transfer_leases": able}
        await control.rb.fleet.state()
        await control.rb.fleet.finish_weight_update(5, transfer="t", workers=["a"])
        state = await control.store.read("m")

    command = state.workers["a"]["weights"].command
    assert isinstance(command, FinishWeightUpdate)
    assert command.transfer == (None if is_older else "t")


async def test_an_adapter_cannot_have_the_name_of_a_known_model(nats_url: str, fleet: str) -> None:
    """This holds for models of other workers, and for models that have no workers now."""
    async with controlled(nats_url, fleet, "a", "b", models={"b": "n"}) as control:
        await control.store.begin("idle")
        for name in ("n", "idle"):
            with pytest.raises(InvalidRequest, match=f"is '{name}', which is the name of a model"):
                await control.rb.fleet.load_lora(name, "/x", model="m")
        assert commands(control, "a") == []
