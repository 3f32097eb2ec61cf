"""Leases of workers and clients, with the time as an argument."""

import pytest

from rollbus.bus.protocol.fleet import leases as lease
from rollbus.bus.protocol.fleet.leases import DEFAULT_LEASE_S, MAX_LEASE_S, ClientLeases, EndedIncarnation, WorkerLease
from rollbus.schemas.presence import ClientPresence, ClientState


def presence(
    incarnation: str = "a", *, client: str = "c", state: ClientState = ClientState.LIVE, lease_s: float = 5.0
) -> ClientPresence:
    """Return a client's presence."""
    return ClientPresence(client=client, incarnation=incarnation, state=state, lease_s=lease_s)


def closed(incarnation: str = "a") -> ClientPresence:
    """Return the final presence of a client."""
    return presence(incarnation, state=ClientState.CLOSED)


@pytest.mark.proves("P64")
def test_the_own_lease_of_a_worker_ends_a_margin_early() -> None:
    """A worker's own lease ends a margin before others mark it lost. It counts from the publication of the presence."""
    own = WorkerLease(5.0, 1.0, now=100.0)
    first = [own.is_held(104.0), own.is_held(104.1)]
    own.confirm(103.0)
    second = [own.is_held(107.0), own.is_held(107.1)]

    assert first == second == [True, False]
    assert own.expires_at == 107.0


def test_an_older_confirmation_does_not_shorten_the_lease() -> None:
    """If confirmations arrive out of order, the latest presence counts."""
    own = WorkerLease(5.0, 1.0, now=0.0)
    own.confirm(10.0)
    own.confirm(9.0)

    assert own.expires_at == 14.0


def test_the_next_confirmed_presence_restarts_an_expired_lease() -> None:
    """After an outage, the next confirmed presence starts the lease again."""
    own = WorkerLease(5.0, 1.0, now=0.0)
    over = own.is_held(50.0)
    own.confirm(50.0)

    assert (over, own.is_held(51.0)) == (False, True)


@pytest.mark.parametrize("margin_s", [-1.0, 5.0, 6.0])
def test_a_margin_must_be_shorter_than_its_lease(margin_s: float) -> None:
    """The margin must be shorter than the lease, or the worker has no time to act."""
    with pytest.raises(ValueError, match="less than the lease"):
        WorkerLease(5.0, margin_s, now=0.0)


def test_a_client_expires_after_its_lease_and_the_margin() -> None:
    """An expired client is reported once and not as closed. Each presence restarts the lease."""
    leases = ClientLeases(margin_s=1.0)
    assert leases.renew(presence(), 0.0) == []
    leases.renew(presence(), 3.0)
    ended = [leases.expire(8.9), leases.expire(9.0), leases.expire(99.0)]

    assert ended == [[], [EndedIncarnation("c", "a", "its lease expired", is_closed=False)], []]
    assert leases.is_dead("c", "a")


def test_an_expired_client_that_publishes_again_is_alive() -> None:
    """An expired client that publishes again is alive, and its next requests are accepted."""
    leases = ClientLeases(margin_s=1.0)
    for sign in (lambda: leases.renew_lease("c", "a", 100.0), lambda: leases.renew(presence(), 100.0)):
        leases.renew(presence(), 0.0)
        leases.expire(50.0)
        was_dead = leases.is_dead("c", "a")
        sign()
        assert (was_dead, leases.is_dead("c", "a")) == (True, False)
        assert len(leases.expire(200.0)) == 1
        leases.renew_lease("c", "a", 0.0)


def test_a_closed_client_ends_immediately_and_is_not_revived() -> None:
    """A closed client ends immediately, and later messages do not revive it."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(), 0.0)
    ended = leases.renew(closed(), 1.0)
    leases.renew_lease("c", "a", 2.0)

    assert ended == [EndedIncarnation("c", "a", "it was closed", is_closed=True)]
    assert leases.renew(presence(), 2.0) == []
    assert leases.renew(closed(), 3.0) == []
    assert leases.is_dead("c", "a")


def test_an_expired_client_can_still_be_closed() -> None:
    """A final presence also counts after the lease has expired."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(), 0.0)
    leases.expire(50.0)

    assert leases.renew(closed(), 60.0) == [EndedIncarnation("c", "a", "it was closed", is_closed=True)]


def test_closing_an_unknown_client_ends_no_request() -> None:
    """If an unknown client closes, no request ends. Its requests in the queue are known to have no client."""
    leases = ClientLeases(margin_s=1.0)

    assert leases.renew(closed(), 0.0) == []
    assert leases.is_dead("c", "a")


