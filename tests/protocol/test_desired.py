"""The desired state of workers: how commands change it, presence behind it, and which reads of it count."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.desired import (
    STALE_S,
    ReadOrder,
    ReadVerdict,
    base_adapter,
    check_unload,
    cleared,
    desired_loras,
    effective,
    may_come_back,
    next_lora_version,
    record,
    served_version,
    set_back,
    shows_ack,
    stale_workers,
    target_version,
)
from rollbus.schemas import limits
from rollbus.schemas.control import (
    AnyCommand,
    DesiredState,
    Drain,
    FinishWeightUpdate,
    FlushCache,
    LoadLora,
    Pause,
    Resume,
    Sleep,
    State,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.messages import decode_desired, encode_json
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import WeightSource
from tests.support.fleet import ack, presence

EMPTY = DesiredState(model="m")
ONE = WeightSource(path="/ckpt/1")
TWO = WeightSource(path="/ckpt/2")


def recorded(*commands: AnyCommand, state: DesiredState = EMPTY) -> DesiredState:
    """Return the state after these commands."""
    for command in commands:
        state, _ = record(state, command)
    return state


def test_a_command_is_stored_as_it_was_recorded() -> None:
    """A register contains the command with its epoch and model. The epoch counts the commands."""
    state, epoch = record(EMPTY, Pause(id="p", mode="wait"))
    state, next_epoch = record(state, FlushCache(id="f"))

    assert (epoch, next_epoch, state.epoch) == (1, 2, 2)
    assert state.registers["pause"].command == Pause(id="p", mode="wait", epoch=1, model="m")
    assert state.registers["flush"].epoch == 2


@pytest.mark.proves("P73")
def test_a_command_with_a_known_id_does_not_change_the_state() -> None:
    """A command with a known id leaves the state unchanged and returns its first epoch, also after other commands."""
    state = recorded(Pause(id="p"), Resume(id="r"))

    assert record(state, Pause(id="p")) == (state, 1)
    assert record(state, Pause(id="p"))[0] is state


def test_remembered_commands_are_bounded() -> None:
    """The state discards the oldest command ids, so a command with a discarded id counts as new."""
    state = recorded(*(Pause(id=f"p{i}") for i in range(limits.MAX_SEEN_COMMANDS + 1)))

    assert len(state.seen) == limits.MAX_SEEN_COMMANDS
    assert record(state, Pause(id="p0"))[1] == state.epoch + 1
    assert record(state, Pause(id="p1"))[1] == 2


def test_pause_resume_and_drain_share_a_register() -> None:
    """The last of pause, resume and drain counts, and so does the last of sleep and wake."""
    state = recorded(Pause(), Drain(), Resume(), Sleep(), Wake())

    assert {name: r.command.command for name, r in state.registers.items()} == {"pause": "resume", "sleep": "wake"}


def test_one_off_commands_and_commands_for_another_model_are_refused() -> None:
    """A command without a register and a command for another model cannot be recorded."""
    for command in (State(), Pause(model="n")):
        with pytest.raises(ControlError) as caught:
            record(EMPTY, command)
        assert caught.value.code is ControlCode.INVALID_COMMAND


def test_a_command_for_some_workers_counts_only_for_these_workers() -> None:
    """For each register, the later command counts: that for all workers or that for the worker.

    Other workers only have the commands for all.
    """
    state = recorded(Resume(), Pause(workers=("a", "b")), FlushCache())

    assert effective(state, "a")["pause"].command == replace(
        Pause(id=state.seen[1].id), epoch=2, model="m", workers=("a",)
    )
    assert effective(state, "a")["flush"].epoch == 3
    assert effective(state, "c")["pause"].command.command == "resume"


def test_a_command_for_all_workers_removes_commands_for_single_workers() -> None:
    """A command for all workers removes commands for single workers in its register. Their other registers stay."""
    state = recorded(Pause(workers=("a", "b")), FlushCache(workers=("a",)), Resume())

    assert effective(state, "a")["pause"].command.command == "resume"
    assert {worker: set(own) for worker, own in state.workers.items()} == {"a": {"flush"}}


def test_the_number_of_workers_with_their_own_commands_is_bounded() -> None:
    """A command for one more worker than the limit is rejected, and the error names the way out.

    Workers within the limit may get further commands.
    """
    names = tuple(f"w{i}" for i in range(limits.MAX_WORKER_OVERRIDES))
    state = recorded(Pause(workers=names))

    assert recorded(Resume(workers=("w0",)), state=state).epoch == 2
    with pytest.raises(ControlError, match="to all workers of the model, or a reset"):
        record(state, Pause(workers=("other",)))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (UpdateWeights(version=1, source=TWO), "version 1 is older than the recorded 2"),
        (UpdateWeights(version=2, source=ONE), "version 2 is recorded already, from /ckpt/2"),
        (UpdateWeights(version=1, source=TWO, workers=("a",)), "version 1 is older than the recorded 2"),
        (FinishWeightUpdate(version=1), "version 1 is older than the recorded 2"),
        (FinishWeightUpdate(version=2), "version 2 is recorded already, from /ckpt/2"),
    ],
)
def test_older_weights_are_refused_without_allow_rollback(
    command: UpdateWeights | FinishWeightUpdate, message: str
) -> None:
    """Without `allow_rollback`, a version cannot decrease and cannot have a second source."""
    state = recorded(UpdateWeights(version=2, source=TWO))

    with pytest.raises(ControlError, match=message) as caught:
        record(state, command)
    assert caught.value.code is ControlCode.OLD_VERSION
    assert target_version(recorded(replace(command, allow_rollback=True), state=state), "a") == command.version


def test_the_same_weights_may_be_recorded_again() -> None:
    """The same version from the same source may be recorded again, so that failed workers retry."""
    again = UpdateWeights(version=2, source=TWO)

    assert recorded(UpdateWeights(version=2, source=TWO), again).epoch == 2


def test_a_command_for_all_workers_is_refused_if_one_worker_has_newer_weights() -> None:
    """A command for all workers with a version below that of a single worker is rejected as older."""
    state = recorded(UpdateWeights(version=5, source=TWO, workers=("a",)))

    with pytest.raises(ControlError, match="older than the recorded 5"):
        record(state, UpdateWeights(version=4, source=ONE))
    assert target_version(recorded(UpdateWeights(version=4, source=ONE, workers=("b",)), state=state), "b") == 4


def test_weights_by_transfer_are_another_source() -> None:
    """A checkpoint cannot have the version of weights that a transfer engine sent."""
    state = recorded(FinishWeightUpdate(version=3))

    assert target_version(state, "a") == 3
    with pytest.raises(ControlError, match="recorded already, from a transfer engine"):
        record(state, UpdateWeights(version=3, source=ONE))


def test_the_target_version_of_a_worker_is_that_of_its_recorded_weights() -> None:
    """A worker's target version is that of its weights in the state, or None without recorded weights."""
    assert target_version(None, "a") is None
    assert target_version(recorded(Pause()), "a") is None
    state = recorded(UpdateWeights(version=1, source=ONE), UpdateWeights(version=2, source=TWO, workers=("a",)))
    assert (target_version(state, "a"), target_version(state, "b")) == (2, 1)


