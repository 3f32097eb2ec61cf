"""The result of a command: which workers answered it, and how."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.authority import MAX_NAMED
from rollbus.bus.protocol.fleet.canary import dissenters
from rollbus.bus.protocol.fleet.command_result import (
    AckTracker,
    CommandIncomplete,
    Quorum,
    Roster,
    workers_that_must_ack,
)
from rollbus.bus.protocol.fleet.presence import LostWorker
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import AnyCommand, FinishWeightUpdate, LoadLora, Pause, State, UnloadLora, UpdateWeights
from rollbus.schemas.errors import ControlCode, InvalidRequest, NoWorkers
from rollbus.schemas.presence import WorkerPresence, WorkerState
from rollbus.schemas.weights import Canary, UpdateTiming, WeightSource
from tests.support import fleet
from tests.support.fleet import capabilities

ID = "command-1"


def presence(worker: str, incarnation: str = "1") -> WorkerPresence:
    """Return the presence of a serving worker."""
    return fleet.presence(worker=worker, incarnation=incarnation)


def ack(worker: str, status: AckStatus, incarnation: str = "1", **fields: object) -> Ack:
    """Return an ack of the command."""
    return fleet.ack(id=ID, worker=worker, status=status, incarnation=incarnation, **fields)


def tracker_of(*workers: str) -> AckTracker:
    """Return a tracker of acks that these workers owe since second 100."""
    return AckTracker("pause", ID, [presence(worker) for worker in workers], 100.0)


def test_a_command_is_complete_after_each_required_worker_has_applied_the_command() -> None:
    """A command is complete when each required worker has applied it. The result has its duration."""
    asked = tracker_of("a", "b")
    for worker in ("a", "b"):
        assert asked.add_ack(ack(worker, AckStatus.ACCEPTED), 100.0)
        assert asked.add_ack(ack(worker, AckStatus.APPLIED), 100.0)

    assert asked.owing == ()
    ledger = asked.result(100.5, {"m": 7})
    assert ledger.is_complete
    assert (set(ledger.applied), ledger.epochs, ledger.seconds) == ({"a", "b"}, {"m": 7}, 0.5)


@pytest.mark.parametrize(
    ("status", "column"),
    [(AckStatus.FAILED, "failed"), (AckStatus.UNSUPPORTED, "unsupported"), (AckStatus.STALE, "stale")],
)
def test_a_worker_that_did_not_apply_the_command_makes_the_result_incomplete(status: AckStatus, column: str) -> None:
    """Each other final answer has its own column and makes the result incomplete."""
    asked = tracker_of("a", "b")
    asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)
    asked.add_ack(ack("b", status), 100.0)
    ledger = asked.result(101.0)

    assert asked.owing == ()
    assert not ledger.is_complete
    assert set(getattr(ledger, column)) == {"b"}


def test_a_result_without_workers_is_not_complete() -> None:
    """A result without workers is not complete."""
    assert not tracker_of().result(101.0).is_complete


def test_a_worker_without_a_final_answer_is_late_and_without_an_ack_missing() -> None:
    """A worker without a final answer is late, with its last ack, and a worker without an ack is missing.

    Both get the command again.
    """
    asked = tracker_of("a", "b")
    asked.add_ack(ack("a", AckStatus.ACCEPTED), 100.0)
    asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"), 100.0)
    ledger = asked.result(160.0)

    assert asked.owing == ("a", "b")
    assert ledger.late["a"].stage == "loading"
    assert ledger.missing == {"b": "it did not answer within 60.0 s"}


def test_a_repeated_ack_changes_nothing() -> None:
    """A repeated ack changes nothing, and no answer changes a final answer."""
    asked = tracker_of("a", "b")
    assert asked.add_ack(ack("a", AckStatus.ACCEPTED), 100.0)
    assert not asked.add_ack(ack("a", AckStatus.ACCEPTED), 100.0)
    assert asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"), 100.0)
    assert not asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"), 100.0)
    assert not asked.add_ack(ack("a", AckStatus.ACCEPTED), 100.0)
    assert asked.add_ack(ack("a", AckStatus.PROGRESS, stage="verifying"), 100.0)
    assert asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)
    for status in (AckStatus.APPLIED, AckStatus.FAILED, AckStatus.PROGRESS):
        assert not asked.add_ack(ack("a", status), 100.0)

    assert set(asked.result(101.0).applied) == {"a"}


def test_answers_of_other_workers_and_to_other_commands_are_ignored() -> None:
    """An answer of another worker and an answer to another command are ignored."""
    asked = tracker_of("a")

    assert not asked.add_ack(ack("b", AckStatus.APPLIED), 100.0)
    assert not asked.add_ack(replace(ack("a", AckStatus.APPLIED), id="other"), 100.0)
    assert asked.owing == ("a",)
    assert set(asked.result(101.0).missing) == {"a"}


def test_an_answer_to_another_command_under_the_same_id_is_a_failure() -> None:
    """An answer to another command under the same id counts as a failure.

    The worker knows the id from that command and did not run this one.
    """
    asked = tracker_of("a")
    assert asked.add_ack(replace(ack("a", AckStatus.APPLIED), command="resume"), 100.0)

    ledger = asked.result(101.0)
    assert asked.is_settled
    error = ledger.failed["a"].error
    assert error.code is ControlCode.INVALID_COMMAND
    assert error.message == "the id belongs to another command, resume; allowed: a new id for each command"


def test_a_lost_worker_that_owes_an_answer_is_missing_immediately() -> None:
    """A lost worker that owes an answer is missing immediately, with the reason, and gets no repetition."""
    asked = tracker_of("a", "b")
    asked.add_ack(ack("a", AckStatus.ACCEPTED), 100.0)
    asked.add_ack(ack("b", AckStatus.APPLIED), 100.0)

    assert asked.mark_lost(LostWorker("a", "1", "m", "its lease expired"))
    assert not asked.mark_lost(LostWorker("b", "1", "m", "its lease expired"))
    assert asked.owing == ()
    ledger = asked.result(101.0)
    assert (ledger.missing, set(ledger.applied), ledger.late) == ({"a": "its lease expired"}, {"b"}, {})


@pytest.mark.proves("P76")
def test_a_worker_with_a_new_incarnation_is_missing() -> None:
    """A worker with a new incarnation is missing, whether its presence or its ack shows the change first."""
    asked = tracker_of("a", "b")
    asked.mark_lost(LostWorker("a", "1", "m", "it came back as a new incarnation", is_final=False))
    asked.add_ack(ack("b", AckStatus.APPLIED, incarnation="2"), 100.0)

    assert asked.result(101.0).missing == dict.fromkeys("ab", "it came back as a new incarnation")


def test_the_end_of_an_earlier_incarnation_does_not_matter() -> None:
    """The end of an earlier incarnation does not affect the incarnation that owes an answer."""
    asked = AckTracker("pause", ID, [presence("a", "2")], 100.0)

    assert not asked.mark_lost(LostWorker("a", "1", "m", "it came back as a new incarnation", is_final=False))
    assert asked.owing == ("a",)


def test_a_worker_that_was_marked_lost_can_still_answer() -> None:
    """A worker that was marked lost and then answers in the same incarnation has answered."""
    asked = tracker_of("a")
    asked.mark_lost(LostWorker("a", "1", "m", "its lease expired"))
    assert asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)

    assert asked.result(101.0).is_complete
    assert asked.lost == {}


def test_the_error_lists_each_failed_worker_with_its_reason() -> None:
    """The error lists each worker that did not apply the command with its reason, in one line."""
    asked = tracker_of("a", "b", "c", "d", "e")
    error = AckError(code=ControlCode.BAD_SOURCE, message="model.safetensors is truncated")
    asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)
    asked.add_ack(ack("b", AckStatus.FAILED, error=error), 100.0)
    asked.add_ack(ack("c", AckStatus.PROGRESS, stage="loading"), 100.0)
    asked.mark_lost(LostWorker("d", "1", "m", "its lease expired"))
    asked.add_ack(ack("e", AckStatus.STALE), 100.0)
    ledger = asked.result(101.0)
    problem = CommandIncomplete(ledger, "Nothing was changed.")
    assert problem.headline == "pause was applied by 1 of 5 workers. Nothing was changed."
    assert (
        repr(ledger)
        == f"<CommandResult pause: 1 applied, 1 failed, 1 stale, 1 late, 1 missing in {ledger.seconds:.2f} s>"
    )

    assert problem.ledger is ledger
    assert str(problem) == (
        "pause was applied by 1 of 5 workers: b failed: bad_source: model.safetensors is truncated; e is stale: its "
        "ack has no reason; c is late: loading; d is missing: its lease expired. Nothing was changed."
    )


def test_the_error_of_a_large_fleet_stays_short() -> None:
    """For a large fleet, the error lists some workers and counts the others."""
    names = [f"w{i:03}" for i in range(200)]
    asked = tracker_of(*names)
    error = AckError(code=ControlCode.ENGINE_ERROR, message="x" * 900)
    for name in names:
        asked.add_ack(ack(name, AckStatus.FAILED, error=error), 100.0)
    text = str(CommandIncomplete(asked.result(101.0)))

    assert text.endswith(f"and {200 - MAX_NAMED} more")
    assert len(text) < 4000


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abc"), st.sampled_from(list(AckStatus)), st.sampled_from("12")),
        st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from("12")),
    ),
    max_size=20,
)


@given(EVENTS)
def test_each_required_worker_is_in_exactly_one_column(events: Sequence[tuple[str, AckStatus | bool, str]]) -> None:
    """After any events, each required worker is in exactly one column, and no worker leaves a final column."""
    asked = tracker_of("a", "b")
    final: dict[str, AckStatus] = {}
    for worker, what, incarnation in events:
        if isinstance(what, bool):
            asked.mark_lost(LostWorker(worker, incarnation, "m", "gone", is_final=what))
        elif asked.add_ack(ack(worker, what, incarnation), 100.0) and what.is_final:
            assert worker not in final
            final[worker] = what
    ledger = asked.result(101.0)
    answered = [ledger.applied, ledger.failed, ledger.unsupported, ledger.stale]
    ended = {worker: answer.status for column in answered for worker, answer in column.items()}

    assert ended == final
    assert sorted([*ended, *ledger.late, *ledger.missing]) == ["a", "b"]
    assert ledger.is_complete == (len(ledger.applied) == 2)


def test_a_quorum_is_met_by_any_workers_that_applied_the_command() -> None:
    """A quorum of a number is met by any workers that applied the command. Failures do not count."""
    asked = AckTracker("pause", ID, [presence(name) for name in "abc"], 100.0, Quorum(count=2))
    asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)
    asked.add_ack(ack("b", AckStatus.FAILED), 100.0)
    waited_for_more = not asked.is_settled
    asked.add_ack(ack("c", AckStatus.APPLIED), 100.0)

    assert waited_for_more
    assert asked.is_settled


def test_workers_outside_the_quorum_do_not_make_a_command_partial() -> None:
    """Workers outside the quorum are listed with their answers.

    Only a failure of a worker in the quorum makes the result incomplete.
    """
    asked = AckTracker("pause", ID, [presence(name) for name in "abc"], 100.0, Quorum(workers=frozenset("a")))
    asked.add_ack(ack("b", AckStatus.FAILED), 100.0)
    asked.add_ack(ack("c", AckStatus.PROGRESS, stage="fetching"), 100.0)
    waited_for_a = not asked.is_settled
    asked.add_ack(ack("a", AckStatus.APPLIED), 100.0)
    result = asked.result(101.0)

    assert waited_for_a
    assert asked.is_settled
    assert result.is_complete
    assert (result.not_awaited, list(result.failed), list(result.late)) == (("b", "c"), ["b"], ["c"])
    assert not replace(result, not_awaited=("c",)).is_complete


def test_the_pause_of_a_fleet_lasts_from_the_first_pause_to_the_last_resume() -> None:
    """The pause of a fleet lasts from the first pause to the last resume, computed from the arrival of the acks.

    A worker answers when its engine resumes.
    """
    asked = AckTracker("update_weights", ID, [presence(name) for name in "abc"], 100.0)
    for name, paused_s, now in (("a", 1.0, 102.0), ("b", 0.5, 104.0)):
        done = replace(ack(name, AckStatus.APPLIED), command="update_weights", timing=UpdateTiming(paused_s=paused_s))
        asked.add_ack(done, now)
    assert asked.result(105.0).paused_s == 3.0

    asked.add_ack(replace(ack("c", AckStatus.APPLIED), command="update_weights"), 104.5)
    assert asked.result(105.0).paused_s is None


# Which workers must answer a command.


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


# Detection of workers whose weights differ from the majority's, by their canaries.


GOOD = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))
CLOSE = Canary(token_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3004))
BAD = Canary(token_ids=(1, 9, 3), logprobs=(-0.1, -2.2, -0.3))
WORSE = Canary(token_ids=(7, 9, 3), logprobs=(-1.1, -2.2, -0.3))


def acks(signature: str = "cpu", **canaries: Canary | None) -> dict[str, Ack]:
    """Return acks of workers of one kind with these canaries."""
    return {
        worker: ack(worker, AckStatus.APPLIED, canary=canary, signature=signature)
        for worker, canary in canaries.items()
    }


def differing(found: dict[str, Ack], dtype: str = "float32") -> list[str]:
    """Return the ids of the workers that differ."""
    return sorted(dissenters(found, dict.fromkeys(found, dtype)))


OFF = replace(GOOD, logprobs=(-0.1, -0.3, -0.3))


@pytest.mark.parametrize(
    ("found", "dtype", "expected"),
    [
        # Equal or nearly equal canaries agree, and a single worker never differs.
        (acks(a=GOOD, b=CLOSE, c=GOOD), "float32", ""),
        (acks(a=BAD), "float32", ""),
        ({}, "float32", ""),
        # Without a majority, no result is known to be correct.
        (acks(a=GOOD, b=BAD), "float32", "ab"),
        (acks(a=GOOD, b=BAD, c=WORSE), "float32", "abc"),
        (acks(a=GOOD, b=GOOD, c=BAD, d=BAD), "float32", "abcd"),
        # Another device computes other values.
        (acks("cpu", a=GOOD, b=GOOD) | acks("gpu", c=BAD), "float32", ""),
        # A worker without a canary neither differs nor counts.
        (acks(a=None, b=GOOD, c=None), "float32", ""),
        # A difference that is an error in float32 may be rounding in bfloat16. A wrong model differs in both.
        (acks(a=GOOD, b=OFF, c=GOOD), "float32", "b"),
        (acks(a=GOOD, b=OFF, c=GOOD), "bfloat16", ""),
        (acks(a=GOOD, b=WORSE, c=GOOD), "bfloat16", "b"),
    ],
)
def test_workers_differ_from_the_majority_of_their_kind(found: dict[str, Ack], dtype: str, expected: str) -> None:
    """Of the workers of one kind, those that differ from the majority are found, and all of them without one."""
    assert differing(found, dtype) == list(expected)


def test_workers_of_other_dtypes_are_not_compared() -> None:
    """Workers whose weights have different dtypes compute different values."""
    assert dissenters(acks(a=GOOD, b=BAD), {"a": "float32", "b": "bfloat16"}) == {}


def test_the_worker_in_the_minority_is_named_with_the_reason() -> None:
    """The worker in the minority differs, and the reason describes the difference."""
    found = acks(a=GOOD, b=BAD, c=CLOSE)

    assert differing(found) == ["b"]
    [why] = dissenters(found, dict.fromkeys(found, "float32")).values()
    assert why.startswith("its canary differs from the majority's: the tokens differ from number 1 on")


def test_a_large_fleet_of_differing_workers_is_compared_in_bounded_time() -> None:
    """If all workers of a large fleet differ, the comparison takes bounded time and does not compare each pair."""
    found: dict[str, Ack] = {}
    for i in range(300):
        found |= {f"w{i}": replace(acks(a=GOOD)["a"], canary=replace(GOOD, token_ids=(i, 1, 2)))}

    assert len(differing(found)) == 300
