"""Frames that do not decode: frames of the worker break the link after two resends, frames of an attacker never do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.stream.link_receiver import (
    MAX_FAILED_RESENDS,
    RESEND_INTERVAL_S,
    UNREADABLE_GAP_S,
    FrameVerdict,
    LinkReceiver,
)
from rollbus.bus.protocol.stream.link_sender import LinkSender
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import Frame, FrameHeader, RequestKey, decode_frame
from tests.support.scenarios import simple

WINDOW = 2**20
ONE, TWO = frozenset({RequestKey("r")}), frozenset({RequestKey("r"), RequestKey("s")})


def header(number: int, keys: frozenset[RequestKey] = TWO, *, link: int = 0, client: str = "c") -> FrameHeader:
    """Return the header of a frame that does not decode."""
    return FrameHeader(incarnation="w", number=number, link=link, client_incarnation=client, keys=keys, bad_keys=keys)


def frame(number: int, *, link: int = 0) -> Frame:
    """Return a frame with an offer."""
    return Frame(WIRE_VERSION, "w", number, [RequestKey("r")], [], link, "c")


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