def test_each_adapter_has_a_register() -> None:
    """Loading or unloading an adapter leaves the other adapters. The next version is one above the highest recorded."""
    state = recorded(
        LoadLora(name="x", source=ONE, version=4), LoadLora(name="y", source=TWO, workers=("a",)), UnloadLora(name="z")
    )

    assert set(effective(state, "a")) == {"lora:x", "lora:y", "lora:z"}
    assert next_lora_version(state, "lora:x") == 5
    assert next_lora_version(state, "lora:y") == 1
    assert next_lora_version(state, "lora:new") == 1


def test_an_adapter_that_was_unloaded_gets_a_new_version() -> None:
    """A version of an adapter is never assigned twice, however often the adapter is loaded and unloaded."""
    state, versions = EMPTY, []
    for _ in range(4):
        for _ in range(2):
            versions.append(next_lora_version(state, "lora:x"))
            state = recorded(LoadLora(name="x", source=ONE, version=versions[-1]), state=state)
        state = recorded(UnloadLora(name="x"), state=state)

    assert versions == sorted(set(versions))


def test_the_number_of_adapters_is_bounded() -> None:
    """Loading one more adapter than the limit is rejected. Of unloaded adapters, the oldest are removed."""
    loads = [LoadLora(name=f"x{i}", source=ONE) for i in range(limits.MAX_LORAS)]
    state = recorded(*loads)
    with pytest.raises(ControlError, match=f"{limits.MAX_LORAS + 1} adapters"):
        record(state, LoadLora(name="more", source=ONE))

    state = recorded(*(UnloadLora(name=f"y{i}") for i in range(limits.MAX_LORAS + 2)), state=state)
    assert len(state.registers) == 2 * limits.MAX_LORAS
    assert not {"lora:y0", "lora:y1"} & state.registers.keys()
    assert "lora:x0" in state.registers


