"""How a client receives a link: each frame once and in order, with acks, credit and requests for missing frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.link_receiver import MAX_UNACKED_FRAMES, RESEND_INTERVAL_S, FrameVerdict, LinkReceiver
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import Frame, RequestKey, decode_frame
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


@pytest.mark.parametrize("number", [0, 5])
def test_frames_are_accepted_from_number_zero_whichever_arrives_first(number: int) -> None:
    """Frames are accepted from number 0, whichever number arrives first. The client requests the missing frames."""
    receiver = LinkReceiver("c")
    verdicts = receive(receiver, frame(number))

    assert verdicts == [FrameVerdict.ACCEPTED if number == 0 else FrameVerdict.GAP]
    assert receiver.message(window=WINDOW, now=0).resend == (number > 0)


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
