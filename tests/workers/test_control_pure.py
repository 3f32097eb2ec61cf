"""A worker's decisions about commands, without a bus: the due register, the worker state and the single final ack."""

import itertools
from unittest.mock import Mock

import pytest

from rollbus.bus.protocol.states import WorkerEvent
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import (
    AnyCommand,
    Drain,
    FinishWeightUpdate,
    FlushCache,
    Pause,
    Recorded,
    Resume,
    Sleep,
    State,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from rollbus.schemas.errors import ControlCode, ControlError
from rollbus.schemas.limits import MAX_ERROR_CHARS, MAX_SEEN_COMMANDS
from rollbus.schemas.messages import encode_json
from rollbus.schemas.weights import WeightSource
from rollbus.workers.config import WorkerConfig
from rollbus.workers.control.acks import CommandLog, ReceivedCommand
from rollbus.workers.control.commands import CommandHandler
from rollbus.workers.control.desired import (
    HandledRegister,
    PendingRegister,
    RegisterOutcome,
    failure,
    next_due,
    target_event,
)

UPDATE = UpdateWeights(version=2, source=WeightSource(path="/w"))
BAD = failure(ControlError(ControlCode.BAD_SOURCE, "no"))


def recorded(*commands: AnyCommand) -> dict[str, Recorded]:
    """Return these commands, recorded from epoch 1 on."""
    return {str(command.register): Recorded(epoch=epoch, command=command) for epoch, command in enumerate(commands, 1)}


def test_registers_are_applied_in_the_order_of_recording() -> None:
    """The due register is the unhandled one with the lowest epoch. A handled register is not due, also if it failed."""
    effective = recorded(UPDATE, Pause(), FlushCache())
    dealt: dict[str, HandledRegister] = {}
    order = []
    while (due := next_due(effective, dealt)) is not None:
        order.append(due.register)
        dealt[due.register] = HandledRegister(effective[due.register].epoch, BAD)

    assert order == ["weights", "pause", "flush"]


def test_a_register_that_was_set_again_is_due_again() -> None:
    """A register is due if its epoch differs from the handled one, also if the register was set back."""
    effective = recorded(Resume(), Pause())

    assert next_due(effective, {"pause": HandledRegister(1, RegisterOutcome())}) == PendingRegister(
        "pause", effective["pause"]
    )
    assert next_due(effective, {"pause": HandledRegister(2, BAD)}) is None
    assert next_due(effective, {"pause": HandledRegister(-1, RegisterOutcome())}) == PendingRegister(
        "pause", effective["pause"]
    )


def test_a_register_in_staging_does_not_delay_other_registers() -> None:
    """A register in staging is not due, whatever its epoch is. Registers recorded later are applied meanwhile."""
    effective = recorded(UPDATE, Pause())

    assert next_due(effective, {}, {"weights"}) == PendingRegister("pause", effective["pause"])
    handled = {"pause": HandledRegister(2, RegisterOutcome())}
    assert next_due(effective, handled, {"weights"}) is None
    assert next_due(effective, handled) == PendingRegister("weights", effective["weights"])


def test_the_adapter_that_weights_end_is_unloaded_after_them() -> None:
    """Weights come before the end of the adapter that they replace, also while they wait for their source."""
    effective = recorded(UPDATE) | {"lora:m": Recorded(epoch=1, command=UnloadLora(name="m"))}

    assert next_due(effective, {}) == PendingRegister("weights", effective["weights"])
    assert next_due(effective, {}, {"weights"}) is None
    handled = {"weights": HandledRegister(1, BAD)}
    assert next_due(effective, handled) == PendingRegister("lora:m", effective["lora:m"])


def test_a_register_that_is_no_longer_desired_is_undone_first() -> None:
    """A handled register that is no longer desired is undone before others are applied."""
    assert next_due(recorded(Pause()), {"sleep": HandledRegister(7, RegisterOutcome())}) == PendingRegister(
        "sleep", None
    )


@pytest.mark.parametrize(
    ("commands", "outcomes", "expected"),
    [
        ([], {}, WorkerEvent.CAUGHT_UP),
        ([Resume(), UPDATE, Wake()], {}, WorkerEvent.CAUGHT_UP),
        ([Pause()], {}, WorkerEvent.PAUSED),
        ([Pause()], {"pause": BAD}, WorkerEvent.PAUSED),
        ([Drain()], {}, WorkerEvent.DRAINED),
        ([Sleep()], {}, WorkerEvent.SLEPT),
        ([Sleep()], {"sleep": BAD}, WorkerEvent.CAUGHT_UP),
        ([Sleep(), Pause()], {}, WorkerEvent.SLEPT),
        ([Sleep(), Drain()], {}, WorkerEvent.DRAINED),
        ([UPDATE], {"weights": BAD}, WorkerEvent.MISSED),
        ([UPDATE, Pause()], {"weights": BAD}, WorkerEvent.MISSED),
        ([FinishWeightUpdate(version=2)], {"weights": BAD}, WorkerEvent.STRANDED),
        ([FlushCache()], {"flush": BAD}, WorkerEvent.CAUGHT_UP),
    ],
)
def test_the_state_of_a_worker_follows_from_its_registers(
    commands: list[AnyCommand], outcomes: dict[str, RegisterOutcome], expected: WorkerEvent
) -> None:
    """A reason that forbids serving has priority over a command that stops serving.

    A failed pause counts as a pause, and a failed sleep does not count as a sleep.
    """
    effective = recorded(*commands)
    dealt = {
        name: HandledRegister(item.epoch, outcomes.get(name, RegisterOutcome())) for name, item in effective.items()
    }

    assert target_event(effective, dealt, is_poisoned=False) is expected
    assert target_event(effective, dealt, is_poisoned=True) is WorkerEvent.SPOILT


@pytest.mark.parametrize("is_poisoned", [False, True])
@pytest.mark.parametrize("commands", [[UPDATE], [UPDATE, Pause()], [UPDATE, Drain()]])
def test_weights_whose_content_is_gone_make_a_worker_outdated(commands: list[AnyCommand], is_poisoned: bool) -> None:
    """A worker is outdated if its source holds other content, whether or not its weights were replaced before.

    New weights in staging may end that.
    """
    error = ControlError(ControlCode.OTHER_CONTENT, "it now holds other content")
    effective = recorded(*commands)
    dealt = {name: HandledRegister(item.epoch, RegisterOutcome()) for name, item in effective.items()}
    failed = {**dealt, "weights": HandledRegister(effective["weights"].epoch, failure(error))}

    assert target_event(effective, failed, is_poisoned=is_poisoned) is WorkerEvent.MISSED
    assert target_event(effective, dealt, is_poisoned=is_poisoned, has_conflict=True) is WorkerEvent.MISSED
    assert target_event({}, {}, is_poisoned=is_poisoned, has_conflict=True) is WorkerEvent.MISSED
    staging = target_event({}, {}, is_poisoned=is_poisoned, has_conflict=True, staging=["weights"])
    assert staging is None


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([UPDATE], None),
        ([Resume(), UPDATE], None),
        ([UPDATE, Pause()], WorkerEvent.PAUSED),
        ([UPDATE, Drain()], WorkerEvent.DRAINED),
        ([UPDATE, Sleep()], WorkerEvent.SLEPT),
    ],
)
def test_a_worker_that_stages_recorded_weights_never_serves(
    commands: list[AnyCommand], expected: WorkerEvent | None
) -> None:
    """While recorded weights are staged, a worker is paused, drained or asleep as desired, but never serves."""
    effective = recorded(*commands)
    handled = {
        name: HandledRegister(item.epoch, RegisterOutcome()) for name, item in effective.items() if name != "weights"
    }

    assert target_event(effective, handled, is_poisoned=False, staging={"weights"}) is expected
    assert target_event(effective, handled, is_poisoned=True, staging={"weights"}) is expected
    assert target_event(effective, handled, is_poisoned=True, staging={"lora:a"}) is WorkerEvent.SPOILT


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ControlCode.UNSUPPORTED, AckStatus.UNSUPPORTED),
        (ControlCode.STALE, AckStatus.STALE),
        (ControlCode.HALF_WRITTEN, AckStatus.FAILED),
    ],
)
def test_a_final_ack_is_unsupported_stale_or_failed(code: ControlCode, status: AckStatus) -> None:
    """The final ack is `unsupported`, `stale`, or `failed` for all other errors. Its message is truncated."""
    outcome = failure(ControlError(code, "x" * 2 * MAX_ERROR_CHARS))

    assert outcome.status is status
    assert len(outcome.error.message) == MAX_ERROR_CHARS