def test_undoing_a_command_restores_the_earlier_register() -> None:
    """Undoing a command restores or removes its register in a new epoch.

    Workers then notice the change and treat the command as superseded.
    """
    before = recorded(UpdateWeights(version=1, source=ONE))
    after = recorded(UpdateWeights(version=2, source=TWO), state=before)
    back = set_back(after, before, "weights", 2)

    assert back.epoch == 3
    assert back.registers["weights"].epoch == 3
    assert back.registers["weights"].command == replace(before.registers["weights"].command, epoch=3)
    first = recorded(UpdateWeights(version=2, source=TWO))
    assert set_back(first, EMPTY, "weights", 1).registers == {}
    assert set_back(first, EMPTY, "weights", 1).epoch == 2


def test_undoing_a_command_restores_commands_for_single_workers() -> None:
    """Undoing a command for all workers restores the commands for single workers.

    Undoing a command for one worker affects only that worker.
    """
    before = recorded(Sleep(), Wake(workers=("a",)), Sleep(workers=("b",)))
    for command, undone in ((Sleep(id="s"), {"a", "b"}), (Sleep(id="s", workers=("a",)), {"a"})):
        after, epoch = record(before, command)
        back = set_back(after, before, "sleep", epoch)
        commands = {worker: effective(back, worker)["sleep"].command.command for worker in ("a", "b", "c")}

        assert commands == {"a": "wake", "b": "sleep", "c": "sleep"}
        assert {worker for worker, own in back.workers.items() if own["sleep"].epoch == back.epoch} == undone


def test_undoing_a_command_leaves_registers_of_later_commands() -> None:
    """Undoing a command leaves a register that a later command has set, also for a single worker."""
    before = recorded(Wake())
    after, epoch = record(before, Sleep(id="s"))

    later = recorded(Wake(), state=after)
    assert set_back(later, before, "sleep", epoch) is later
    own = recorded(Wake(workers=("a",)), state=after)
    back = set_back(own, before, "sleep", epoch)
    assert back.registers["sleep"].command.command == "wake"
    assert back.workers == own.workers


def test_a_superseded_command_may_return_and_an_undone_command_may_not() -> None:
    """A superseded command may return when the later command is undone.

    An undone or cleared command, or one that was never recorded, may not return.
    """
    one, two = (UpdateWeights(id=str(version), version=version, source=ONE) for version in (1, 2))
    first = recorded(one)
    second = recorded(two, state=first)

    assert not may_come_back(EMPTY, one)
    assert may_come_back(second, one)
    assert not may_come_back(set_back(second, first, "weights", 2), two)
    assert not may_come_back(set_back(first, EMPTY, "weights", 1), one)
    assert not may_come_back(cleared(second), one)


