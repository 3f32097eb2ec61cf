"""The requests that a client holds while its share of a lane is full: in order, each once, none lost."""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.pull_plan import HeldBack

SHARE = 3
SUBJECTS = ("normal", "high")


class World:
    """A client that publishes, and a simple queue with a share of `SHARE` for each subject."""

    def __init__(self) -> None:
        self.held_back = HeldBack()
        self.next_number = 0
        self.queued: dict[str, list[int]] = {subject: [] for subject in SUBJECTS}
        self.subject_of: dict[int, str] = {}
        self.stored: list[int] = []
        self.discarded: set[int] = set()
        self.held: set[int] = set()

    def publish(self, subject: str) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        self.subject_of[number] = subject
        if self.held_back.holds(subject):
            self.hold(number)
        else:
            self.send(number)

    def send(self, number: int) -> None:
        subject = self.subject_of[number]
        if len(self.queued[subject]) == SHARE:
            self.hold(number)
        else:
            self.queued[subject].append(number)
            self.stored.append(number)
            self.held_back.add_room(subject)

    def hold(self, number: int) -> None:
        self.held.add(number)
        self.held_back.add(self.subject_of[number], number)

    def accept(self, subject: str) -> None:
        """Let a worker accept the first request."""
        if self.queued[subject]:
            self.queued[subject].pop(0)
            self.held_back.add_room(subject)

    def lose_room(self, subject: str) -> None:
        """Remove a request without a notification to the client."""
        self.queued[subject] = self.queued[subject][1:]

    def discard(self, which: int) -> None:
        if self.held:
            number = sorted(self.held)[which % len(self.held)]
            self.held.remove(number)
            self.discarded.add(number)
            self.held_back.discard(number)

    def flush(self) -> None:
        while due := self.held_back.pop_due():
            for number in due:
                assert number in self.held
                self.held.remove(number)
                self.send(number)

    def probe(self) -> None:
        self.held_back.add_room_everywhere()
        self.flush()


EVENTS: st.SearchStrategy[Callable[[World], None]] = st.one_of(
    st.builds(partial, st.just(World.publish), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(World.accept), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(World.lose_room), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(World.discard), which=st.integers(0, 5)),
    st.sampled_from([World.flush, World.probe]),
)


@pytest.mark.proves("P44")
@given(st.lists(EVENTS, max_size=60))
def test_held_requests_are_stored_once_and_in_order_of_publication(events: list[Callable[[World], None]]) -> None:
    """After any events, each request that was not discarded is finally stored once, in the order of publication."""
    world = World()
    for event in events:
        event(world)
    for _ in range(100):
        for subject in SUBJECTS:
            world.lose_room(subject)
        world.probe()

    assert len(world.held_back) == 0
    assert not any(world.held_back.holds(subject) for subject in SUBJECTS)
    assert sorted([*world.stored, *world.discarded]) == list(range(world.next_number))
    for subject in SUBJECTS:
        of_subject = [number for number in world.stored if world.subject_of[number] == subject]
        assert of_subject == sorted(of_subject)


def test_each_request_that_leaves_the_queue_releases_one_held_request() -> None:
    """While no request leaves the queue, the client publishes a held request only as a probe.

    Each request that leaves releases one held request.
    """
    world = World()
    for _ in range(10):
        world.publish("normal")
    world.flush()

    assert world.stored == [0, 1, 2]
    assert world.held_back.pop_due() == []

    world.accept("normal")
    world.flush()

    assert world.stored == [0, 1, 2, 3]
    assert len(world.held_back) == 6
