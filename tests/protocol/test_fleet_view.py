"""A client's view of the fleet, from presences and a clock, and the requests that wait for a worker."""

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.leases import LEASE_MARGIN_S
from rollbus.bus.protocol.fleet.presence import (
    MAX_GIVEN_UP,
    MAX_NAMESAKES,
    FleetSnapshot,
    LostWorker,
    PresenceTable,
    Survivor,
    UnservedModels,
    WaitLimit,
)
from rollbus.schemas.errors import InvalidRequest, NoWorkers
from rollbus.schemas.presence import WorkerPresence, WorkerState
from tests.support.fleet import capabilities, presence

HERE = presence(worker="a", lease_s=5.0)


def table_of(*presences: WorkerPresence, now: float = 0.0) -> PresenceTable:
    """Return a table that has these presences."""
    view = PresenceTable()
    for each in presences:
        view.update(each, now)
    return view


@pytest.mark.proves("P64")
def test_a_worker_is_lost_after_its_lease_and_the_margin() -> None:
    """A worker is lost after its lease and the margin. By then it has fenced itself."""
    view = table_of(HERE, now=100.0)

    assert view.expire(105.0 + LEASE_MARGIN_S - 0.01) == []
    [gone] = view.expire(105.0 + LEASE_MARGIN_S)
    assert (gone.worker, gone.incarnation, gone.is_final) == ("a", "1", True)
    assert view.workers() == ()
    assert view.expire(1000.0) == []


@pytest.mark.proves("P65")
def test_leases_restart_after_an_outage_of_the_client() -> None:
    """After an outage of the client, each worker has a whole lease to publish presence again."""
    view = table_of(HERE, now=100.0)
    view.restart_leases(200.0)

    assert view.expire(204.0) == []
    assert len(view.expire(206.0)) == 1


@pytest.mark.parametrize("state", [WorkerState.STOPPED, WorkerState.FAILED])
def test_a_final_presence_ends_a_worker(state: WorkerState) -> None:
    """A final presence ends a worker with any incarnation."""
    view = table_of(HERE)
    gone = view.update(replace(HERE, state=state, incarnation="2"), 1.0)

    assert isinstance(gone, LostWorker)
    assert gone.is_final
    assert view.workers() == ()


def test_a_new_incarnation_ends_the_earlier_incarnation() -> None:
    """A new incarnation keeps the worker, and the requests of its earlier incarnation are lost."""
    view = PresenceTable()
    assert view.update(HERE, 0.0) is None
    assert view.update(HERE, 1.0) is None
    gone = view.update(replace(HERE, incarnation="2"), 2.0)

    assert isinstance(gone, LostWorker)
    assert (gone.incarnation, gone.is_final) == ("1", False)
    assert view.update(replace(HERE, incarnation="2"), 3.0) is None


def test_a_fence_ends_the_incarnation_and_keeps_the_worker() -> None:
    """`fenced` ends the incarnation and keeps the worker, which does not serve until it is serving again."""
    view = table_of(HERE)
    gone = view.update(replace(HERE, state=WorkerState.FENCED), 1.0)

    assert isinstance(gone, LostWorker)
    assert (gone.incarnation, gone.is_final) == ("1", False)
    assert view.serving() == ()
    assert len(view.workers()) == 1


def test_all_workers_are_removed_once() -> None:
    """The table is empty after all workers were removed. To remove them again changes nothing."""
    view = table_of(HERE)
    [gone] = view.remove_all("no server")
    empty = view.snapshot

    assert (gone.worker, gone.reason, view.workers()) == ("a", "no server", ())
    assert view.remove_all("no server") == []
    assert view.snapshot is empty


def test_silence_failure_and_restart_are_deaths_but_a_stop_and_a_fence_are_not() -> None:
    """Silence, `failed` and a restart under the same name count as deaths. A stop and a fence do not."""
    later = replace(HERE, incarnation="2")
    cases = [
        (replace(HERE, state=WorkerState.FAILED), True),
        (replace(later, uptime_s=0.5), True),
        (replace(HERE, state=WorkerState.STOPPED), False),
        (replace(HERE, state=WorkerState.FENCED), False),
        (replace(later, uptime_s=2.0), False),
    ]
    for heard, is_death in cases:
        view = table_of(HERE)
        gone = view.update(heard, 1.0)
        assert isinstance(gone, LostWorker)
        assert gone.is_death is is_death

    view = table_of(HERE)
    assert [gone.is_death for gone in view.expire(100.0)] == [True]


def test_a_restart_after_a_fence_is_no_second_death() -> None:
    """The restart of a fenced worker is no death, because the worker had no requests after its fence."""
    view = table_of(HERE)
    view.update(replace(HERE, incarnation="2", state=WorkerState.FENCED), 1.0)
    gone = view.update(replace(HERE, incarnation="3", uptime_s=0.5), 2.0)

    assert isinstance(gone, LostWorker)
    assert not gone.is_death