def test_clearing_increments_the_epoch_and_keeps_the_known_command_ids() -> None:
    """Clearing removes all registers, increments the epoch and keeps the known command ids."""
    state = recorded(Pause(id="p"), Resume(workers=("a",)))
    empty = cleared(state)

    assert (empty.registers, empty.workers, empty.epoch) == ({}, {}, 3)
    assert record(empty, Pause(id="p")) == (empty, 1)


COMMANDS = st.one_of(
    st.builds(Pause, workers=st.sampled_from([None, ("a",), ("a", "b")])),
    st.builds(Resume, workers=st.sampled_from([None, ("b",)])),
    st.builds(Sleep, workers=st.sampled_from([None, ("a",)])),
    st.builds(
        UpdateWeights,
        version=st.integers(0, 3),
        source=st.sampled_from([ONE, TWO]),
        allow_rollback=st.just(True),
        workers=st.sampled_from([None, ("a",)]),
    ),
    st.builds(UnloadLora, name=st.sampled_from(["x", "y"]), workers=st.sampled_from([None, ("b",)])),
)


@given(st.lists(COMMANDS, max_size=12))
def test_the_last_command_on_a_register_counts(commands: list[AnyCommand]) -> None:
    """For each worker and register, the last command that addresses the worker is in effect, also after encoding."""
    state = recorded(*commands)
    for worker in ("a", "b", "c"):
        last = {
            command.register: (epoch, command.id)
            for epoch, command in enumerate(commands, 1)
            if command.workers is None or worker in command.workers
        }
        assert {name: (r.epoch, r.command.id) for name, r in effective(state, worker).items()} == last
    assert decode_desired(encode_json(state)) == state


@given(st.lists(COMMANDS, max_size=8), COMMANDS)
def test_a_command_and_its_undo_leave_the_commands_of_each_worker_unchanged(
    commands: list[AnyCommand], command: AnyCommand
) -> None:
    """After a command and its undo, each worker's commands are the same as before."""
    before = recorded(*commands)
    after, epoch = record(before, command)
    back = set_back(after, before, command.register or "", epoch)

    for worker in ("a", "b", "c"):
        assert _meaning(back, worker) == _meaning(before, worker)


def _meaning(state: DesiredState, worker: str) -> dict[str, str]:
    return {name: recorded.command.id for name, recorded in effective(state, worker).items()}


def test_the_largest_state_can_be_stored() -> None:
    """A state with the maximum number of commands for single workers stays far below the largest value."""
    names = tuple(f"worker-{i:04}-{'x' * 20}" for i in range(limits.MAX_WORKER_OVERRIDES))
    state = recorded(UpdateWeights(version=1, source=ONE, workers=names))

    assert len(msgspec.json.encode(state)) < 512 * 1024


def test_desired_adapters_are_those_of_all_or_of_single_workers() -> None:
    """Desired adapters are those of all or of single workers, without adapters that are unloaded everywhere."""
    a, b, c = (LoadLora(name=name, source=ONE, version=1) for name in "abc")
    state = recorded(a, replace(b, workers=("w",)), c, UnloadLora(name="c"), UnloadLora(name="a", workers=("v",)))

    assert desired_loras(state) == {"a", "b"}
    assert desired_loras(None) == desired_loras(EMPTY) == frozenset()


CURRENT, STALE, LOST = ReadVerdict.CURRENT, ReadVerdict.STALE, ReadVerdict.LOST


def state(epoch: int, bucket: str = "a", command: str = "c") -> DesiredState:
    """Return a state with this many commands, whose ids begin with `command`."""
    made = DesiredState(model="m", bucket=bucket)
    for number in range(epoch):
        made, _ = record(made, FlushCache(id=f"{command}{number}"))
    return made


