"""Commands from `rb.fleet` to scripted workers: which workers must answer, and what the command result contains."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import rollbus
from bench.processes import many_workers
from rollbus.bus.client import presence as client_presence
from rollbus.bus.client.client import runtime_of
from rollbus.bus.client.fleet import Fleet
from rollbus.bus.client.presence import PresenceWatcher
from rollbus.bus.control import controller
from rollbus.bus.control.controller import MAX_REPEAT_S, REPEAT_S, AckCollector
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.embedded import EmbeddedServer
from rollbus.bus.protocol.fleet.command_result import AckTracker
from rollbus.bus.protocol.fleet.desired import effective
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import Abort, Pause, State, UpdateWeights
from rollbus.schemas.errors import BusBroken, ControlCode, InvalidRequest, NoWorkers, RemoteProtocolError
from rollbus.schemas.messages import encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import Canary
from tests.support.fleet import presence, until_state, until_worker
from tests.support.hand_control import ACCEPTED, APPLIED, controlled, failed
from tests.support.invariants import observing
from tests.support.nats_server import change_config, require_binary
from tests.support.requests import incomplete
from tests.support.waits import SOON_S, until_true

pytestmark = pytest.mark.slow


Give = Callable[[Fleet], Awaitable[rollbus.CommandResult]]
"""Sends a command to a fleet."""


@pytest.mark.proves("P18")
async def test_all_workers_apply_a_command(nats_url: str, fleet: str) -> None:
    """A command is recorded, each worker receives it once with its epoch, and its result contains all workers."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        ledger = await control.rb.fleet.pause(mode="wait")
        state = await control.store.read("m")

        assert ledger.is_complete
        assert (set(ledger.applied), ledger.epochs, ledger.command) == ({"a", "b"}, {"m": 1}, "pause")
        assert state.registers["pause"].command == control["a"].heard[0]
        assert control["a"].heard == control["b"].heard
        assert control.count("pause") == 2


async def test_every_command_is_sent_with_its_options(nats_url: str, fleet: str) -> None:
    """Each method sends its command with the given options. Commands that change the desired state have an epoch."""
    async with controlled(nats_url, fleet, "a") as control:
        fleet_ = control.rb.fleet
        for command in (
            fleet_.pause(clear_cache=True, timeout_s=7),
            fleet_.resume(model="m"),
            fleet_.flush_cache(preempt=True),
            fleet_.drain(["a"]),
            fleet_.sleep(2),
            fleet_.wake(workers=["a"]),
            fleet_.abort(["r1", "r2", "r1"]),
            fleet_.check_weights("/ckpt"),
            fleet_.load_lora("x", "/x"),
            fleet_.unload_lora("x"),
            fleet_.init_weight_transfer({"port": 1}),
            fleet_.start_weight_update(mode="wait"),
            fleet_.update_weight_chunk({"names": ["w"]}),
            fleet_.finish_weight_update(5),
        ):
            assert (await command).is_complete
        heard = {command.command: command for command in control["a"].heard}

        assert [name for name, command in heard.items() if command.epoch is not None] == [
            "pause", "resume", "flush_cache", "drain", "sleep", "wake", "load_lora", "unload_lora",
            "finish_weight_update",
        ]  # fmt: skip
        assert heard["pause"] == Pause(id=heard["pause"].id, clear_cache=True, timeout_s=7, model="m", epoch=1)
        assert heard["abort"] == Abort(id=heard["abort"].id, request_ids=("r1", "r2"))
        assert heard["drain"].workers == ("a",)


async def test_a_command_to_zero_workers_is_an_error(nats_url: str, fleet: str) -> None:
    """Without a worker that can answer, a command raises an error with the reason, and nothing is recorded."""
    async with controlled(nats_url, fleet) as control:
        with pytest.raises(NoWorkers, match="no live worker of any model can answer"):
            await control.rb.fleet.pause()
        with pytest.raises(NoWorkers):
            await control.rb.fleet.update_weights("/ckpt", version=1)
        assert await control.store.models() == ()
    async with controlled(nats_url, fleet, "a") as control:
        await control["a"].announce(WorkerState.STARTING)
        await until_worker(control.rb, "a", WorkerState.STARTING)
        with pytest.raises(NoWorkers, match=r"\(a is starting\)"):
            await control.rb.fleet.resume(model="m")
        assert await control.store.models() == ()


