"""The worker's data for its clients: when a message leaves the queue, and which client gets which message."""

import sys

import pytest
from msgspec.structs import replace

from rollbus.bus.protocol.fleet.leases import MAX_INCARNATIONS
from rollbus.schemas.chunk import FinishReason
from rollbus.schemas.errors import ErrorCode, InvalidRequest
from rollbus.schemas.limits import INITIAL_CREDIT_BYTES
from rollbus.schemas.messages import LinkMessage, RequestKey
from rollbus.schemas.presence import ClientState
from rollbus.workers.requests.links import REMEMBER_S
from tests.workers.links_support import (
    LATE,
    MAX_PAYLOAD,
    NOW,
    ROW_BYTES,
    Ear,
    capabilities,
    linked,
    make_links,
    queued,
    request_of,
    step,
)


@pytest.mark.proves("P46")
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_message_leaves_the_queue_when_its_offer_is_acknowledged(has_ended: bool) -> None:
    """An offered request stays in the queue until its client acknowledges the frame with the offer, also if it ends.

    The worker then keeps no reference to its queue message, and so not to its prompt.
    """
    links, ear = linked()
    name, message = ear.offer("r")
    links.add_steps([step(name, end=has_ended)], NOW)

    assert [frame.admitted for frame in ear.hear()] == [[RequestKey("r")]]
    assert links.requests.messages == [message]
    assert links.on_link_message("alice", ear.message(), NOW).ack == [message]
    assert links.requests.messages == []
    assert len(links.requests) == (not has_ended)
    unused = queued()
    assert sys.getrefcount(message) == sys.getrefcount(unused)


def test_a_request_whose_offer_is_rejected_is_aborted_and_leaves_the_queue() -> None:
    """If the client rejects an offer, the engine aborts the request and no other worker gets it."""
    links, ear = linked()
    name, message = ear.offer("r")
    todo = links.on_link_message("alice", ear.message([RequestKey("r"), RequestKey("unknown")]), NOW)

    assert (todo.abort, todo.ack) == ([name], [message])
    assert links.requests.messages == []


def test_a_rejected_request_leaves_the_queue_after_the_clients_ack() -> None:
    """A rejected request gets a terminal chunk after an offer. Its queue message is acked after the client's ack."""
    links, ear = linked()
    origin = ear.origin("r", (message := ear.offer("other")[1]))
    error = InvalidRequest(field="prompt_token_ids", problem="is wrong", allowed="others")
    links.reject(origin, error, NOW)
    ear.hear()

    (chunk,) = ear.chunks("r")
    assert (chunk.error.code, chunk.error.field) == (ErrorCode.INVALID_REQUEST, "prompt_token_ids")
    assert message in links.on_link_message("alice", ear.message(), NOW).ack
    assert links.requests.messages == []


def test_a_rejected_direct_request_is_not_offered() -> None:
    """A rejected direct request has no queue message, so it gets only the terminal chunk."""
    links, ear = linked()
    links.reject(ear.origin("r"), InvalidRequest(field="f", problem="p", allowed="a"), NOW)

    (frame,) = ear.hear()
    assert (frame.admitted, len(frame.chunks)) == ([], 1)


def test_the_requests_of_a_closed_client_end_immediately() -> None:
    """When a client closes, its requests are aborted and leave the queue, and its link is removed.

    Its later messages are counted and change nothing.
    """
    links = make_links()
    ear, other = Ear(links), Ear(links, client="bob", incarnation="b1")
    name, message = ear.offer("r")
    other.offer("r")
    todo = links.on_presence(ear.presence(ClientState.CLOSED), NOW)
    late = links.on_link_message("alice", LinkMessage(1, [], "a1", "w1", 0, 0, 100), NOW)

    assert (late.abort, late.ack, links.stats.late_messages) == ([], [], 1)
    assert (todo.abort, todo.ack) == ([name], [message])
    assert len(links.requests) == 1
    assert [link.client for link in links.outbound.links()] == ["bob"]
    assert links.is_client_dead(ear.origin("later"))
    assert links.stats.requests_of_lost_clients == 1


def test_a_silent_clients_requests_end_and_the_returning_client_gets_the_reason() -> None:
    """The requests of a client end after its lease and the margin. A client that returns soon gets the reason."""
    links, ear = linked()
    name, message = ear.offer("r")
    # The frames are published without a receiver.
    for route in links.outbound.sendable():
        links.next_frame(route)

    assert links.expire(NOW + 5.5).abort == []
    todo = links.expire(LATE)
    assert (todo.abort, todo.ack) == ([name], [message])
    assert links.is_client_dead(ear.origin("later"))
    for route in links.outbound.sendable():
        links.next_frame(route)

    links.on_presence(ear.presence(), LATE + 20)
    links.outbound.request_heartbeats()
    ear.hear()
    links.on_link_message("alice", ear.message(), LATE + 20)
    ear.hear()
    (chunk,) = ear.chunks("r")
    assert chunk.error.code is ErrorCode.CLIENT_LOST
    assert not links.is_client_dead(ear.origin("later"))