@pytest.mark.parametrize(
    ("reads", "verdicts"),
    [
        ([None, None, state(1)], [CURRENT, CURRENT, CURRENT]),
        ([state(1), state(1), state(3)], [CURRENT, CURRENT, CURRENT]),
        # A read from a deposed leader, then from the current leader. The first command was recorded after the
        # deposition.
        ([state(2), state(1), state(2), state(3)], [CURRENT, STALE, CURRENT, CURRENT]),
        ([state(1), None, state(1)], [CURRENT, STALE, CURRENT]),
        # Another bucket, also with more commands.
        ([state(2), state(1, "b")], [CURRENT, LOST]),
        ([state(2), state(5, "b"), state(6, "b")], [CURRENT, LOST, CURRENT]),
        ([state(2), None, state(3, "b")], [CURRENT, STALE, LOST]),
        # Programs without bucket ids write between programs with bucket ids.
        ([state(1, ""), state(2), state(3, ""), state(4, "b")], [CURRENT] * 4),
        ([state(2), state(1, "")], [CURRENT, STALE]),
        # The same bucket was restored from a backup and has other commands since then.
        ([state(3), state(3, command="d")], [CURRENT, LOST]),
        ([state(3), state(2, command="d")], [CURRENT, LOST]),
    ],
)
def test_each_state_is_stale_lost_or_current_compared_with_the_previous_read(
    reads: list[DesiredState | None], verdicts: list[ReadVerdict]
) -> None:
    """An older state is stale, a state of another bucket or history is lost, and all other states are current."""
    order = ReadOrder()

    assert [order.judge(read, 0.0) for read in reads] == verdicts


@pytest.mark.parametrize("older", [state(1), None])
def test_a_state_that_stays_older_for_too_long_is_the_stored_state(older: DesiredState | None) -> None:
    """A state that stays older for too long is the stored state, because no leader is deposed for so long.

    A current read in between restarts the time.
    """
    order = ReadOrder()
    order.judge(state(2), 0.0)

    assert order.judge(older, 1.0) is STALE
    assert order.judge(state(2), STALE_S - 1) is CURRENT
    assert order.judge(older, STALE_S) is STALE
    assert order.judge(older, 2 * STALE_S - 1) is STALE
    assert order.judge(older, 2 * STALE_S) is LOST
    assert order.judge(older, 2 * STALE_S + 1) is CURRENT


def test_presence_is_stale_below_the_epoch_of_a_register_of_its_worker() -> None:
    """A worker is stale until its epoch reaches its registers' epochs. A command for another worker does not count."""
    state, _ = record(DesiredState(model="m"), Pause())
    state, _ = record(state, Drain(workers=("b",)))
    workers = [presence(worker="a", epoch=1), presence(worker="b", epoch=1), presence(worker="c", epoch=0)]

    assert stale_workers(workers, {"m": state}) == ("b", "c")
    assert stale_workers(workers, {}) == ()


@pytest.mark.parametrize("state", ["starting", "fenced", "stopped", "failed"])
def test_a_worker_that_will_read_the_state_before_it_serves_is_not_stale(state: str) -> None:
    """A worker that starts or is fenced has no old effect that a reader could take for the recorded one."""
    desired, _ = record(DesiredState(model="m"), Pause())
    assert stale_workers([presence(state=WorkerState(state))], {"m": desired}) == ()


def test_presence_shows_an_ack_from_its_epoch_on() -> None:
    """Presence of the same incarnation shows an ack from its epoch on. A worker that has ended is not awaited."""
    recorded_ack, one_off = ack(epoch=3), ack(command="abort")

    assert [shows_ack(presence(epoch=epoch), recorded_ack) for epoch in (2, 3, 4)] == [False, True, True]
    assert shows_ack(None, recorded_ack)
    assert shows_ack(presence(incarnation="2", epoch=0), recorded_ack)
    assert shows_ack(presence(epoch=0), one_off)


# Commands on adapters that would have no effect are not recorded.


SOURCE = WeightSource(path="/a")
STATE, _ = record(DesiredState(model="m"), LoadLora(name="x", source=SOURCE, workers=("a",)))