def ack_of(heard: ReceivedCommand, status: AckStatus) -> Ack:
    """Return an ack of a command."""
    command = heard.command
    return Ack(id=command.id, command=command.command, worker="w", incarnation="i", model="m", status=status)


def begun(log: CommandLog, command_id: str) -> ReceivedCommand:
    """Return a command that was just received."""
    heard = log.add(Pause(id=command_id), "boss", 0.0)
    assert heard is not None
    return heard


@pytest.mark.proves("P18")
def test_only_the_first_final_ack_of_a_command_is_sent() -> None:
    """Only the first final ack of a command is sent. It is kept for repeated commands."""
    finals = [status for status in AckStatus if status.is_final]
    for first, second in itertools.product(finals, AckStatus):
        log = CommandLog()
        heard = begun(log, "c")
        assert log.add_ack(heard, ack_of(heard, AckStatus.ACCEPTED))
        assert log.add_ack(heard, ack_of(heard, first))
        assert not log.add_ack(heard, ack_of(heard, second))

        assert log.find("c") is heard
        assert heard.last.status is first
        assert log.under_way == []


def test_the_numbers_of_running_and_ended_commands_are_bounded() -> None:
    """The number of running commands is bounded. Of the ended commands, the oldest is removed."""
    log = CommandLog()
    heard = [begun(log, f"c{number}") for number in range(MAX_SEEN_COMMANDS)]
    assert log.add(Pause(id="one-more"), "boss", 0.0) is None
    for item in heard:
        log.add_ack(item, ack_of(item, AckStatus.APPLIED))
    last = begun(log, "last")
    log.add_ack(last, ack_of(last, AckStatus.APPLIED))

    assert log.find("c0") is None
    assert log.find("c1") is heard[1]
    assert log.find("last") is last


def test_commands_that_a_fence_removed_leave_room() -> None:
    """Commands that waited behind a slow one when the worker was fenced leave their room to later commands."""
    acks = Mock(log=CommandLog())
    config = WorkerConfig(nats_url="", model="m", worker_id="w")
    handler = CommandHandler(config, Mock(), Mock(), Mock(), acks, Mock())
    for _ in range(2):
        for number in range(MAX_SEEN_COMMANDS):
            handler._receive("c", encode_json(State(id=f"c{number}")), None)
        assert len(acks.log.under_way) == MAX_SEEN_COMMANDS
        handler.fence()


def test_after_a_fence_a_worker_acks_no_earlier_commands() -> None:
    """After a fence, a worker sends no ack for earlier commands, except repeated final acks."""
    log = CommandLog()
    ended, open_one = begun(log, "ended"), begun(log, "open")
    log.add_ack(ended, ack_of(ended, AckStatus.APPLIED))
    log.clear()

    assert not log.add_ack(open_one, ack_of(open_one, AckStatus.APPLIED))
    assert log.find("open") is None
    assert log.find("ended") is ended
