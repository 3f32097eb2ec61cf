"""How a client receives a link: each frame once and in order, with acks, credit and requests for missing frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.link_receiver import (
    MAX_FAILED_RESENDS,
    MAX_UNACKED_FRAMES,
    RESEND_INTERVAL_S,
    UNREADABLE_GAP_S,
    FollowedLinks,
    FrameVerdict,
    LinkReceiver,
)
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import Frame, FrameHeader, RequestKey, decode_frame
from tests.support.scenarios import simple

OFFER = [RequestKey("r")]
WINDOW = 2**20


def frame(number: int, *, incarnation: str = "w", link: int = 0, client: str = "c") -> Frame:
    """Return a frame with an offer."""
    return Frame(WIRE_VERSION, incarnation, number, OFFER, [], link, client)


def heartbeat(number: int, *, incarnation: str = "w", link: int = 0) -> Frame:
    """Return a frame without content."""
    return Frame(WIRE_VERSION, incarnation, number, [], [], link, "c")


def receive(receiver: LinkReceiver, *frames: Frame, now: float = 0.0) -> list[FrameVerdict]:
    """Return the receiver's verdicts on frames of 100 bytes."""
    return [receiver.receive(item, 100, now) for item in frames]


@pytest.mark.proves("P57")
def test_frames_are_accepted_once_and_in_order() -> None:
    """A duplicate frame is reported. A frame behind a gap is not accepted until the gap is filled."""
    receiver = LinkReceiver("c")
    verdicts = receive(receiver, frame(0), frame(0), frame(2), frame(1), frame(1), frame(2), frame(3))

    assert verdicts == [
        FrameVerdict.ACCEPTED,
        FrameVerdict.DUPLICATE,
        FrameVerdict.GAP,
        FrameVerdict.ACCEPTED,
        FrameVerdict.DUPLICATE,
        FrameVerdict.ACCEPTED,
        FrameVerdict.ACCEPTED,
    ]
    assert receiver.message(window=WINDOW, now=0).acked == 4


@pytest.mark.proves("P56")
def test_credit_counts_accepted_frames_and_never_decreases() -> None:
    """The granted offset is the size of the accepted frames plus the window. A smaller window does not lower it."""
    receiver = LinkReceiver("c")
    receive(receiver, frame(0), frame(0), frame(2))
    first = receiver.message(window=1000, now=0)
    second = receiver.message(window=10, now=0)
    receive(receiver, frame(1), frame(2))
    third = receiver.message(window=1000, now=0)

    assert [message.credit for message in (first, second, third)] == [1100, 1100, 1300]
    assert [message.acked for message in (first, second, third)] == [1, 1, 3]


def test_before_the_first_frame_a_message_contains_only_aborts() -> None:
    """Before the first frame, a message contains aborts and no incarnation of the worker, because no link exists."""
    message = LinkReceiver("c").message(window=WINDOW, now=0, abort=OFFER)

    assert (message.client_incarnation, message.incarnation, message.abort) == ("c", "", OFFER)


def test_missing_frames_are_requested_immediately_and_then_at_intervals() -> None:
    """The first frame behind a gap makes a message due.

    The client repeats the request at intervals until frames arrive.
    """
    receiver = LinkReceiver("c")
    receive(receiver, frame(0))
    due = [receiver.is_ack_due(WINDOW)]
    receive(receiver, frame(2))
    due.append(receiver.is_ack_due(WINDOW))
    asked = [receiver.message(window=WINDOW, now=0).resend]
    receive(receiver, frame(3), now=0.1)
    due.append(receiver.is_ack_due(WINDOW))
    asked.append(receiver.message(window=WINDOW, now=0.1).resend)
    receive(receiver, frame(4), now=RESEND_INTERVAL_S)
    due.append(receiver.is_ack_due(WINDOW))
    asked.append(receiver.message(window=WINDOW, now=RESEND_INTERVAL_S).resend)

    assert due == [False, True, False, True]
    assert asked == [True, False, True]