def test_the_link_of_a_lost_client_is_removed_after_a_while() -> None:
    """The unread frames of a lost client are discarded after a while. It gets a new link if it returns later."""
    links, ear = linked()
    ear.offer("r")
    ear.hear()
    links.expire(LATE)
    links.expire(LATE + REMEMBER_S + 1)

    assert list(links.outbound.links()) == []
    links.on_link_message("alice", ear.message(), LATE + 100)
    ear.hear()
    assert (ear.receiver.incarnation, ear.receiver.link) == ("w1", 1)


def test_invented_incarnations_leave_few_links() -> None:
    """Of a client that sends requests with ever new incarnations, few lost links are kept."""
    links, ear = linked()
    for number in range(50):
        origin = replace(ear.origin("r"), incarnation=f"i{number}", message=None)
        links.reject(origin, InvalidRequest(field="f", problem="p", allowed="a"), NOW)
    links.expire(NOW)
    assert sum(1 for _ in links.outbound.links()) <= 2 * MAX_INCARNATIONS


def test_a_later_client_incarnation_ends_the_requests_of_the_earlier_incarnation() -> None:
    """A link message or presence of a client's later incarnation ends the requests of the earlier one."""
    for speaks_of_link in (True, False):
        links = make_links()
        first, second = Ear(links), Ear(links, incarnation="a2")
        name, message = first.offer("r")
        second.offer("s")
        if speaks_of_link:
            second.hear()
            todo = links.on_link_message("alice", second.message(), NOW)
        else:
            todo = links.on_presence(second.presence(), NOW)

        assert todo.abort == [name]
        assert message in todo.ack
        assert links.is_client_dead(first.origin("later"))
        assert len(links.requests) == 1


@pytest.mark.proves("P63")
def test_a_fenced_worker_aborts_all_requests_without_acks_or_frames() -> None:
    """A worker that lost its lease aborts all requests, acks nothing, and publishes no more of their frames."""
    links, ear = linked()
    name, _ = ear.offer("r")
    links.add_steps([step(name)], NOW)
    (route,) = links.outbound.sendable()
    todo = links.fence("w2", NOW, max_payload=MAX_PAYLOAD)

    assert (todo.abort, todo.ack, todo.nak) == ([name], [], [])
    assert links.requests.messages == []
    assert links.next_frame(route) is None
    assert links.outbound.sendable() == []
    assert links.stats.given_up == 1
    ear.offer("s")
    assert [frame.incarnation for frame in ear.hear()] == ["w2"]


def test_a_request_that_is_delivered_again_runs_once() -> None:
    """Another delivery of a running request is acked with the first, or immediately if the first was acked."""
    links, ear = linked()
    _, first = ear.offer("r")
    again, third = ear.offer("other")[1], ear.offer("third")[1]

    todo = links.add_redelivery(ear.origin("r", again))
    assert todo.ack == []
    assert first not in links.requests.messages
    ear.hear()
    assert again in links.on_link_message("alice", ear.message(), NOW).ack
    todo = links.add_redelivery(ear.origin("r", third))
    assert todo.ack == [third]
    assert links.add_redelivery(ear.origin("unknown", third)) is None
    assert links.stats.repeated == 2


def test_a_client_that_asks_for_acknowledged_frames_gets_a_new_link() -> None:
    """If a client asks again for acknowledged frames, the worker drops its link and requests, and opens a new link.

    An unread offer goes back to the queue, as the client would not ask for it again.
    """
    links, ear = linked()
    name, _ = ear.offer("heard")
    ear.hear()
    links.on_link_message("alice", ear.message(), NOW)
    unheard, message = ear.offer("unheard")
    todo = links.on_link_message("alice", LinkMessage(1, [], "a1", "w1", 0, 0, 100, True), NOW)
    ear.hear()

    assert (todo.abort, todo.ack, todo.nak) == ([name, unheard], [], [(message, 0.0)])
    assert (ear.receiver.link, len(links.requests), links.requests.messages) == (1, 0, [])


def test_an_ack_of_frames_that_were_never_sent_is_counted() -> None:
    """A client that acknowledges frames that were never sent only raises a counter."""
    links, ear = linked()
    ear.offer("r")
    ear.hear()
    todo = links.on_link_message("alice", LinkMessage(1, [], "a1", "w1", 0, 99, 100), NOW)

    assert todo.ack == []
    assert links.stats.bad_messages == 1


