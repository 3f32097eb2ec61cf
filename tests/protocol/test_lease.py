"""Leases: of a worker, of its clients and of open transfers, with duplicate workers and floods of messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rollbus.bus.protocol.attempt import events as on
from rollbus.bus.protocol.attempt.machine import AttemptMachine, RequestState
from rollbus.bus.protocol.attempt.suspects import AVOID_S, BUSY_FACTOR, MAX_MOVES, SILENT_S, SilenceWatch
from rollbus.bus.protocol.fleet import leases as lease
from rollbus.bus.protocol.fleet.leases import (
    MAX_FROM_ALL,
    MAX_FROM_ONE,
    MAX_LEASE_S,
    MAX_PROOF_S,
    OWNER_LOST_S,
    SILENCE_S,
    TIE_S,
    ClientLeases,
    DuplicateWatch,
    EndedIncarnation,
    FloodMeter,
    OwnIncarnation,
    TransferLease,
    WorkerLease,
    check_any_can_finish,
    check_continues,
)
from rollbus.bus.protocol.stream.response_stream import ResponseStream
from rollbus.schemas.control import FinishWeightUpdate
from rollbus.schemas.errors import ControlCode, ControlError, ErrorCode, RequestFailed
from rollbus.schemas.options import DEFAULT_IDLE_S, DEFAULT_LEASE_S
from rollbus.schemas.presence import ClientPresence, ClientState, WorkerPresence, WorkerState
from rollbus.schemas.weights import OpenTransfer
from tests.golden.vectors import VECTORS
from tests.support.fleet import presence
from tests.support.requests import sized


def client_presence(
    incarnation: str = "a", *, client: str = "c", state: ClientState = ClientState.LIVE, lease_s: float = 5.0
) -> ClientPresence:
    """Return a client's presence."""
    return ClientPresence(client=client, incarnation=incarnation, state=state, lease_s=lease_s)


def closed(incarnation: str = "a") -> ClientPresence:
    """Return the final presence of a client."""
    return client_presence(incarnation, state=ClientState.CLOSED)


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
    assert leases.renew(client_presence(), 0.0) == []
    leases.renew(client_presence(), 3.0)
    ended = [leases.expire(8.9), leases.expire(9.0), leases.expire(99.0)]

    assert ended == [[], [EndedIncarnation("c", "a", "its lease expired")], []]
    assert leases.is_dead("c", "a")


def test_an_expired_client_that_publishes_again_is_alive() -> None:
    """An expired client that publishes again is alive, and its next requests are accepted."""
    leases = ClientLeases(margin_s=1.0)
    for sign in (lambda: leases.renew_lease("c", "a", 100.0), lambda: leases.renew(client_presence(), 100.0)):
        leases.renew(client_presence(), 0.0)
        leases.expire(50.0)
        was_dead = leases.is_dead("c", "a")
        sign()
        assert (was_dead, leases.is_dead("c", "a")) == (True, False)
        assert len(leases.expire(200.0)) == 1
        leases.renew_lease("c", "a", 0.0)


def test_a_closed_client_ends_immediately_and_is_not_revived() -> None:
    """A closed client ends immediately, and later messages do not revive it."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence(), 0.0)
    ended = leases.renew(closed(), 1.0)
    leases.renew_lease("c", "a", 2.0)

    assert ended == [EndedIncarnation("c", "a", "it was closed")]
    assert leases.renew(client_presence(), 2.0) == []
    assert leases.renew(closed(), 3.0) == []
    assert leases.is_dead("c", "a")


def test_an_expired_client_can_still_be_closed() -> None:
    """A final presence also counts after the lease has expired."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence(), 0.0)
    leases.expire(50.0)

    assert leases.renew(closed(), 60.0) == [EndedIncarnation("c", "a", "it was closed")]


def test_closing_an_unknown_client_ends_no_request() -> None:
    """If an unknown client closes, no request ends. Its requests in the queue are known to have no client."""
    leases = ClientLeases(margin_s=1.0)

    assert leases.renew(closed(), 0.0) == []
    assert leases.is_dead("c", "a")