def test_a_resend_that_is_arriving_is_not_requested_again() -> None:
    """Each missing frame that arrives restarts the resend interval.

    Frames dropped behind the gap are requested as well.
    """
    receiver = LinkReceiver("c")
    receive(receiver, frame(3))
    asked = [receiver.message(window=WINDOW, now=0).resend]
    receive(receiver, frame(0), now=0.2)
    asked.append(receiver.message(window=WINDOW, now=0.3).resend)
    asked.append(receiver.message(window=WINDOW, now=0.5).resend)
    receive(receiver, frame(1), frame(2), now=0.6)
    asked.append(receiver.message(window=WINDOW, now=1).resend)
    receive(receiver, frame(3), now=1)
    asked.append(receiver.message(window=WINDOW, now=9).resend)

    assert asked == [True, False, True, True, False]


@pytest.mark.proves("P57")
def test_a_heartbeat_reveals_a_lost_last_frame() -> None:
    """A heartbeat beyond the next frame number reveals a gap. A heartbeat with the next number does not."""
    receiver = LinkReceiver("c")
    verdicts = receive(receiver, frame(0), heartbeat(1))
    due = [receiver.is_ack_due(WINDOW)]
    verdicts += receive(receiver, heartbeat(2))
    due.append(receiver.is_ack_due(WINDOW))

    assert verdicts == [FrameVerdict.ACCEPTED, FrameVerdict.HEARTBEAT, FrameVerdict.HEARTBEAT]
    assert due == [False, True]
    assert receiver.message(window=WINDOW, now=0).resend


def test_a_frame_number_far_ahead_is_an_ordinary_gap() -> None:
    """A frame number far ahead is an ordinary gap. A heartbeat with the next number ends it."""
    receiver = LinkReceiver("c")
    verdicts = receive(receiver, frame(0), frame(2**53))
    asked = [receiver.message(window=WINDOW, now=0).resend]
    verdicts += receive(receiver, heartbeat(1), now=9)
    asked.append(receiver.message(window=WINDOW, now=9).resend)
    verdicts += receive(receiver, frame(2), now=0.1)

    assert verdicts == [FrameVerdict.ACCEPTED, FrameVerdict.GAP, FrameVerdict.HEARTBEAT, FrameVerdict.GAP]
    assert asked == [True, False]
    assert receiver.is_ack_due(WINDOW)


def test_an_ack_is_due_after_a_quarter_of_the_window_or_64_frames() -> None:
    """An ack is due after a quarter of the window or 64 frames. Sending a message resets both counts."""
    receiver = LinkReceiver("c")
    receive(receiver, *map(frame, range(MAX_UNACKED_FRAMES - 1)))
    due = [receiver.is_ack_due(WINDOW), receiver.is_ack_due(4 * 100 * (MAX_UNACKED_FRAMES - 1))]
    receive(receiver, frame(MAX_UNACKED_FRAMES - 1))
    due.append(receiver.is_ack_due(WINDOW))
    unacked = [receiver.has_unacked]
    receiver.message(window=WINDOW, now=0)
    due.append(receiver.is_ack_due(WINDOW))
    unacked.append(receiver.has_unacked)

    assert due == [False, True, True, False]
    assert unacked == [True, False]


def test_a_later_link_replaces_the_earlier_link() -> None:
    """A later link starts at frame 0. Frames of an earlier link or of another incarnation are stale."""
    receiver = LinkReceiver("c")
    news = [receiver.is_new_link(frame(0))]
    receive(receiver, frame(0), frame(1))
    news.append(receiver.is_new_link(frame(2)))
    later = frame(0, link=2)
    news.append(receiver.is_new_link(later))
    other = frame(0, incarnation="x", link=3)
    news.append(receiver.is_new_link(other))
    verdicts = receive(receiver, later, frame(2), heartbeat(9), frame(0, link=1), other)
    message = receiver.message(window=1000, now=0)

    assert news == [False, False, True, False]
    assert verdicts == [FrameVerdict.ACCEPTED, *[FrameVerdict.STALE] * 4]
    assert (message.incarnation, message.link, message.acked, message.credit) == ("w", 2, 1, 1100)


def test_frames_for_an_earlier_incarnation_of_the_client_are_stale() -> None:
    """Frames for an earlier incarnation of this client are stale and open no link."""
    receiver = LinkReceiver("c")
    verdicts = receive(receiver, frame(0, client="b"), frame(0, client=""), frame(0))
    is_new = receiver.is_new_link(frame(0, client="b", link=5))

    assert verdicts == [FrameVerdict.STALE, FrameVerdict.STALE, FrameVerdict.ACCEPTED]
    assert not is_new