def test_rows_at_a_wrong_position_end_only_their_request() -> None:
    """Rows at a wrong position end only their request, as `protocol_error`, and abort it."""
    links, ear = linked()
    bad, _ = ear.offer("bad", routing=True)
    good, _ = ear.offer("good", routing=True)
    todo = links.add_steps([step(bad, rows=(5, 6)), step(good, rows=(0, 2)), step("unknown")], NOW)
    ear.hear()

    assert todo.abort == [bad]
    assert [chunk.error.code for chunk in ear.chunks("bad") if chunk.error] == [ErrorCode.PROTOCOL_ERROR]
    assert [chunk.num_tokens for chunk in ear.chunks("good")] == [1]
    assert links.stats.late_steps == 1


@pytest.mark.proves("P60")
def test_large_routed_experts_delay_the_tokens_of_other_requests_by_one_frame() -> None:
    """While 4 MiB of routed experts leave in segments, another request's new token is in the next frame but one."""
    links, ear = linked()
    rows = 4 * 1024 * 1024 // ROW_BYTES
    large, _ = ear.offer("large", prompt_len=rows, routing=True)
    small, _ = ear.offer("small")
    ear.hear()
    links.on_link_message("alice", ear.message(), NOW)
    links.add_steps([step(large, rows=(0, rows))], NOW)
    (route,) = links.outbound.sendable()
    frames_since_token = []
    num_frames = num_tokens = 0
    while len(ear.chunks("large")) < 33:
        # A step follows every frame, as the engine continues meanwhile.
        links.add_steps([step(small)], NOW)
        outgoing = links.next_frame(route)
        assert len(outgoing.data) < 160 * 1024
        frame = ear.take(outgoing.data)
        num_frames += 1
        if any(chunk.request_id == "small" for chunk in frame.chunks):
            num_tokens += sum(chunk.num_tokens for chunk in frame.chunks if chunk.request_id == "small")
            frames_since_token.append(num_frames)
            num_frames = 0

    assert max(frames_since_token) == 1
    assert num_tokens >= 33


def test_an_aborted_request_gets_only_its_terminal_chunk() -> None:
    """A request that its client aborts gets only its terminal chunk, whatever its engine still generates."""
    links, ear = linked()
    name, _ = ear.offer("r")
    ear.hear()
    links.add_steps([step(name, INITIAL_CREDIT_BYTES)], NOW)
    ear.hear()
    sent = sum(chunk.num_tokens for chunk in ear.chunks("r"))
    unsent = INITIAL_CREDIT_BYTES - sent
    todo = links.on_link_message("alice", ear.message([RequestKey("r")]), NOW)
    links.add_steps([step(name, 1), step(name, 1, end=True)], NOW)
    ear.hear()

    assert unsent > 0
    assert todo.abort == [name]
    last = ear.chunks("r")[-1]
    assert (last.num_tokens, last.finish_reason) == (0, FinishReason.ABORT)
    assert last.end.num_tokens == sent
    assert (links.stats.aborted, links.stats.late_steps) == (1, 2)
    links.on_link_message("alice", ear.message(), NOW)
    assert links.outbound.held_bytes == 0


def test_an_abort_after_the_engines_end_discards_unsent_tokens() -> None:
    """An abort after the engine's end discards the tokens that were not sent yet."""
    links, ear = linked()
    name, _ = ear.offer("r")
    links.add_steps([step(name, INITIAL_CREDIT_BYTES, end=True)], NOW)
    ear.hear()
    links.on_link_message("alice", ear.message(window=0), NOW)
    held_bytes = links.outbound.held_bytes
    todo = links.on_link_message("alice", ear.message([RequestKey("r")], window=0), NOW)
    ear.hear()

    assert (todo.abort, todo.ack) == ([], [])
    assert held_bytes > 2 * INITIAL_CREDIT_BYTES
    assert links.outbound.held_bytes < 1000
    assert ear.chunks("r")[-1].finish_reason is FinishReason.ABORT


@pytest.mark.proves("P59")
def test_every_frame_fits_the_max_payload_of_the_server() -> None:
    """With a `max_payload` of 64 KiB every frame fits, however many bytes the routed experts have."""
    links = make_links()
    links.fence("w2", NOW, max_payload=65_536)
    ear = Ear(links)
    name = links.offer(ear.origin("r"), request_of(10_000, request_id="r"), capabilities(), NOW)
    links.add_steps([step(name, rows=(0, 10_000), end=True)], NOW)
    (route,) = links.outbound.sendable()
    sizes = []
    while outgoing := links.next_frame(route):
        sizes.append(len(outgoing.data))
    links.on_link_message("alice", LinkMessage(1, [], "a1", "w2", 0, 0, 1 << 30), NOW)
    while outgoing := links.next_frame(route):
        sizes.append(len(outgoing.data))

    assert max(sizes) <= 65_536
    assert sum(sizes) > 10_000 * ROW_BYTES