async def test_a_command_fails_if_a_named_worker_cannot_answer(nats_url: str, fleet: str) -> None:
    """If a named worker cannot answer, the error names it.

    The command is neither recorded nor sent to other workers.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        with pytest.raises(InvalidRequest, match=r"workers names no live worker: z; allowed: a \(m\), b \(m\)"):
            await control.rb.fleet.pause(workers=["a", "z"])
        with pytest.raises(InvalidRequest, match="workers is 'a'"):
            await control.rb.fleet.drain("a")

        assert await control.store.models() == ()
        assert control.count("pause") == 0


async def test_a_command_for_one_worker_affects_no_other_worker(nats_url: str, fleet: str) -> None:
    """A command for one worker is recorded for that worker, and only that worker must answer.

    A later command for all workers replaces it.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        ledger = await control.rb.fleet.drain(["a"])
        state = await control.store.read("m")

        assert set(ledger.applied) == {"a"}
        assert control["b"].heard == []
        assert set(effective(state, "a")) == {"pause"}
        assert effective(state, "b") == {}
        await control.rb.fleet.resume()
        state = await control.store.read("m")
        assert state.workers == {}


WRONG: list[tuple[Callable[[Any], Awaitable[object]], str]] = [
    (lambda fleet: fleet.pause(mode="maybe"), "mode is 'maybe'; allowed: abort, wait, keep"),
    (lambda fleet: fleet.pause(clear_cache="yes"), "clear_cache does not decode: Expected `bool`"),
    (lambda fleet: fleet.pause(timeout_s=0), "timeout_s is 0"),
    (lambda fleet: fleet.pause(timeout_s="soon"), "timeout_s is 'soon'"),
    (lambda fleet: fleet.pause(workers=[]), "workers is empty"),
    (lambda fleet: fleet.pause(workers=["a.b"]), "workers is 'a.b'"),
    (lambda fleet: fleet.pause(workers="a"), "workers is 'a'"),
    (lambda fleet: fleet.pause(workers=5), "workers is 5"),
    (lambda fleet: fleet.pause(workers=[["a"]]), "workers has a list"),
    (lambda fleet: fleet.pause(workers=["nobody"]), "workers names no live worker: nobody"),
    (lambda fleet: fleet.pause(model=""), "model is ''"),
    (lambda fleet: fleet.pause(model="n"), "model is 'n'; allowed: one of m"),
    (lambda fleet: fleet.pause(model=5), "model is 5"),
    (lambda fleet: fleet.pause(on_ack=5), "on_ack is 5"),
    (lambda fleet: fleet.drain(None), "workers is None"),
    (lambda fleet: fleet.sleep(3), "level is 3; allowed: 1, 2"),
    (lambda fleet: fleet.abort([]), "request_ids does not decode"),
    (lambda fleet: fleet.abort(5), "request_ids is 5"),
    (lambda fleet: fleet.abort([5]), "request_ids has 5"),
    (lambda fleet: fleet.check_weights(), "exactly one"),
    (lambda fleet: fleet.check_weights("/a", objects="b/c"), "exactly one"),
    (lambda fleet: fleet.check_weights(5), "path is 5"),
    (lambda fleet: fleet.check_weights(objects=5), "source.objects does not decode"),
    (lambda fleet: fleet.update_weights("/a", version=-1), "version does not decode: Expected `int` >= 0"),
    (lambda fleet: fleet.update_weights("/a", version=None), "version does not decode"),
    (lambda fleet: fleet.update_weights("", version=1, upload=True), "path is ''"),
    (lambda fleet: fleet.update_weights(b"/a", version=1), "path is a bytes"),
    (lambda fleet: fleet.update_weights("/a", version=1, upload="yes"), "upload is 'yes'"),
    (lambda fleet: fleet.update_weights(objects="b/c", version=1, upload=True), "upload is set"),
    (
        lambda fleet: fleet.update_weights("/a", version=1, expected_canary=Canary(token_ids=(1,), logprobs=(0.0,))),
        "expected_canary has 1 tokens",
    ),
    (lambda fleet: fleet.load_lora("", "/a"), "name is ''"),
    (lambda fleet: fleet.load_lora(5, "/a"), "name is 5"),
    (lambda fleet: fleet.init_weight_transfer({"x": object()}), "cannot be sent"),
    (lambda fleet: fleet.init_weight_transfer(5), "info does not decode"),
    (lambda fleet: fleet.send(5), "command is 5"),
    (lambda fleet: fleet.wait_for_workers("two"), "count is 'two'"),
    (lambda fleet: fleet.wait_for_workers(timeout_s=-1), "timeout_s is -1"),
    (lambda fleet: fleet.reset(5), "model is 5"),
]