@pytest.mark.proves("P57")
@given(st.lists(st.integers(0, 30), max_size=60))
def test_each_frame_is_delivered_once_and_in_order_after_any_order_of_arrival(order: list[int]) -> None:
    """After any order of arrival, one request for missing frames delivers each frame exactly once and in order."""
    sender = LinkSender(incarnation="w", link=0, client_incarnation="c", max_frame_bytes=2**20)
    sealed = []
    for i in range(31):
        sender.open(RequestKey(f"r{i}"), simple().writer())
        sealed.append(sender.seal() or b"")
    receiver = LinkReceiver("c")
    taken: list[RequestKey] = []
    arrivals = [sealed[i] for i in order] + [sender.heartbeat()]
    for _ in range(2):
        for data in arrivals:
            item = decode_frame(data)
            if receiver.receive(item, len(data), 0) is FrameVerdict.ACCEPTED:
                taken += item.admitted
        arrivals = sender.receive(receiver.message(window=WINDOW, now=1)).resend

    assert [key.request_id for key in taken] == [f"r{i}" for i in range(31)]
    assert arrivals == []
    assert not [data for data, _ in sender._unacked]


def test_a_new_incarnation_ends_the_earlier_link() -> None:
    """A new incarnation ends the earlier link.

    Late frames of the earlier incarnation are stale, also if it announced last.
    """
    links = FollowedLinks("c")
    first, ended = links.receiver_of(frame(0, incarnation="a"), {"a"})
    assert first is not None
    assert ended == []
    second, ended = links.receiver_of(frame(0, incarnation="b"), {"a"})
    assert second is not first
    assert ended == ["a"]
    assert links.receiver_of(frame(0, incarnation="a"), {"a"}) == (None, [])
    assert list(links.receivers) == [second]


def test_the_links_of_two_workers_with_one_id_are_both_followed() -> None:
    """While two workers with one id publish presence, the links of both are followed."""
    links, live = FollowedLinks("c"), {"a", "b"}
    first, _ = links.receiver_of(frame(0, incarnation="a"), {"a"})
    second, ended = links.receiver_of(frame(0, incarnation="b"), live)

    assert ended == []
    assert links.receiver_of(frame(0, incarnation="a"), live) == (first, [])
    assert links.receiver_of(frame(0, incarnation="b"), live) == (second, [])


def test_a_worker_that_proves_to_be_alive_is_followed_again() -> None:
    """A worker that proves to be alive is followed from the first frame of its link.

    Until then its frames are stale.
    """
    links = FollowedLinks("c")
    first, _ = links.receiver_of(frame(0, incarnation="a"), {"a"})
    links.receiver_of(frame(0, incarnation="b"), {"a"})
    again, ended = links.receiver_of(frame(0, incarnation="a"), {"a", "b"})

    assert ended == []
    assert again not in (None, first)


def test_of_two_workers_with_one_id_only_frames_of_the_ended_worker_are_stale() -> None:
    """The frames of the worker that ended are stale."""
    links = FollowedLinks("c")
    links.receiver_of(frame(0, incarnation="a"), {"a", "b"})
    links.receiver_of(frame(0, incarnation="b"), {"a", "b"})
    links.prune({"b"})

    assert [receiver.incarnation for receiver in links.receivers] == [None]
    assert links.receiver_of(frame(0, incarnation="a"), {"b"}) == (None, [])


def test_a_frame_for_another_client_is_stale() -> None:
    """A frame for another client opens no link."""
    links = FollowedLinks("c")

    assert links.receiver_of(frame(0, incarnation="a", client="d"), {"a"}) == (None, [])
    assert list(links.receivers) == []


ONE, TWO = frozenset({RequestKey("r")}), frozenset({RequestKey("r"), RequestKey("s")})


def header(number: int, keys: frozenset[RequestKey] = TWO, *, link: int = 0, client: str = "c") -> FrameHeader:
    """Return the header of a frame that does not decode."""
    return FrameHeader(incarnation="w", number=number, link=link, client_incarnation=client, keys=keys, bad_keys=keys)


