"""How long requests wait for a worker while no worker serves their model."""

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.presence import MAX_GIVEN_UP, FleetSnapshot, PresenceTable, UnservedModels, WaitLimit
from rollbus.schemas.errors import NoWorkers
from rollbus.schemas.presence import WorkerState
from tests.support.presences import presence

SERVING = presence()
PAUSED = replace(SERVING, state=WorkerState.PAUSED)
UPDATING = replace(SERVING, state=WorkerState.UPDATING)
STARTING = replace(SERVING, state=WorkerState.STARTING, start_left_s=60.0, last_error="restart 3 of 5 in 8 s")
GRACE_S = 15.0


def followed(*workers: object) -> UnservedModels:
    """Return the models of waiting requests for `m`, followed from time 0."""
    unserved = UnservedModels(GRACE_S)
    unserved.update(["m"], FleetSnapshot(workers), 0.0)  # type: ignore[arg-type]
    return unserved


@pytest.mark.parametrize("worker", [PAUSED, UPDATING, STARTING])
def test_requests_wait_until_their_deadline_for_a_worker_that_comes(worker: object) -> None:
    """A request without a limit waits for a paused, updating or starting worker; a request with a limit waits less."""
    unserved = followed(worker)

    assert unserved.why_not_wait("m", None, 3600.0) is None
    assert unserved.why_not_wait("m", WaitLimit(10.0, 60.0), 69.0) is None
    assert str(unserved.why_not_wait("m", WaitLimit(10.0, 60.0), 70.0)).startswith(
        "no worker has served m for 60 s (w "
    )


def test_the_limit_counts_from_the_later_of_arrival_and_last_service() -> None:
    """A request that waited behind others while a worker served has its whole limit when no worker serves."""
    unserved = followed(SERVING)
    limit = WaitLimit(0.0, 60.0)
    assert unserved.why_not_wait("m", limit, 1000.0) is None

    unserved.update(["m"], FleetSnapshot((PAUSED,)), 1000.0)
    assert unserved.why_not_wait("m", limit, 1059.0) is None
    assert unserved.why_not_wait("m", limit, 1060.0) is not None


def test_an_earlier_wait_counts_in_the_limit() -> None:
    """A request that waited for its model's first worker waits only for the rest of its limit."""
    unserved = followed(PAUSED)
    limit = WaitLimit(0.0, 60.0, waited_s=50.0)

    assert unserved.why_not_wait("m", limit, 9.0) is None
    assert str(unserved.why_not_wait("m", limit, 10.0)).startswith("no worker has served m for 60 s (w ")


@pytest.mark.parametrize(
    "state",
    [WorkerState.DRAINED, WorkerState.OUTDATED, WorkerState.POISONED, WorkerState.WAITING_FOR_WEIGHTS],
)
def test_other_workers_are_no_reason_to_wait(state: WorkerState) -> None:
    """Requests wait only the grace time for a drained, outdated or poisoned worker, or one that waits for weights."""
    unserved = followed(replace(SERVING, state=state))

    assert unserved.why_not_wait("m", None, GRACE_S - 1) is None
    assert unserved.why_not_wait("m", None, GRACE_S) == f"no worker has served m for 15 s (w is {state})"
    assert unserved.why_not_wait("m", None, 1.0, has_grace=False) is not None


def test_after_an_outage_all_times_start_again() -> None:
    """Time in which this process was disconnected does not count."""
    unserved = followed()
    unserved.restart_timers()
    unserved.update(["m"], FleetSnapshot(()), 100.0)

    assert unserved.why_not_wait("m", None, 100.0 + GRACE_S - 1) is None


def test_a_worker_that_is_not_started_again_ends_the_wait_with_its_cause() -> None:
    """When the supervisor has given up the last worker, requests fail at once. While another worker comes, they wait.

    The next worker of the model ends this.
    """
    table = PresenceTable()
    table.update(STARTING, 0.0)
    table.update(replace(STARTING, worker="other"), 0.0)
    given_up = replace(STARTING, state=WorkerState.FAILED, start_left_s=0.0, last_error="ended with exit code 1")
    table.update(given_up, 1.0)
    unserved = UnservedModels(GRACE_S)
    unserved.update(["m"], table.snapshot, 1.0)
    assert unserved.why_not_wait("m", None, 1.0) is None
    assert table.snapshot.resolve_model("m") == "m"

    table.update(replace(given_up, worker="other"), 2.0)
    unserved.update(["m"], table.snapshot, 2.0)
    cause = r"other is not started again: ended with exit code 1"
    assert unserved.why_not_wait("m", None, 2.0) == f"no worker serves m, and none starts ({cause})"
    with pytest.raises(NoWorkers, match=cause):
        table.snapshot.resolve_model("m", ["m"])

    table.update(STARTING, 3.0)
    assert table.snapshot.given_up == {}
    # Its own failure, without a word of its supervisor, leaves the grace time.
    table.update(replace(given_up, start_left_s=None), 4.0)
    unserved.update(["m"], table.snapshot, 4.0)
    assert unserved.why_not_wait("m", None, 5.0) is None


def test_an_error_counts_the_starts_and_repeats_only_the_beginning_of_a_cause() -> None:
    """The text has the number of starts since the worker served and its cause, without control characters."""
    table = PresenceTable()
    for life in range(3):
        table.update(replace(STARTING, incarnation=str(life)), 0.0)
        table.update(replace(STARTING, incarnation=str(life)), 0.0)
    assert table.snapshot.describe_others("m") == " (w is starting, start 3 since it served: restart 3 of 5 in 8 s)"

    table.update(replace(STARTING, incarnation="2", last_error="\x1b[31m" + "x" * 10_000), 0.0)
    assert len(table.snapshot.describe_others("m")) < 400
    assert "\x1b" not in table.snapshot.describe_others("m")
    table.update(replace(SERVING, incarnation="2"), 1.0)
    table.update(replace(STARTING, incarnation="3", last_error=None), 2.0)
    assert table.snapshot.describe_others("m") == " (w is starting)"


def test_forged_failures_of_many_models_are_bounded() -> None:
    """Presence of invented failed workers fills no memory."""
    table = PresenceTable()
    for number in range(MAX_GIVEN_UP + 10):
        table.update(presence(model=f"m{number}", state=WorkerState.FAILED, start_left_s=0.0), 0.0)

    assert len(table.snapshot.given_up) == MAX_GIVEN_UP
    assert table.snapshot.describe_others(None).endswith("more)")
