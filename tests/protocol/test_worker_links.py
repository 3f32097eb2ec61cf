"""The links of one worker id that a client follows: one after the other, or those of two workers side by side."""

from rollbus.bus.protocol.stream.link_receiver import FollowedLinks
from rollbus.schemas.decoding import WIRE_VERSION
from rollbus.schemas.messages import Frame, RequestKey


def frame(incarnation: str, *, link: int = 0, client: str = "c") -> Frame:
    """Return frame 0 of a link."""
    return Frame(WIRE_VERSION, incarnation, 0, [RequestKey("r")], [], link, client)


def test_a_new_incarnation_ends_the_earlier_link() -> None:
    """A new incarnation ends the earlier link.

    Late frames of the earlier incarnation are stale, also if it announced last.
    """
    links = FollowedLinks("c")
    first, ended = links.receiver_of(frame("a"), {"a"})
    assert first is not None
    assert ended == []
    second, ended = links.receiver_of(frame("b"), {"a"})
    assert second is not first
    assert ended == ["a"]
    assert links.receiver_of(frame("a"), {"a"}) == (None, [])
    assert list(links.receivers) == [second]


def test_the_links_of_two_workers_with_one_id_are_both_followed() -> None:
    """While two workers with one id publish presence, the links of both are followed."""
    links, live = FollowedLinks("c"), {"a", "b"}
    first, _ = links.receiver_of(frame("a"), {"a"})
    second, ended = links.receiver_of(frame("b"), live)

    assert ended == []
    assert links.receiver_of(frame("a"), live) == (first, [])
    assert links.receiver_of(frame("b"), live) == (second, [])


def test_a_worker_that_proves_to_be_alive_is_followed_again() -> None:
    """A worker that proves to be alive is followed from the first frame of its link.

    Until then its frames are stale.
    """
    links = FollowedLinks("c")
    first, _ = links.receiver_of(frame("a"), {"a"})
    links.receiver_of(frame("b"), {"a"})
    again, ended = links.receiver_of(frame("a"), {"a", "b"})

    assert ended == []
    assert again not in (None, first)


def test_of_two_workers_with_one_id_only_frames_of_the_ended_worker_are_stale() -> None:
    """The frames of the worker that ended are stale."""
    links = FollowedLinks("c")
    links.receiver_of(frame("a"), {"a", "b"})
    links.receiver_of(frame("b"), {"a", "b"})
    links.prune({"b"})

    assert [receiver.incarnation for receiver in links.receivers] == [None]
    assert links.receiver_of(frame("a"), {"b"}) == (None, [])


def test_a_frame_for_another_client_is_stale() -> None:
    """A frame for another client opens no link."""
    links = FollowedLinks("c")

    assert links.receiver_of(frame("a", client="d"), {"a"}) == (None, [])
    assert list(links.receivers) == []