def asked(receiver: LinkReceiver, now: float) -> bool:
    """Return True if the receiver requests a resend now."""
    return receiver.message(window=WINDOW, now=now).resend


@pytest.mark.proves("P58")
def test_two_resends_that_do_not_decode_break_the_link() -> None:
    """The client requests an undecodable frame again immediately.

    If the second resend does not decode, the link is broken.
    """
    receiver = LinkReceiver("c")
    receiver.receive(frame(0), 100, 0)
    verdicts = []
    for _ in range(MAX_FAILED_RESENDS):
        verdicts.append(receiver.receive_unreadable(header(1), 100, 0))
        assert receiver.is_ack_due(WINDOW)
        assert asked(receiver, 0)
    verdicts.append(receiver.receive_unreadable(header(1), 100, 0))

    assert verdicts == [FrameVerdict.UNREADABLE, FrameVerdict.UNREADABLE, FrameVerdict.BROKEN]
    assert receiver.is_broken


def test_copies_of_one_frame_are_no_resends() -> None:
    """Copies of a frame that were not requested do not break the link."""
    receiver = LinkReceiver("c")
    verdicts = {receiver.receive_unreadable(header(0), 100, 0) for _ in range(9)}
    assert asked(receiver, 0)
    verdicts |= {receiver.receive_unreadable(header(0), 100, 0) for _ in range(9)}

    assert verdicts == {FrameVerdict.UNREADABLE}


def test_a_resend_that_decodes_repairs_the_link() -> None:
    """A resend that decodes resets the count of failures."""
    receiver = LinkReceiver("c")
    for number in range(5):
        for _ in range(MAX_FAILED_RESENDS):
            assert receiver.receive_unreadable(header(number), 100, 0) is FrameVerdict.UNREADABLE
            assert asked(receiver, 0)
        assert receiver.receive(frame(number), 100, 0) is FrameVerdict.ACCEPTED

    assert receiver.message(window=WINDOW, now=0).acked == 5


def test_an_undecodable_frame_of_a_single_request_is_skipped() -> None:
    """An undecodable next frame of a single request is skipped with its number and credit. The link continues."""
    receiver = LinkReceiver("c")
    verdicts = [
        receiver.receive_unreadable(header(0, ONE), 100, 0),
        receiver.receive_unreadable(header(0, ONE), 100, 0),
        receiver.receive_unreadable(header(2, ONE), 100, 0),
        receiver.receive(frame(1), 100, 0),
    ]
    message = receiver.message(window=1000, now=0)

    assert verdicts == [FrameVerdict.SKIPPED, FrameVerdict.DUPLICATE, FrameVerdict.GAP, FrameVerdict.ACCEPTED]
    assert (message.acked, message.credit) == (2, 1200)


def test_undecodable_frames_of_other_links_are_stale() -> None:
    """An undecodable frame for another client or of an earlier link is stale, however often it arrives."""
    receiver = LinkReceiver("c")
    receiver.receive(frame(0, link=1), 100, 0)
    receiver.receive(frame(2, link=1), 100, 0)
    verdicts = set()
    for now in range(9):
        assert asked(receiver, now)
        verdicts.add(receiver.receive_unreadable(header(1, client="b"), 100, now))
        verdicts.add(receiver.receive_unreadable(header(1, link=0), 100, now))

    assert verdicts == {FrameVerdict.STALE}


def test_bytes_without_a_header_break_a_link_with_an_old_gap() -> None:
    """Bytes without a header break a link if its gap is two seconds old and two resends did not decode."""
    receiver = LinkReceiver("c")
    receiver.receive(frame(0), 100, 0)
    receiver.receive(frame(2), 100, 0)
    verdicts = []
    for now in (0.0, 1.0, 2.0):
        assert asked(receiver, now)
        verdicts.append(receiver.receive_unreadable(None, 100, now))

    assert verdicts == [FrameVerdict.UNREADABLE, FrameVerdict.UNREADABLE, FrameVerdict.BROKEN]