@pytest.mark.parametrize(("uptime_s", "has_survived"), [(101.0, True), (90.0, False)])
def test_a_process_that_started_before_its_silence_has_survived(uptime_s: float, has_survived: bool) -> None:
    """A worker whose lease expired has survived if its process started before its last presence."""
    view = table_of(HERE, now=5.0)
    view.expire(100.0)
    change = view.update(replace(HERE, incarnation="2", uptime_s=uptime_s), 100.0)

    assert change == (Survivor("a", "1") if has_survived else None)
    assert view.update(replace(HERE, incarnation="2", uptime_s=uptime_s + 1), 101.0) is None


def test_requests_wait_for_a_worker_that_starts() -> None:
    """Requests may wait for a starting worker as long as it announces, although it accepts no requests yet."""
    view = PresenceTable()
    starting = replace(HERE, state=WorkerState.STARTING, start_left_s=5.0)
    view.update(starting, 0.0)
    assert "m" in view.snapshot.awaited
    assert "other" not in view.snapshot.awaited
    assert "m" not in view.snapshot.served

    for late in (replace(starting, start_left_s=0.0), replace(starting, start_left_s=None)):
        view.update(late, 1.0)
        assert "m" not in view.snapshot.awaited
    view.update(HERE, 2.0)
    assert "m" in view.snapshot.awaited


def test_only_new_lost_or_changed_workers_make_a_new_snapshot() -> None:
    """A heartbeat makes no new snapshot. A new, lost or changed worker does."""
    view = PresenceTable()
    empty = view.snapshot
    view.update(HERE, 0.0)
    first = view.snapshot
    view.update(replace(HERE, in_flight=3, free_slots=0), 1.0)
    assert view.snapshot is first
    view.update(replace(HERE, state=WorkerState.FENCED), 2.0)
    second = view.snapshot
    view.expire(100.0)

    assert empty.workers == () == view.snapshot.workers
    assert first is not empty
    assert (first.served, second.served) == (("m",), ())


def test_a_request_needs_a_model_name_only_if_there_are_several_models() -> None:
    """A request needs a model name only if there are several models.

    The error for a wrong name lists the valid names.
    """
    view = table_of(HERE)
    assert view.snapshot.resolve_model(None) == view.snapshot.resolve_model("m") == "m"
    view.update(replace(HERE, worker="b", model="n"), 0.0)
    assert view.snapshot.resolve_model("n") == "n"
    with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, n"):
        view.snapshot.resolve_model(None)
    with pytest.raises(InvalidRequest, match="model is 'x'; allowed: one of m, n"):
        view.snapshot.resolve_model("x")


def test_the_error_for_an_unserved_model_lists_its_workers_and_their_states() -> None:
    """The error for a model without a serving worker names the workers and their states."""
    view = table_of(replace(HERE, state=WorkerState.STARTING), replace(HERE, worker="b", model="n"))

    with pytest.raises(NoWorkers, match=r"no live worker serves m \(a is starting\)"):
        view.snapshot.resolve_model("m")


@pytest.mark.parametrize("state", WorkerState)
def test_requests_wait_only_for_workers_that_serve_now_or_soon(state: WorkerState) -> None:
    """Requests wait for a serving, paused or updating worker, and only the first of them counts as serving."""
    view = table_of(replace(HERE, state=state))

    assert view.snapshot.served == (("m",) if state.value in {"serving", "paused", "updating"} else ())
    assert bool(view.serving("m")) == (state is WorkerState.SERVING)


def test_the_target_version_of_a_model_is_the_newest_announced_version() -> None:
    """The target version of a model is the newest that any of its workers announces."""
    view = PresenceTable()
    assert view.target_version("m") is None
    view.update(HERE, 0.0)
    assert view.target_version("m") is None
    view.update(replace(HERE, worker="b", target_version=3), 0.0)
    view.update(replace(HERE, worker="c", target_version=4), 0.0)
    view.update(replace(HERE, worker="d", model="n", target_version=9), 0.0)

    assert view.target_version("m") == 4


def of_roles(**roles: str) -> PresenceTable:
    """Return a table of serving workers by name, each with "role" or "role:connector"; the default connector is x."""
    view = PresenceTable()
    for worker, given in roles.items():
        role, _, connector = given.partition(":")
        model = capabilities(role=role, kv_connector=connector or "x")
        view.update(replace(HERE, worker=worker, capabilities=model), 0.0)
    return view


def test_prefill_workers_serve_no_model_by_themselves() -> None:
    """A fleet of only prefill workers serves no model, and the error explains it.

    Beside other workers, prefill workers do not count as serving.
    """
    alone = of_roles(p="prefill")
    assert (alone.snapshot.served, alone.serving("m")) == ((), ())
    with pytest.raises(NoWorkers, match=r"\(p is serving prefill phases only\)"):
        alone.snapshot.resolve_model("m")

    both = of_roles(p="prefill", d="decode", b="both")
    assert both.snapshot.served == ("m",)
    assert [worker.worker for worker in both.serving("m")] == ["b", "d"]