def test_a_new_incarnation_ends_the_earlier_incarnations() -> None:
    """The first presence of a new incarnation ends the older incarnations for good. Other clients are not affected."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence("a"), 0.0)
    leases.renew(client_presence("a", client="d"), 0.0)
    leases.renew_lease("c", "heard", 0.0)
    ended = leases.renew(client_presence("b"), 1.0)
    late = leases.renew(client_presence("a"), 1.5)
    leases.renew_lease("c", "a", 2.0)

    assert [end.incarnation for end in ended] == ["a", "heard"]
    assert late == []
    assert [leases.is_dead(*life) for life in (("c", "a"), ("c", "b"), ("d", "a"))] == [True, False, False]


def test_a_message_of_an_unknown_incarnation_ends_no_other_incarnation() -> None:
    """A message of an unknown incarnation ends no other one, because only a presence shows which one is later."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence("b"), 0.0)
    leases.renew_lease("c", "a", 0.0)
    again = leases.renew(client_presence("b"), 5.0)
    ended = leases.expire(DEFAULT_LEASE_S + 1.0)

    assert again == []
    assert [end.incarnation for end in ended] == ["a"]


def test_an_expired_incarnation_stays_dead_after_a_later_incarnation() -> None:
    """A frozen process that runs again after its successor's presence stays dead."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence("a"), 0.0)
    leases.expire(50.0)
    leases.renew(client_presence("b"), 51.0)
    leases.renew_lease("c", "a", 52.0)

    assert leases.renew(client_presence("a"), 52.0) == []
    assert leases.is_dead("c", "a")
    assert not leases.is_dead("c", "b")


def test_each_message_of_a_client_renews_its_lease() -> None:
    """Each message of a client, for example a frame ack, renews its lease, also if a presence is late."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence(lease_s=10.0), 0.0)
    leases.renew_lease("c", "a", 8.0)

    assert leases.expire(18.9) == []
    assert len(leases.expire(19.0)) == 1


def test_a_request_from_the_queue_does_not_renew_a_lease() -> None:
    """A request from the queue does not renew a lease, because a dead client may have left it there."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence(), 0.0)
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
    leases.renew(client_presence(), 0.0)
    leases.restart_leases(100.0)

    assert leases.expire(105.9) == []
    assert len(leases.expire(106.0)) == 1


def test_each_lease_ends_within_a_maximum_time() -> None:
    """The lease of a client ends within a maximum time, regardless of the lease that the client announces."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence(lease_s=1e300), 0.0)

    assert len(leases.expire(MAX_LEASE_S + 1.0)) == 1


