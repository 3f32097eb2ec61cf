"""The result of a command: which workers answered it, and how."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.command_result import MAX_NAMED, AckTracker, CommandIncomplete, Quorum
from rollbus.bus.protocol.fleet.presence import LostWorker
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.presence import WorkerPresence
from rollbus.schemas.weights import UpdateTiming
from tests.support import presences

ID = "command-1"


def presence(worker: str, incarnation: str = "1") -> WorkerPresence:
    """Return the presence of a serving worker."""
    return presences.presence(worker=worker, incarnation=incarnation)


def ack(worker: str, status: AckStatus, incarnation: str = "1", **fields: object) -> Ack:
    """Return an ack of the command."""
    return Ack(
        id=ID,
        command="pause",
        worker=worker,
        incarnation=incarnation,
        model="m",
        status=status,
        **fields,  # type: ignore[arg-type]
    )


def tracker_of(*workers: str) -> AckTracker:
    """Return a tracker of acks that these workers owe since second 100."""
    return AckTracker("pause", ID, [presence(worker) for worker in workers], 100.0)


def test_a_command_is_complete_after_each_required_worker_has_applied_the_command() -> None:
    """A command is complete when each required worker has applied it. The result has its duration."""
    asked = tracker_of("a", "b")
    for worker in ("a", "b"):
        assert asked.add_ack(ack(worker, AckStatus.ACCEPTED))
        assert asked.add_ack(ack(worker, AckStatus.APPLIED))

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
    asked.add_ack(ack("a", AckStatus.APPLIED))
    asked.add_ack(ack("b", status))
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
    asked.add_ack(ack("a", AckStatus.ACCEPTED))
    asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"))
    ledger = asked.result(160.0)

    assert asked.owing == ("a", "b")
    assert ledger.late["a"].stage == "loading"
    assert ledger.missing == {"b": "it did not answer within 60.0 s"}


def test_a_repeated_ack_changes_nothing() -> None:
    """A repeated ack changes nothing, and no answer changes a final answer."""
    asked = tracker_of("a", "b")
    assert asked.add_ack(ack("a", AckStatus.ACCEPTED))
    assert not asked.add_ack(ack("a", AckStatus.ACCEPTED))
    assert asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"))
    assert not asked.add_ack(ack("a", AckStatus.PROGRESS, stage="loading"))
    assert not asked.add_ack(ack("a", AckStatus.ACCEPTED))
    assert asked.add_ack(ack("a", AckStatus.PROGRESS, stage="verifying"))
    assert asked.add_ack(ack("a", AckStatus.APPLIED))
    for status in (AckStatus.APPLIED, AckStatus.FAILED, AckStatus.PROGRESS):
        assert not asked.add_ack(ack("a", status))

    assert set(asked.result(101.0).applied) == {"a"}


def test_an_unknown_status_of_a_later_release_is_not_final() -> None:
    """An unknown status of a later release is not final."""
    asked = tracker_of("a")
    asked.add_ack(ack("a", AckStatus.UNKNOWN))

    assert asked.owing == ("a",)
    assert set(asked.result(101.0).late) == {"a"}


def test_answers_of_other_workers_and_to_other_commands_are_ignored() -> None:
    """An answer of another worker and an answer to another command are ignored."""
    asked = tracker_of("a")

    assert not asked.add_ack(ack("b", AckStatus.APPLIED))
    assert not asked.add_ack(replace(ack("a", AckStatus.APPLIED), id="other"))
    assert asked.owing == ("a",)
    assert set(asked.result(101.0).missing) == {"a"}


def test_an_answer_to_another_command_under_the_same_id_is_a_failure() -> None:
    """An answer to another command under the same id counts as a failure.

    The worker knows the id from that command and did not run this one.
    """
    asked = tracker_of("a")
    assert asked.add_ack(replace(ack("a", AckStatus.APPLIED), command="resume"))

    ledger = asked.result(101.0)
    assert asked.is_settled
    error = ledger.failed["a"].error
    assert error.code is ControlCode.INVALID_COMMAND
    assert error.message == "the id belongs to another command, resume; allowed: a new id for each command"


def test_a_lost_worker_that_owes_an_answer_is_missing_immediately() -> None:
    """A lost worker that owes an answer is missing immediately, with the reason, and gets no repetition."""
    asked = tracker_of("a", "b")
    asked.add_ack(ack("a", AckStatus.ACCEPTED))
    asked.add_ack(ack("b", AckStatus.APPLIED))

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
    asked.add_ack(ack("b", AckStatus.APPLIED, incarnation="2"))

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
    assert asked.add_ack(ack("a", AckStatus.APPLIED))

    assert asked.result(101.0).is_complete
    assert asked.lost == {}


def test_the_error_lists_each_failed_worker_with_its_reason() -> None:
    """The error lists each worker that did not apply the command with its reason, in one line."""
    asked = tracker_of("a", "b", "c", "d", "e")
    error = AckError(code=ControlCode.BAD_SOURCE, message="model.safetensors is truncated")
    asked.add_ack(ack("a", AckStatus.APPLIED))
    asked.add_ack(ack("b", AckStatus.FAILED, error=error))
    asked.add_ack(ack("c", AckStatus.PROGRESS, stage="loading"))
    asked.mark_lost(LostWorker("d", "1", "m", "its lease expired"))
    asked.add_ack(ack("e", AckStatus.STALE))
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
        asked.add_ack(ack(name, AckStatus.FAILED, error=error))
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
        elif asked.add_ack(ack(worker, what, incarnation)) and what.is_final:
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
    asked.add_ack(ack("a", AckStatus.APPLIED))
    asked.add_ack(ack("b", AckStatus.FAILED))
    waited_for_more = not asked.is_settled
    asked.add_ack(ack("c", AckStatus.APPLIED))

    assert waited_for_more
    assert asked.is_settled


def test_workers_outside_the_quorum_do_not_make_a_command_partial() -> None:
    """Workers outside the quorum are listed with their answers.

    Only a failure of a worker in the quorum makes the result incomplete.
    """
    asked = AckTracker("pause", ID, [presence(name) for name in "abc"], 100.0, Quorum(workers=frozenset("a")))
    asked.add_ack(ack("b", AckStatus.FAILED))
    asked.add_ack(ack("c", AckStatus.PROGRESS, stage="fetching"))
    waited_for_a = not asked.is_settled
    asked.add_ack(ack("a", AckStatus.APPLIED))
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