@pytest.mark.parametrize(
    ("roles", "prefillers"),
    [
        ({"b": "both", "p": "prefill"}, {}),
        ({"d": "decode"}, {"m": ()}),
        ({"d": "decode", "p": "prefill", "q": "prefill", "b": "both"}, {"m": ("p", "q")}),
        ({"d": "decode", "p": "prefill:y", "q": "prefill"}, {"m": ("q",)}),
        ({"d": "decode", "e": "decode:y", "p": "prefill:y", "q": "prefill"}, {"m": ("p", "q")}),
    ],
)
def test_prefill_workers_need_a_decode_worker_with_the_same_connector(
    roles: dict[str, str], prefillers: dict[str, tuple[str, ...]]
) -> None:
    """Prefill workers need a serving decode worker with the same connector.

    Without a decode worker, no request is prefilled separately.
    """
    assert of_roles(**roles).snapshot.prefillers == prefillers


def test_a_paused_prefill_worker_gets_no_request() -> None:
    """A paused prefill worker gets no request, and no prefill worker does while all decode workers are paused."""
    for worker, left in (("p", {"m": ()}), ("d", {})):
        view = of_roles(p="prefill", d="decode")
        paused = view.get(worker)
        view.update(replace(paused, state=WorkerState.PAUSED), 1.0)
        assert view.snapshot.prefillers == left


OLD = presence(worker="a", incarnation="1", uptime_s=100.0, lease_s=5.0)
NEW = presence(worker="a", incarnation="2", uptime_s=3.0, lease_s=5.0)


def test_of_two_workers_with_one_id_the_older_stays_in_the_table() -> None:
    """If two workers have one id, the table stops changing after both have announced again, and no worker is lost."""
    view = PresenceTable()
    gone = [view.update(worker, now) for now, worker in enumerate([OLD, NEW, OLD, NEW, OLD, NEW])]
    settled = view.snapshot
    for now in range(6, 20):
        view.update(NEW if now % 2 else OLD, now)

    # The first presence of the second worker looks like a death, which the table revokes.
    assert [type(one) for one in gone if one is not None] == [LostWorker, Survivor]
    assert view.snapshot is settled
    assert [worker.incarnation for worker in settled.workers] == ["1"]
    assert view.incarnations_of("a") == {"1", "2"}
    assert view.incarnations() == {("a", "1"), ("a", "2")}


@pytest.mark.parametrize(("ends", "stays"), [(OLD, NEW), (NEW, OLD)])
@pytest.mark.parametrize("how", ["stopped", "silent"])
def test_when_one_of_two_workers_with_one_id_ends_the_other_stays(
    ends: WorkerPresence, stays: WorkerPresence, how: str
) -> None:
    """If one of two workers with one id ends, only its incarnation is lost."""
    view = PresenceTable()
    for worker in (OLD, NEW, OLD, NEW):
        view.update(worker, 0.0)
    if how == "stopped":
        last = view.update(replace(ends, state=WorkerState.STOPPED), 1.0)
        gone = [last] if isinstance(last, LostWorker) else []
    else:
        view.update(stays, 5.0)
        gone = view.expire(5.0 + LEASE_MARGIN_S)

    assert [(one.incarnation, one.is_final) for one in gone] == [(ends.incarnation, False)]
    assert [worker.incarnation for worker in view.workers()] == [stays.incarnation]
    assert view.incarnations_of("a") == {stays.incarnation}


def test_a_restarted_worker_replaces_its_earlier_incarnation() -> None:
    """A restarted worker replaces its earlier incarnation.

    A late `stopped` of the earlier incarnation does not end the new one.
    """
    view = table_of(OLD)
    gone = view.update(NEW, 1.0)
    late = view.update(replace(OLD, state=WorkerState.STOPPED), 1.1)

    assert (gone.incarnation, late) == ("1", None)
    assert [worker.incarnation for worker in view.workers()] == ["2"]


def test_a_worker_that_was_stopped_for_long_does_not_end_its_successor() -> None:
    """If a stopped process continues and fences itself, another process that has its id meanwhile stays."""
    stays = replace(NEW, host="h", pid=2)
    view, fenced = table_of(OLD, stays), replace(OLD, incarnation="3", state=WorkerState.FENCED, host="h", pid=1)
    for late in (fenced, fenced, replace(fenced, state=WorkerState.FAILED)):
        assert view.update(late, 1.0) is None
    assert view.workers() == (stays,)
    gone = view.update(replace(fenced, incarnation="4", pid=2), 2.0)
    assert (gone.incarnation, view.snapshot.serving) == ("2", frozenset())


def test_the_number_of_incarnations_with_one_id_is_bounded() -> None:
    """The number of incarnations with one id is bounded, and further ones are ignored."""
    view = PresenceTable()
    for _ in range(3):
        for number in range(40):
            view.update(replace(OLD, incarnation=str(number), uptime_s=float(number)), 0.0)

    assert len(view.incarnations_of("a")) <= 1 + MAX_NAMESAKES


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