async def test_a_command_with_a_wrong_field_reaches_no_worker(nats_url: str, fleet: str) -> None:
    """The error names the wrong field. No worker receives the command, and nothing is recorded."""
    async with controlled(nats_url, fleet, "a") as control:
        for change, message in WRONG:
            with pytest.raises(InvalidRequest, match=re.escape(message)):
                await change(control.rb.fleet)

        assert control["a"].heard == []
        assert await control.store.models() == ()


async def test_commands_accept_numpy_numbers(nats_url: str, fleet: str) -> None:
    """Commands accept NumPy numbers, because trainers compute with them, and lists in place of tuples."""
    canary = Canary(token_ids=[np.int64(1)] * 8, logprobs=np.zeros(8, np.float32))  # type: ignore[arg-type]
    async with controlled(nats_url, fleet, "a") as control:
        version, timeout_s = np.int64(7), np.float32(9)
        await control.rb.fleet.update_weights(
            "/a",
            version=version,  # type: ignore[arg-type]
            timeout_s=timeout_s,  # type: ignore[arg-type]
            expected_canary=canary,
        )
        _, heard = control["a"].heard

    assert isinstance(heard, UpdateWeights)
    assert (heard.version, heard.timeout_s) == (7, 9.0)
    assert heard.expected_canary == Canary(token_ids=(1,) * 8, logprobs=(0.0,) * 8)


async def test_partial_success_is_an_error_with_the_command_result(nats_url: str, fleet: str) -> None:
    """If one of two workers fails, the error has the command result.

    The desired state stays, because the other worker applied it.
    """
    async with controlled(nats_url, fleet, "a", "b") as control:
        control["b"].reply = lambda _: (ACCEPTED, failed(ControlCode.CACHE_IN_USE, "2 requests hold it"))
        error = await incomplete(control.rb.fleet.sleep())
        state = await control.store.read("m")

        assert (set(error.ledger.applied), set(error.ledger.failed)) == ({"a"}, {"b"})
        assert "1 of 2 workers: b failed: cache_in_use: 2 requests hold it" in str(error)
        assert state.registers["sleep"].epoch == 1


@pytest.mark.parametrize("method", [Fleet.pause, Fleet.flush_cache])
async def test_a_failed_pause_or_flush_stays_desired(nats_url: str, fleet: str, method: Give) -> None:
    """A failed pause or flush stays desired, because a worker that exceeds the time limit is paused nevertheless."""
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (failed(ControlCode.TIMEOUT),)
        await incomplete(method(control.rb.fleet))
        state = await control.store.read("m")

        assert state.epoch == 1


@pytest.mark.proves("P74")
async def test_commands_of_two_controllers_are_ordered_by_epoch(nats_url: str, fleet: str) -> None:
    """Concurrent commands each have their own epoch, and the desired state is that of the last epoch."""
    async with controlled(nats_url, fleet, "a") as control, rollbus.connect(nats_url, fleet=fleet, client="you") as you:
        async with asyncio.TaskGroup() as tasks:
            pauses = [tasks.create_task(control.rb.fleet.pause()) for _ in range(5)]
            resumes = [tasks.create_task(you.fleet.resume()) for _ in range(5)]
        epochs = {task.result().epochs["m"]: task.result() for task in (*pauses, *resumes)}
        state = await control.store.read("m")

        assert set(epochs) == set(range(1, 11))
        assert state.registers["pause"].command.id == epochs[10].id


async def test_a_command_for_several_models_is_recorded_for_all_or_none(nats_url: str, fleet: str) -> None:
    """Each model has its own desired state. A command that one model would reject is recorded for none."""
    models = {"a": "m", "b": "n", "c": "n"}
    async with controlled(nats_url, fleet, *models, models=models) as control:
        ledger = await control.rb.fleet.pause()
        assert set(ledger.applied) == {"a", "b", "c"}
        assert ledger.epochs == {"m": 1, "n": 1}
        assert {(command.model, command.epoch) for command in control["b"].heard} == {("n", 1)}

        assert (await control.rb.fleet.pause(workers=["a", "b"])).epochs == {"m": 2, "n": 2}
        assert (await control.rb.fleet.resume(model="n")).epochs == {"n": 3}
        for attempt in (
            control.rb.fleet.update_weights("/ckpt", version=1),
            control.rb.fleet.load_lora("x", "/x"),
            control.rb.fleet.unload_lora("x"),
            control.rb.fleet.finish_weight_update(1),
        ):
            with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, n"):
                await attempt
        assert {model: state.epoch for model, state in (await control.store.read_all()).items()} == {"m": 2, "n": 3}