def test_an_adapter_with_the_name_of_its_model_is_refused() -> None:
    """An adapter with its model's name is rejected: requests with that name use the base weights."""
    with pytest.raises(ControlError, match="the name of the model itself") as error:
        record(STATE, LoadLora(name="m", source=SOURCE))
    assert error.value.code is ControlCode.INVALID_COMMAND


@pytest.mark.parametrize(
    ("command", "loaded"),
    [
        (UnloadLora(name="x"), ()),
        (UnloadLora(name="x", workers=("a",)), ()),
        (UnloadLora(name="y"), ("y",)),
    ],
)
def test_an_adapter_that_is_desired_or_loaded_may_be_unloaded(command: UnloadLora, loaded: tuple[str, ...]) -> None:
    """An unload is allowed if a concerned worker has the adapter, or should have it."""
    check_unload(STATE, command, loaded)


@pytest.mark.parametrize("command", [UnloadLora(name="y"), UnloadLora(name="x", workers=("b",))])
def test_an_unknown_adapter_is_named(command: UnloadLora) -> None:
    """An unload of an adapter that no concerned worker has or should have fails by name."""
    with pytest.raises(ControlError, match=f"adapter '{command.name}' is not loaded") as error:
        check_unload(STATE, command, ())
    assert error.value.code is ControlCode.NOT_FOUND


def test_a_repeated_unload_is_not_an_error() -> None:
    """The same command again is allowed: its first recording counts."""
    command = UnloadLora(name="x")
    after, _ = record(STATE, command)
    check_unload(after, command, ())


def under_the_name(version: int, **fields: Any) -> LoadLora:
    """Return the command to load an adapter under the model's name."""
    return LoadLora(name="m", source=SOURCE, version=version, for_base=True, **fields)


def test_an_adapter_for_the_base_has_the_name_of_its_model() -> None:
    """An adapter for the base with another name is rejected."""
    with pytest.raises(ControlError, match="name is 'x'; allowed: 'm'"):
        record(STATE, LoadLora(name="x", source=SOURCE, for_base=True))


def test_versions_under_a_models_name_do_not_go_back() -> None:
    """Weights and adapters under the model's name share one order of versions, which only a rollback breaks."""
    state = recorded(UpdateWeights(version=4, source=SOURCE), under_the_name(5), under_the_name(7), state=STATE)
    assert served_version(state, "a") == 7
    assert target_version(state, "a") == 4
    for command in (
        under_the_name(6),
        replace(under_the_name(7), source=WeightSource(path="/b")),
        UpdateWeights(version=6, source=SOURCE),
        FinishWeightUpdate(version=7),
    ):
        with pytest.raises(ControlError) as error:
            record(state, command)
        assert error.value.code is ControlCode.OLD_VERSION
    assert served_version(recorded(under_the_name(7), state=state), "a") == 7
    back = recorded(UpdateWeights(version=1, source=SOURCE, allow_rollback=True), state=state)
    assert served_version(back, "a") == 1


@pytest.mark.parametrize(
    "command", [UpdateWeights(version=6, source=SOURCE), FinishWeightUpdate(version=6), UnloadLora(name="m")]
)
def test_new_weights_or_an_unload_end_the_adapter_of_the_base(command: AnyCommand) -> None:
    """New weights, by a checkpoint or a transfer, and an unload end the adapter under the model's name, and no other.

    Weights for one worker end it on this worker. An undo restores it with the weights.
    """
    state = recorded(under_the_name(5), state=STATE)
    after, epoch = record(state, command)
    assert desired_loras(after) == {"x"}
    assert base_adapter(effective(after, "a"), "m") is None
    undone = set_back(after, state, command.register or "", epoch)
    assert served_version(undone, "a") == 5
    assert effective(undone, "a").keys() == effective(state, "a").keys()
    one = recorded(replace(command, workers=("a",), id="other"), state=state)
    assert base_adapter(effective(one, "a"), "m") is None
    assert served_version(one, "b") == 5
