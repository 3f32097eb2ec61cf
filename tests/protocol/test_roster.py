"""Which workers must answer a command."""

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.command_result import Roster, workers_that_must_ack
from rollbus.schemas.control import AnyCommand, FinishWeightUpdate, LoadLora, Pause, State, UnloadLora, UpdateWeights
from rollbus.schemas.errors import InvalidRequest, NoWorkers
from rollbus.schemas.presence import WorkerState
from rollbus.schemas.weights import WeightSource
from tests.protocol.test_ledger import presence
from tests.support.presences import capabilities

SOURCE = WeightSource(path="/ckpt")
SILENT = {"starting", "fenced", "stopped", "failed"}
A, B = presence("a"), presence("b")
OTHER = replace(presence("c"), model="n")


def ids(roster: Roster) -> dict[str, list[str]]:
    """Return the ids of the workers by model."""
    return {model: [worker.worker for worker in workers] for model, workers in roster.items()}


def test_a_command_addresses_the_workers_of_its_model_or_of_all_models() -> None:
    """A command without a model addresses the workers of all models, and a command with a model those of the model."""
    assert ids(workers_that_must_ack([B, OTHER, A], Pause())) == {"m": ["a", "b"], "n": ["c"]}
    assert ids(workers_that_must_ack([B, OTHER, A], Pause(model="m"))) == {"m": ["a", "b"]}


@pytest.mark.parametrize("state", list(WorkerState))
def test_workers_in_all_states_except_starting_fenced_and_ending_must_answer(state: WorkerState) -> None:
    """Workers in all states must answer, except starting, fenced and ending workers."""
    roster = workers_that_must_ack([A, replace(B, state=state)], Pause())

    assert ids(roster) == {"m": ["a"] if state in SILENT else ["a", "b"]}


def test_a_command_that_no_worker_can_answer_is_an_error() -> None:
    """A command that no worker can answer is an error, which names the states of the workers."""
    with pytest.raises(NoWorkers, match="no live worker of any model can answer"):
        workers_that_must_ack([], Pause())
    with pytest.raises(NoWorkers, match=r"no live worker of m can answer \(a is starting\)"):
        workers_that_must_ack([replace(A, state=WorkerState.STARTING), OTHER], Pause(model="m"))


def test_an_unknown_model_is_an_error() -> None:
    """The error for an unknown model lists the known models."""
    with pytest.raises(InvalidRequest, match="model is 'x'; allowed: one of m, n"):
        workers_that_must_ack([A, OTHER], Pause(model="x"))


def test_the_error_lists_the_named_workers_that_cannot_answer() -> None:
    """The error lists the named workers that are missing, have another model, or cannot answer."""
    assert ids(workers_that_must_ack([A, B, OTHER], Pause(workers=("b", "c")))) == {"m": ["b"], "n": ["c"]}
    with pytest.raises(InvalidRequest, match=r"workers names no live worker: x, y; allowed: "):
        workers_that_must_ack([A, B], Pause(workers=("x", "a", "y")))
    with pytest.raises(InvalidRequest, match=r"workers names no live worker of m: c \(serving, n\); allowed: a \(m\)"):
        workers_that_must_ack([A, OTHER], Pause(model="m", workers=("c",)))
    with pytest.raises(InvalidRequest, match=r"workers names no live worker: b \(fenced, "):
        workers_that_must_ack([A, replace(B, state=WorkerState.FENCED)], Pause(workers=("b",)))


@pytest.mark.parametrize(
    "command",
    [
        UpdateWeights(version=1, source=SOURCE),
        LoadLora(name="x", source=SOURCE),
        UnloadLora(name="x"),
        FinishWeightUpdate(version=1),
    ],
)
def test_with_several_models_a_command_for_weights_must_name_a_model(command: AnyCommand) -> None:
    """With several models, a command for weights must name a model or workers of one model."""
    with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, n"):
        workers_that_must_ack([A, OTHER], command)
    assert set(workers_that_must_ack([A, OTHER], replace(command, model="n"))) == {"n"}
    assert set(workers_that_must_ack([A, OTHER], replace(command, workers=("a",)))) == {"m"}
    assert set(workers_that_must_ack([A, OTHER], State())) == {"m", "n"}


@pytest.mark.parametrize(
    "command",
    [UpdateWeights(model="m", source=SOURCE, version=2, label="step-2"), FinishWeightUpdate(version=2, label="step-2")],
)
def test_a_label_needs_support_by_all_workers_of_the_model(command: UpdateWeights | FinishWeightUpdate) -> None:
    """A label needs support by all workers of the model, because each of them reads the state.

    This includes unnamed and fenced workers.
    """
    new = replace(A, capabilities=capabilities(version_labels=True))
    old = replace(B, capabilities=capabilities(), state=WorkerState.FENCED)
    starting = replace(B, state=WorkerState.STARTING, capabilities=None)

    for wanted in (command, replace(command, workers=("a",))):
        with pytest.raises(
            InvalidRequest, match=r"label is 'step-2', .*without a label, until b are upgraded"
        ) as caught:
            workers_that_must_ack([new, old], wanted)
        assert caught.value.field == "label"
    assert ids(workers_that_must_ack([new, old], replace(command, label=None))) == {"m": ["a"]}
    assert ids(workers_that_must_ack([new, starting], command)) == {"m": ["a"]}
    other = replace(old, model="n")
    assert ids(workers_that_must_ack([new, other], replace(command, model="m"))) == {"m": ["a"]}
