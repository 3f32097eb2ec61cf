"""Which workers live, from their announcements and a clock."""

import pytest
from msgspec.structs import replace

from bus.protocol.fleet_view import LEASE_MARGIN_S, FleetView
from schemas.errors import InvalidRequest, NoWorkers
from schemas.presence import WorkerState
from tests.support.presences import capabilities, presence

HERE = presence(worker="a", lease_s=5.0)


def test_a_lease_has_a_margin() -> None:
    """A worker is gone when its lease and the margin are over: by then it has fenced itself."""
    view = FleetView()
    view.update(HERE, 100.0)

    assert view.expire(105.0 + LEASE_MARGIN_S - 0.01) == []
    [gone] = view.expire(105.0 + LEASE_MARGIN_S)
    assert (gone.worker, gone.incarnation, gone.is_final) == ("a", "1", True)
    assert view.workers() == ()
    assert view.expire(1000.0) == []


def test_leases_start_anew_when_nobody_could_be_heard() -> None:
    """After an outage of one's own, every worker has a whole lease to speak again."""
    view = FleetView()
    view.update(HERE, 100.0)
    view.renew_all(200.0)

    assert view.expire(204.0) == []
    assert len(view.expire(206.0)) == 1


@pytest.mark.parametrize("state", [WorkerState.STOPPED, WorkerState.FAILED])
def test_a_worker_that_says_goodbye_is_gone(state: WorkerState) -> None:
    """Its last word ends it, whatever its incarnation."""
    view = FleetView()
    view.update(HERE, 0.0)
    gone = view.update(replace(HERE, state=state, incarnation="2"), 1.0)

    assert gone is not None
    assert gone.is_final
    assert view.workers() == ()


def test_a_new_incarnation_ends_the_old_one() -> None:
    """The worker lives on; what its old life had is lost."""
    view = FleetView()
    assert view.update(HERE, 0.0) is None
    assert view.update(HERE, 1.0) is None
    gone = view.update(replace(HERE, incarnation="2"), 2.0)

    assert gone is not None
    assert (gone.incarnation, gone.is_final) == ("1", False)
    assert view.update(replace(HERE, incarnation="2"), 3.0) is None


def test_a_fenced_worker_has_given_up_what_it_had() -> None:
    """`fenced` ends the incarnation and keeps the worker, which does not serve until it comes back."""
    view = FleetView()
    view.update(HERE, 0.0)
    gone = view.update(replace(HERE, state=WorkerState.FENCED), 1.0)

    assert gone is not None
    assert (gone.incarnation, gone.is_final) == ("1", False)
    assert view.serving() == ()
    assert len(view.workers()) == 1


def test_a_snapshot_stays_the_same_until_something_matters() -> None:
    """A heartbeat makes no new snapshot; a worker that comes, goes or changes its state does."""
    view = FleetView()
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
    assert (first.is_served("m"), second.is_served("m")) == (True, False)


def test_a_model_is_found() -> None:
    """The only model needs no name; of several one must be named; a wrong name hears the right ones."""
    view = FleetView()
    view.update(HERE, 0.0)
    assert view.snapshot.resolve_model(None) == view.snapshot.resolve_model("m") == "m"
    view.update(replace(HERE, worker="b", model="n"), 0.0)
    assert view.snapshot.resolve_model("n") == "n"
    with pytest.raises(InvalidRequest, match="model is missing; allowed: one of m, n"):
        view.snapshot.resolve_model(None)
    with pytest.raises(InvalidRequest, match="model is 'x'; allowed: one of m, n"):
        view.snapshot.resolve_model("x")


def test_a_model_that_nobody_serves_now_says_what_its_workers_do() -> None:
    """A worker that is there but does not serve is named in the error."""
    view = FleetView()
    view.update(replace(HERE, state=WorkerState.STARTING), 0.0)
    view.update(replace(HERE, worker="b", model="n"), 0.0)

    with pytest.raises(NoWorkers, match=r"no live worker serves m \(a is starting\)"):
        view.snapshot.resolve_model("m")


@pytest.mark.parametrize("state", [WorkerState.PAUSED, WorkerState.UPDATING])
def test_a_paused_or_updating_worker_is_there_for_requests(state: WorkerState) -> None:
    """Requests for its model may wait for it; it does not count as serving."""
    view = FleetView()
    view.update(replace(HERE, state=state), 0.0)

    assert view.snapshot.resolve_model(None) == "m"
    assert view.serving("m") == ()


@pytest.mark.parametrize("state", [s for s in WorkerState if s.value not in {"serving", "paused", "updating"}])
def test_any_other_worker_is_not_there_for_requests(state: WorkerState) -> None:
    """A worker that is drained, asleep, outdated, poisoned or the like is nobody to wait for."""
    view = FleetView()
    view.update(replace(HERE, state=state), 0.0)

    assert not view.snapshot.is_served("m")


def test_the_newest_target_counts() -> None:
    """The version that a model's workers should have is the newest that any of them has read."""
    view = FleetView()
    assert view.target_version("m") is None
    view.update(HERE, 0.0)
    assert view.target_version("m") is None
    view.update(replace(HERE, worker="b", target_version=3), 0.0)
    view.update(replace(HERE, worker="c", target_version=4), 0.0)
    view.update(replace(HERE, worker="d", model="n", target_version=9), 0.0)

    assert view.target_version("m") == 4


def of_roles(**roles: str) -> FleetView:
    """Serving workers by name, each with its role, and its connector behind a colon where that is not x."""
    view = FleetView()
    for worker, given in roles.items():
        role, _, connector = given.partition(":")
        model = capabilities(role=role, kv_connector=connector or "x")
        view.update(replace(HERE, worker=worker, capabilities=model), 0.0)
    return view


def test_prefill_workers_serve_no_model_by_themselves() -> None:
    """A fleet of them alone serves nothing, and says why; beside others they do not count as serving."""
    alone = of_roles(p="prefill")
    assert (alone.snapshot.served, alone.serving("m")) == ((), ())
    with pytest.raises(NoWorkers, match=r"\(p is there for prefill alone\)"):
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
def test_prefill_workers_are_those_whose_kv_can_be_read(
    roles: dict[str, str], prefillers: dict[str, tuple[str, ...]]
) -> None:
    """Some serving decode worker has their connector; without any decode worker nobody is asked to prefill."""
    assert of_roles(**roles).snapshot.prefillers == prefillers


def test_a_paused_prefill_worker_gets_nothing() -> None:
    """Nor does any while all decode workers are paused."""
    for worker, left in (("p", {"m": ()}), ("d", {})):
        view = of_roles(p="prefill", d="decode")
        paused = view.get(worker)
        assert paused is not None
        view.update(replace(paused, state=WorkerState.PAUSED), 1.0)
        assert view.snapshot.prefillers == left