def test_the_number_of_known_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, new clients are not followed, and the oldest dead clients are removed."""
    monkeypatch.setattr(lease, "MAX_CLIENTS", 3)
    leases = ClientLeases(margin_s=1.0)
    for i in range(5):
        leases.renew(client_presence(client=f"c{i}"), 0.0)
    first = [end.client for end in leases.expire(50.0)]
    for i in range(5, 7):
        leases.renew(client_presence(client=f"c{i}"), 50.0)
    leases.expire(100.0)

    assert first == ["c0", "c1", "c2"]
    assert not leases._live
    assert [leases.is_dead(f"c{i}", "a") for i in range(7)] == [False, False, True, False, False, True, True]


def test_invented_incarnations_of_one_client_are_bounded() -> None:
    """Messages with ever new incarnations of one client keep few leases, and none ends the lease with presence."""
    leases = ClientLeases(margin_s=1.0)
    leases.renew(client_presence("real"), 0.0)
    for i in range(1000):
        leases.renew_lease("c", f"invented-{i}", 0.0)
    leases.renew_lease("other", "a", 0.0)

    assert len(leases) == lease.MAX_INCARNATIONS + 1
    assert leases.is_live("c", "real")
    assert leases.renew(client_presence("next"), 1.0)
    assert leases.is_live("c", "next")
    assert leases.is_live("other", "a")


def test_one_sender_floods_with_more_than_its_messages_in_a_second() -> None:
    """A sender with more than 500 messages in a second floods, and the description names it and its share."""
    meter = FloodMeter()
    for number in range(MAX_FROM_ONE):
        assert not meter.add("ping.mallory", number / 1000)
        assert not meter.add("ping.alice", number / 1000)

    assert meter.add("ping.mallory", 0.9)
    assert meter.is_flooded
    assert "501 of 1001 messages in a second on ping.mallory" in meter.describe("ping.*")

    meter.reset(1.0)
    assert not meter.is_flooded


def test_a_steady_rate_below_the_limit_never_floods() -> None:
    """Messages at the allowed rate never flood, for any time."""
    meter = FloodMeter()

    assert not any(meter.add("ping.alice", number / MAX_FROM_ONE) for number in range(10 * MAX_FROM_ONE))


def test_a_thousand_clients_that_connect_at_once_are_no_flood() -> None:
    """Messages of many senders flood only far above a ping of each of a thousand clients."""
    meter = FloodMeter()
    floods = [meter.add(f"ping.c{number}", 0.0) for number in range(MAX_FROM_ALL + 1)]

    assert floods.index(True) == MAX_FROM_ALL


def test_useful_messages_do_not_count() -> None:
    """A burst of placed requests that the worker accepts is no flood; rejected ones are."""
    accepted = 0
    meter = FloodMeter(lambda: accepted)
    for _ in range(2000):
        assert not meter.add("direct.alice.w", 0.5)
        accepted += 1
    floods = [meter.add("direct.alice.w", 0.5) for _ in range(MAX_FROM_ONE + 1)]

    assert floods.index(True) == MAX_FROM_ONE


FINISH = FinishWeightUpdate(version=7)
OPEN = OpenTransfer(id="t", by="c", age_s=12.0, chunks=1)


def worker(transfer: OpenTransfer | None, *, is_older: bool = False, version: int = 1) -> WorkerPresence:
    """Return a worker with an open transfer, or of a release that announces none."""
    serving = VECTORS["presence_serving"]
    assert isinstance(serving, WorkerPresence)
    able = replace(serving.capabilities, transfer_leases=not is_older)
    return replace(serving, state=WorkerState.UPDATING, capabilities=able, transfer=transfer, weight_version=version)


def refusal(*workers: WorkerPresence, by: str = "c", transfer: str | None = None) -> ControlCode | None:
    """Return the code with which a finish is refused before it is recorded; None: it is recorded."""
    try:
        check_any_can_finish(workers, replace(FINISH, transfer=transfer), by)
    except ControlError as error:
        assert error.message.startswith("nothing was changed: ")
        return error.code
    return None


def test_silence_and_a_lost_owner_end_a_lease() -> None:
    """A command in progress is not silence, but the loss of its owner ends it too. Without presence, silence counts."""
    lease = TransferLease("t", "c", 0.0, 0.0)
    assert lease.end(DEFAULT_IDLE_S, DEFAULT_IDLE_S) is None
    assert "sent no command for 600 s" in str(lease.end(DEFAULT_IDLE_S + 1, DEFAULT_IDLE_S))
    lease.is_busy = True
    assert lease.end(10 * DEFAULT_IDLE_S, DEFAULT_IDLE_S) is None
    assert lease.describe(1.0, DEFAULT_IDLE_S).left_s == 0
    lease.note_presence(5.0)
    lease.note_presence(None)
    lease.note_presence(3.0)
    assert lease.end(5.0 + OWNER_LOST_S, DEFAULT_IDLE_S) is None
    assert "published no presence for 20 s" in str(lease.end(5.1 + OWNER_LOST_S, DEFAULT_IDLE_S))


@pytest.mark.parametrize(
    ("found", "transfer", "by", "code"),
    [
        (OPEN, None, "c", None),
        (OPEN, "t", "c", None),
        (OPEN, "u", "c", ControlCode.TRANSFER_EXPIRED),
        (OPEN, "t", "d", ControlCode.TRANSFER_HELD),
        (None, "t", "c", ControlCode.TRANSFER_EXPIRED),
        (None, None, None, ControlCode.TRANSFER_EXPIRED),
    ],
)
def test_only_the_owner_continues_the_open_transfer(
    found: OpenTransfer | None, transfer: str | None, by: str | None, code: ControlCode | None
) -> None:
    """A command without an id continues any transfer of its owner. Errors name the holder and the age."""
    if code is None:
        check_continues(found, transfer, by)
        return
    with pytest.raises(ControlError, match="of c, opened 12 s ago" if found else "start it again") as caught:
        check_continues(found, transfer, by)
    assert caught.value.code is code


def test_a_finish_is_recorded_only_if_a_worker_can_apply_it() -> None:
    """One worker with a chunk suffices. A repeated finish passes, and so does a worker that announces no transfers."""
    empty = replace(OPEN, chunks=0)
    assert refusal(worker(OPEN), worker(None)) is None
    assert refusal(worker(empty), worker(OPEN)) is None
    assert refusal(worker(None, version=7)) is None
    assert refusal(worker(None, is_older=True), worker(empty)) is None
    assert refusal(worker(empty), worker(None)) is ControlCode.TRANSFER_EMPTY
    assert refusal(worker(None)) is ControlCode.TRANSFER_EXPIRED
    assert refusal(worker(OPEN), by="http:admin") is ControlCode.TRANSFER_HELD
    assert refusal(worker(OPEN), transfer="u") is ControlCode.TRANSFER_EXPIRED


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


# When a worker that offered to run a request is silent.


def offered(prompt_len: int = 3, *, worker: str = "w", now: float = 0.0) -> AttemptMachine:
    """Return a request that a worker has offered to run."""
    request = AttemptMachine(
        ResponseStream(sized(prompt_len), child=0, attempt=0, keep=True), b"", now=now, deadline=1e9
    )
    request.handle(on.PublishingPossible(max_bytes=1 << 20, is_served=True), now)
    request.handle(on.Offered(worker, "life"), now)
    request.heard_at = now
    return request


def check(watch: SilenceWatch, *requests: AttemptMachine, now: float) -> list[AttemptMachine]:
    """Check requests whose workers serve."""
    return watch.check(requests, frozenset(), 1.0, now)


@pytest.mark.parametrize("prompt_len", [3, 50_000])
def test_a_worker_is_silent_after_two_minutes_and_a_second_for_a_thousand_prompt_tokens(prompt_len: int) -> None:
    """The limit is 120 s, and a second more for each 1,000 prompt tokens; then the worker is avoided."""
    watch, request, limit = SilenceWatch(), offered(prompt_len), SILENT_S + prompt_len / 1000

    assert check(watch, request, now=limit) == []
    assert not watch.avoided
    assert check(watch, request, now=limit + 0.1) == [request]
    assert set(watch.avoided) == {"w"}


def test_a_token_restarts_the_limit() -> None:
    """A request that gets tokens is moved only if the next token takes too long."""
    watch, request = SilenceWatch(), offered()
    request.has_token, request.heard_at = True, 100.0

    assert check(watch, request, now=100 + SILENT_S) == []
    assert check(watch, request, now=101 + SILENT_S) == [request]


def test_a_worker_that_sends_tokens_of_other_requests_has_ten_times_as_long() -> None:
    """An engine without free KV blocks holds some requests back: it has longer while it sends tokens of others."""
    watch, waiting, running = SilenceWatch(), offered(), offered()
    running.has_token = True
    for now in range(0, int(SILENT_S * BUSY_FACTOR), 10):
        running.heard_at = float(now)
        assert check(watch, waiting, running, now=now) == []
    running.heard_at = SILENT_S * BUSY_FACTOR + 1

    assert check(watch, waiting, running, now=running.heard_at) == [waiting]


def test_recorded_pauses_do_not_count() -> None:
    """The time in which the recorded state pauses the worker does not count."""
    watch, request = SilenceWatch(), offered()
    for now in range(1, 1000):
        assert watch.check([request], {"w"}, 1.0, float(now)) == []

    assert check(watch, request, now=999 + SILENT_S) == []
    assert check(watch, request, now=1000 + SILENT_S) == [request]


def test_after_two_moves_a_request_stays() -> None:
    """A request leaves two silent workers, and then stays until its deadline."""
    watch, request = SilenceWatch(), offered()
    for move in range(1, MAX_MOVES + 1):
        assert check(watch, request, now=move * 1000.0) == [request]
        request.heard_at = move * 1000.0

    assert check(watch, request, now=1e6) == []


def test_a_silent_worker_is_used_again_after_a_token_a_restart_or_ten_minutes() -> None:
    """The client avoids a silent worker until it sends a token, restarts, or ten minutes have passed."""
    watch, request = SilenceWatch(), offered()
    check(watch, request, now=1000.0)
    watch.forget("w", "life")
    assert set(watch.avoided) == {"w"}
    check(watch, now=999.0 + AVOID_S)
    assert set(watch.avoided) == {"w"}
    watch.forget("w", "next life")
    assert not watch.avoided

    check(watch, request, now=2000.0)
    check(watch, now=2000.0 + AVOID_S)
    assert not watch.avoided

    other = offered(now=3000.0)
    check(watch, other, now=4000.0)
    other.has_token, other.heard_at = True, 4001.0
    check(watch, other, now=4002.0)
    assert not watch.avoided


def test_a_request_that_only_an_avoided_worker_offered_leaves_the_queue() -> None:
    """If the client avoids the worker that took a queued request, the request is published again at once.

    This does not count as an attempt.
    """
    request = AttemptMachine(ResponseStream(sized(), child=0, attempt=0, keep=True), b"", now=0.0, deadline=1e9)
    request.handle(on.PublishingPossible(max_bytes=1 << 20, is_served=True), 0.0)
    request.handle(on.Stored(0), 0.0)
    error = RequestFailed(code=ErrorCode.WORKER_LOST, message="silent")
    instructions = request.handle(on.WorkerSilent(error), 1.0)

    assert request.state is RequestState.READY
    assert instructions == (on.Retract(error), on.Schedule())
    assert (request.stream.attempt, request.stream.num_attempts) == (1, 1)