def test_bytes_without_a_header_do_not_break_a_link_with_a_recent_gap() -> None:
    """Bytes without a header do not break a link with a recent gap, however many an attacker sends."""
    receiver = LinkReceiver("c")
    receiver.receive(frame(1), 100, 0)
    now, verdicts = 0.0, set()
    while now < UNREADABLE_GAP_S:
        assert asked(receiver, now)
        verdicts |= {receiver.receive_unreadable(None, 100, now) for _ in range(9)}
        now += RESEND_INTERVAL_S

    assert verdicts == {FrameVerdict.UNREADABLE}
    assert receiver.receive(frame(0), 100, now) is FrameVerdict.ACCEPTED


def test_frames_of_a_broken_link_are_stale_until_the_next_link() -> None:
    """Frames of a broken link are stale, and a later link starts again."""
    receiver = LinkReceiver("c")
    for _ in range(MAX_FAILED_RESENDS + 1):
        receiver.receive_unreadable(header(0), 100, 0)
        asked(receiver, 0)
    assert receiver.is_broken
    verdicts = [receiver.receive(frame(0), 100, 0), receiver.receive_unreadable(header(0, ONE), 100, 0)]
    assert not receiver.is_new_link(frame(0))
    assert receiver.is_new_link(frame(0, link=1))
    verdicts.append(receiver.receive(frame(0, link=1), 100, 0))

    assert verdicts == [FrameVerdict.STALE, FrameVerdict.STALE, FrameVerdict.ACCEPTED]
    assert not receiver.is_broken


@given(st.integers(1, 8), st.data())
def test_all_frames_before_an_undecodable_frame_are_accepted(count: int, data: st.DataObject) -> None:
    """All frames before an undecodable one are accepted.

    After the resends, the worker learns that it must start a new link.
    """
    bad = data.draw(st.integers(0, count - 1))
    has_header = data.draw(st.booleans())
    sender = LinkSender(incarnation="w", link=0, client_incarnation="c", max_frame_bytes=2**20)
    arrivals = []
    for number in range(count):
        sender.open(RequestKey(f"r{number}"), simple().writer())
        arrivals.append(sender.seal() or b"")
    receiver, taken, resends, now = LinkReceiver("c"), 0, 0, 0.0
    receiver.receive(decode_frame(sender.heartbeat()), 10, now)
    while not receiver.is_broken:
        for item in arrivals:
            message = decode_frame(item)
            if message.number == bad:
                receiver.receive_unreadable(header(bad) if has_header else None, len(item), now)
            else:
                taken += receiver.receive(message, len(item), now) is FrameVerdict.ACCEPTED
        now += 1
        if not receiver.is_broken:
            arrivals = sender.receive(receiver.message(window=WINDOW, now=now)).resend
            resends += 1
    first, second = receiver.break_messages()

    assert taken == bad
    assert resends <= MAX_FAILED_RESENDS + 2
    assert not sender.receive(first).needs_new_link
    assert sender.receive(second).needs_new_link


@given(st.lists(st.sampled_from(["junk", "lose", "harm", "next"]), max_size=60))
def test_lost_and_damaged_frames_are_finally_accepted_despite_an_attacker(events: list[str]) -> None:
    """An attacker's bytes do not prevent that lost and damaged frames are finally accepted once."""
    sender = LinkSender(incarnation="w", link=0, client_incarnation="c", max_frame_bytes=2**20)
    receiver, taken, num_sealed, now = LinkReceiver("c"), [], 0, 0.0

    def arrive(item: bytes) -> None:
        message = decode_frame(item)
        if receiver.receive(message, len(item), now) is FrameVerdict.ACCEPTED:
            taken.append(message.number)

    for event in [*events, "end"]:
        if event == "junk":
            assert receiver.receive_unreadable(None, 50, now) is FrameVerdict.UNREADABLE
            continue
        sender.open(RequestKey(f"r{num_sealed}"), simple().writer())
        item = sender.seal() or b""
        if event == "harm":
            receiver.receive_unreadable(header(num_sealed), len(item), now)
        elif event != "lose":
            arrive(item)
        num_sealed += 1
        now += 1
        for again in sender.receive(receiver.message(window=WINDOW, now=now)).resend:
            assert receiver.receive_unreadable(None, 50, now) is FrameVerdict.UNREADABLE
            arrive(again)

    assert taken == list(range(num_sealed))