def test_a_new_incarnation_ends_the_earlier_incarnations() -> None:
    """The first presence of a new incarnation ends the older incarnations for good. Other clients are not affected."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence("a"), 0.0)
    leases.renew(presence("a", client="d"), 0.0)
    leases.renew_lease("c", "heard", 0.0)
    ended = leases.renew(presence("b"), 1.0)
    late = leases.renew(presence("a"), 1.5)
    leases.renew_lease("c", "a", 2.0)

    assert [(end.incarnation, end.is_closed) for end in ended] == [("a", False), ("heard", False)]
    assert late == []
    assert [leases.is_dead(*life) for life in (("c", "a"), ("c", "b"), ("d", "a"))] == [True, False, False]


def test_a_message_of_an_unknown_incarnation_ends_no_other_incarnation() -> None:
    """A message of an unknown incarnation ends no other one, because only a presence shows which one is later."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence("b"), 0.0)
    leases.renew_lease("c", "a", 0.0)
    again = leases.renew(presence("b"), 5.0)
    ended = leases.expire(DEFAULT_LEASE_S + 1.0)

    assert again == []
    assert [end.incarnation for end in ended] == ["a"]


def test_an_expired_incarnation_stays_dead_after_a_later_incarnation() -> None:
    """A frozen process that runs again after its successor's presence stays dead."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence("a"), 0.0)
    leases.expire(50.0)
    leases.renew(presence("b"), 51.0)
    leases.renew_lease("c", "a", 52.0)

    assert leases.renew(presence("a"), 52.0) == []
    assert leases.is_dead("c", "a")
    assert not leases.is_dead("c", "b")


def test_each_message_of_a_client_renews_its_lease() -> None:
    """Each message of a client, for example a frame ack, renews its lease, also if a presence is late."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(lease_s=10.0), 0.0)
    leases.renew_lease("c", "a", 8.0)

    assert leases.expire(18.9) == []
    assert len(leases.expire(19.0)) == 1


def test_a_request_from_the_queue_does_not_renew_a_lease() -> None:
    """A request from the queue does not renew a lease, because a dead client may have left it there."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(), 0.0)
    leases.start_lease("c", "a", 4.0)
    leases.start_lease("c", "unheard", 4.0)
    ended = leases.expire(6.0)
    leases.start_lease("c", "a", 7.0)

    assert [end.incarnation for end in ended] == ["a"]
    assert leases.is_dead("c", "a")
    assert [end.incarnation for end in leases.expire(4.0 + DEFAULT_LEASE_S + 1.0)] == ["unheard"]


@pytest.mark.proves("P65")
def test_an_outage_of_the_worker_ends_no_client() -> None:
    """After an outage of the worker's connection, each lease restarts, because no message could arrive meanwhile."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(), 0.0)
    leases.restart_leases(100.0)

    assert leases.expire(105.9) == []
    assert len(leases.expire(106.0)) == 1


def test_each_lease_ends_within_a_maximum_time() -> None:
    """The lease of a client ends within a maximum time, regardless of the lease that the client announces."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence(lease_s=1e300), 0.0)

    assert len(leases.expire(MAX_LEASE_S + 1.0)) == 1


def test_the_number_of_known_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, new clients are not followed, and the oldest dead clients are removed."""
    monkeypatch.setattr(lease, "MAX_CLIENTS", 3)
    leases = ClientLeases(margin_s=1.0)
    for i in range(5):
        leases.renew(presence(client=f"c{i}"), 0.0)
    first = [end.client for end in leases.expire(50.0)]
    for i in range(5, 7):
        leases.renew(presence(client=f"c{i}"), 50.0)
    leases.expire(100.0)

    assert first == ["c0", "c1", "c2"]
    assert not leases._live
    assert [leases.is_dead(f"c{i}", "a") for i in range(7)] == [False, False, True, False, False, True, True]


def test_invented_incarnations_of_one_client_are_bounded() -> None:
    """Messages with ever new incarnations of one client keep few leases, and none ends the lease with presence."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(presence("real"), 0.0)
    for i in range(1000):
        leases.renew_lease("c", f"invented-{i}", 0.0)
    leases.renew_lease("other", "a", 0.0)

    assert len(leases) == lease.MAX_INCARNATIONS + 1
    assert leases.is_live("c", "real")
    assert leases.renew(presence("next"), 1.0)
    assert leases.is_live("c", "next")
    assert leases.is_live("other", "a")
