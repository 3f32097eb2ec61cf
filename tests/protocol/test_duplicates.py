"""Which of two workers with one id stops, decided from their presences and a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.leases import MAX_PROOF_S, SILENCE_S, TIE_S, DuplicateWatch, OwnIncarnation
from rollbus.schemas.presence import WorkerState
from tests.support.presences import presence

LEASE_S = 5.0
OWN = OwnIncarnation(("me",), held_s=0.0)
OLDER = presence(incarnation="other", held_s=100.0, lease_s=LEASE_S)


def new_watch() -> DuplicateWatch:
    """Return the watch of a worker that starts at 0."""
    return DuplicateWatch(LEASE_S, LEASE_S, 0.0)


def test_a_new_worker_announces_after_a_heartbeat_and_serves_after_a_lease() -> None:
    """A new worker publishes presence after a heartbeat without another worker, and serves after a lease."""
    watch = new_watch()

    assert (watch.announces_in_s(0.0), watch.serves_in_s(0.0)) == (SILENCE_S, LEASE_S)
    assert watch.announces_in_s(SILENCE_S) <= 0 < watch.serves_in_s(SILENCE_S)
    assert watch.serves_in_s(LEASE_S) <= 0


def test_a_worker_with_a_unique_id_serves_immediately() -> None:
    """A worker with a unique id publishes presence and serves immediately."""
    watch = DuplicateWatch(LEASE_S, 0.0, 0.0)

    assert watch.announces_in_s(0.0) <= 0
    assert watch.serves_in_s(0.0) <= 0


def test_a_new_worker_stops_if_another_worker_has_the_id() -> None:
    """A new worker that receives another worker's presence for three seconds stops.

    It publishes no presence meanwhile.
    """
    watch = new_watch()
    heard = [watch.receive(OLDER, OWN, now) for now in (0.5, 1.5, 2.5, 0.5 + MAX_PROOF_S)]

    assert heard == [False, False, False, True]
    assert watch.announces_in_s(SILENCE_S + 2) > 0


@pytest.mark.parametrize("state", [WorkerState.STOPPED, WorkerState.FAILED])
def test_a_worker_that_ends_frees_its_id(state: WorkerState) -> None:
    """The last presence of a worker that ends frees the id."""
    watch = new_watch()
    watch.receive(OLDER, OWN, 0.5)
    watch.receive(OLDER, OWN, 1.5)

    assert not watch.receive(replace(OLDER, state=state), OWN, 4.0)
    assert watch.serves_in_s(LEASE_S) <= 0


def test_a_killed_worker_frees_its_id_after_half_a_lease() -> None:
    """A killed worker frees the id half a lease after its last presence."""
    watch = new_watch()
    watch.receive(OLDER, OWN, 2.4)

    assert watch.serves_in_s(LEASE_S) <= 0
    assert not watch.receive(OLDER, OWN, 2.4 + MAX_PROOF_S)


def test_a_worker_ignores_its_own_presences() -> None:
    """A worker ignores the presences of its current incarnation and of its incarnation before the last fence."""
    watch = new_watch()
    own = OwnIncarnation(("before", "me"), held_s=0.0)
    heard = {
        watch.receive(replace(OLDER, incarnation=name), own, now) for now in (0, 4, 8) for name in own.incarnations
    }

    assert heard == {False}
    assert watch.serves_in_s(LEASE_S) <= 0


def test_a_worker_that_lost_its_lease_stops_for_a_worker_that_served_meanwhile() -> None:
    """A worker that lost its lease stops in favour of a worker that served meanwhile.

    Its uptime does not count any more.
    """
    woken, other = OwnIncarnation(("a", "b"), held_s=0.0), OwnIncarnation(("c",), held_s=30.0)
    fenced = presence(incarnation="b", state=WorkerState.FENCED, uptime_s=1000.0, held_s=0.0)

    assert woken.is_behind(presence(incarnation="c", uptime_s=31.0, held_s=30.0))
    assert woken.is_behind(presence(incarnation="c", uptime_s=1.0, held_s=TIE_S / 10))
    assert not OwnIncarnation(("c",), held_s=TIE_S / 10).is_behind(fenced)
    assert not other.is_behind(fenced)
    assert not other.is_behind(replace(fenced, held_s=None))


def test_the_uptime_counts_for_a_worker_of_an_earlier_release() -> None:
    """For a worker of an earlier release, the uptime counts, because it announces no `held_s`."""
    assert OWN.is_behind(presence(incarnation="x", uptime_s=100.0))
    assert not OwnIncarnation(("me",), held_s=200.0).is_behind(presence(incarnation="x", uptime_s=100.0))


@given(
    st.floats(0, 10),
    st.floats(0, 10) | st.floats(-1.2 * TIE_S, 1.2 * TIE_S),
    st.floats(0, 3),
    st.floats(0, 3),
    st.sampled_from([("a", "b"), ("b", "a")]),
)
def test_at_most_one_of_two_workers_with_one_id_stops(
    held_s: float, ahead_s: float, delay_s: float, back_s: float, names: tuple[str, str]
) -> None:
    """For any times and delays, at most one of two workers stops. Without delays, exactly one stops."""
    first, second = names
    ages = held_s + max(-ahead_s, 0) + 10, held_s + max(ahead_s, 0) + 10

    def is_behind(own: int, name: str, other: str, delay: float) -> bool:
        said = presence(incarnation=other, uptime_s=ages[1 - own], held_s=ages[1 - own] - delay)
        return OwnIncarnation((name,), held_s=ages[own]).is_behind(said)

    behind = is_behind(0, first, second, delay_s), is_behind(1, second, first, back_s)
    assert behind != (True, True)
    if delay_s == back_s == 0:
        assert behind != (False, False)