async def test_a_command_fails_if_a_desired_state_cannot_be_decoded(nats_url: str, fleet: str) -> None:
    """A command fails if the desired state of one of its models cannot be decoded. A reset clears that state."""
    models = {"a": "m", "b": "n"}
    async with controlled(nats_url, fleet, *models, models=models) as control:
        await control.rb.fleet.pause(model="m")  # creates the bucket
        await control.nats.jetstream().publish(control.store.subject("n"), b"garbage")
        with pytest.raises(RemoteProtocolError, match="a reset clears it"):
            await control.rb.fleet.pause()
        assert control.count("pause") == 1
        assert set((await control.rb.fleet.state()).desired) == {"m"}

        assert await control.rb.fleet.reset() == ("m", "n")
        assert await control.rb.fleet.reset("n") == ()
        assert (await control.rb.fleet.pause()).is_complete
        assert set((await control.rb.fleet.state()).desired) == {"m", "n"}


async def test_what_is_no_desired_state_makes_no_model_known(nats_url: str, fleet: str) -> None:
    """Whatever is stored under another model's name: a command needs no model, and an adapter may have that name.

    A valid state makes the model known: then the command needs a model, and the adapter another name.
    """
    async with controlled(nats_url, fleet, "a") as control:
        fleet_ = control.rb.fleet
        await fleet_.pause()  # creates the bucket
        await control.nats.jetstream().publish(control.store.subject("x"), b"garbage")
        assert (await fleet_.load_lora("x", "/x")).is_complete
        assert (await fleet_.start_weight_update(mode="wait")).is_complete

        await control.store.reset("x")
        for attempt in (fleet_.unload_lora("x"), fleet_.load_lora("x", "/x")):
            with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, x"):
                await attempt
        with pytest.raises(InvalidRequest, match="name is 'x', which is the name of a model"):
            await fleet_.load_lora("x", "/x", model="m")


async def test_the_fleet_state_contains_the_desired_state_of_each_model(nats_url: str, fleet: str) -> None:
    """The fleet state contains the desired state of each model, also of a model whose workers are gone."""
    async with controlled(nats_url, fleet, "a") as control:
        assert (await control.rb.fleet.state()).desired == {}
        await control.rb.fleet.pause()
        await control["a"].announce(WorkerState.STOPPED)
        state = await until_state(control.rb, lambda state: state.workers == ())

        assert state.desired["m"].registers["pause"].epoch == 1


async def test_paused_workers_are_present_but_do_not_count_as_serving(nats_url: str, fleet: str) -> None:
    """`wait_for_workers` waits for workers that serve. A paused worker is present but does not count."""
    async with controlled(nats_url, fleet, "a") as control:
        await control["a"].announce(WorkerState.PAUSED)
        await until_worker(control.rb, "a", WorkerState.PAUSED)
        with pytest.raises(NoWorkers, match=r"0 of 1 workers served within 0.7 s \(a is paused\)"):
            await control.rb.fleet.wait_for_workers(timeout_s=0.7)
        await control["a"].announce(WorkerState.SERVING)
        await control.rb.fleet.wait_for_workers()


async def test_workers_are_as_new_as_the_end_of_a_wait(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a wait, `workers` shows all presence that ended it, though the snapshots of a large fleet are delayed."""
    async with controlled(nats_url, fleet, "a", "b") as control:
        await control.rb.fleet.wait_for_workers(2)
        monkeypatch.setattr(client_presence, "NOTIFY_S", 3600.0)
        table = runtime_of(control.rb).watcher.table
        await control["a"].announce(WorkerState.PAUSED)
        await until_true(lambda: len(table.serving("m")) == 1)
        await control.rb.fleet.wait_for_workers()
        assert [worker.state for worker in control.rb.fleet.workers] == [WorkerState.PAUSED, WorkerState.SERVING]


async def test_commands_that_must_be_recorded_fail_without_jetstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without JetStream, commands that must be recorded fail immediately and reach no worker.

    One-off commands and `state` work.
    """
    require_binary()
    change_config(monkeypatch)
    async with EmbeddedServer() as server, controlled(server.url, "f", "a") as control:
        with pytest.raises(BusBroken, match="no JetStream"):
            await control.rb.fleet.pause()
        assert control["a"].heard == []
        assert (await control.rb.fleet.send(State())).is_complete
        assert [worker.worker for worker in (await control.rb.fleet.state()).workers] == ["a"]


# When the controller repeats a command to workers that have not answered.


SUBJECTS = Subjects("f")


def answer(status: AckStatus) -> Msg:
    """Return the ack of worker `w` for the command `c`."""
    ack = Ack(id="c", command="pause", worker="w", incarnation="w-1", model="m", status=status)
    return Msg(cast(Client, None), subject=SUBJECTS.ack("me", "w"), data=encode_json(ack))


async def test_new_acks_delay_the_repeat_of_a_command() -> None:
    """Each new ack delays the repeat of a command, up to a maximum. A repeated ack does not delay it."""
    asker = AckCollector(cast(Connection, None), SUBJECTS, "me")
    with asker.expecting(AckTracker("pause", "c", [presence(worker="w", incarnation="w-1", model="m")], 0.0)):
        [under_way] = asker._under_way.values()
        under_way.published_at = -1000.0
        assert under_way.repeat_at == -1000.0 + REPEAT_S
        asker.receive(answer(AckStatus.ACCEPTED))
        heard_at = under_way.news_at
        asker.receive(answer(AckStatus.ACCEPTED))
        assert under_way.news_at == heard_at
        assert under_way.repeat_at == -1000.0 + MAX_REPEAT_S
        under_way.published_at = heard_at - REPEAT_S / 2
        assert under_way.repeat_at == heard_at + REPEAT_S


async def test_endless_new_acks_do_not_prevent_the_repeat_of_a_lost_command(
    nats_url: str, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of new acks does not prevent the repeat of a lost command."""
    monkeypatch.setattr(controller, "REPEAT_S", 3600.0)
    monkeypatch.setattr(controller, "MAX_REPEAT_S", 0.1)
    async with controlled(nats_url, fleet, "a") as control:
        control["a"].reply = lambda _: (ACCEPTED, APPLIED) if len(control["a"].heard) > 2 else ()

        assert (await control.rb.fleet.pause()).is_complete


# In a large fleet, all workers change their state at once.


async def test_presence_that_has_arrived_together_makes_one_snapshot() -> None:
    """A snapshot has all workers, so a client makes one for all presence that it has received."""
    made: list[object] = []
    watcher = PresenceWatcher(cast(Connection, None), SUBJECTS, print, lambda: made.append(watcher.snapshot))
    for name in "abc":
        watcher.receive(Msg(cast(Client, None), SUBJECTS.presence(name), data=encode_json(presence(worker=name))))
    await until_true(lambda: len(made) > 0)
    assert len(made) == 1


# In a large fleet, every worker answers every command and every query.


COUNT = 64


async def test_all_workers_of_a_large_fleet_ack_pause_and_resume(nats_url: str, fleet: str) -> None:
    """All workers apply pause and resume with separate acks.

    Only the named worker applies a command for one worker.
    """
    async with (
        observing(nats_url, fleet) as observer,
        many_workers(nats_url, fleet, "w", COUNT) as workers,
        rollbus.connect(nats_url, fleet=fleet) as rb,
    ):
        await rb.fleet.wait_for_workers(COUNT)
        accepted: list[str] = []
        ledgers = [
            await rb.fleet.pause(on_ack=lambda ack: accepted.append(ack.worker) if _is_accepted(ack) else None),
            await rb.fleet.resume(),
        ]
        alone = await rb.fleet.pause(workers=["w7"])
        paused = [worker.presence().worker for worker in workers if worker.presence().pause_mode is not None]
        await rb.fleet.resume()
        trace = await rb.fleet.timelines("nothing", timeout_s=SOON_S)
        await observer.check_at_rest()

    names = {f"w{i}" for i in range(COUNT)}
    assert [set(ledger.applied) for ledger in ledgers] == [names, names]
    assert [ledger.epochs for ledger in (*ledgers, alone)] == [{"synthetic": 1}, {"synthetic": 2}, {"synthetic": 3}]
    assert sorted(accepted) == sorted(names)
    assert (trace.workers_asked, trace.workers_answered, trace.silent, trace.timelines) == (COUNT, COUNT, {}, ())
    assert (set(alone.applied), paused) == ({"w7"}, ["w7"])


def _is_accepted(ack: Ack) -> bool:
    return ack.status is AckStatus.ACCEPTED
