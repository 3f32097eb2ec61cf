"""Which lanes a worker pulls next: never too many requests, each lane in its turns, and no lane is missed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollbus.bus.protocol.queue.pull_plan import (
    FEW_S,
    LOST_S,
    MAX_BATCH,
    MAX_OVER,
    PULLED_BYTES,
    RETRY_S,
    STANDING_S,
    STRICT,
    TURNS,
    Pull,
    PullPlan,
    PullStatus,
    decode_status,
)
from rollbus.schemas.request import Lane

LANES: tuple[Lane, ...] = ("resume", "high", "normal", "low")


def claimed(plan: PullPlan) -> int:
    """Return the number of messages that the open pulls may still deliver."""
    return sum(state.left for state in plan._lanes.values())


class Request(NamedTuple):
    lane: Lane
    waiting: int


class Ended(NamedTuple):
    number: int


@dataclass
class World:
    """A worker's plan, a simple server with waiting requests, and the messages on their way to the worker."""

    plan: PullPlan = field(default_factory=lambda: PullPlan(LANES, 1024))
    room: int = 1
    now: float = 0.0
    waiting: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    standing: dict[int, tuple[Lane, float]] = field(default_factory=dict)
    """Pull requests that wait at the server, by number, with their end."""
    messages: deque[Request | Ended] = field(default_factory=deque)
    """Messages on their way to the worker."""
    taken: list[Lane] = field(default_factory=list)

    @property
    def num_expected(self) -> int:
        """Number of requests that the worker may receive without another pull."""
        return len(self.standing) + sum(isinstance(message, Request) for message in self.messages)

    def pull(self) -> list[Pull]:
        """Execute the plan's pulls, and assert that they do not request too much."""
        pulls = self.plan.next_pulls(self.room, self.now)
        for pull in pulls:
            assert pull.num_pulls > 0
            for _ in range(sent := min(pull.num_pulls, self.waiting[pull.lane])):
                self.send(pull.lane)
            if sent < pull.num_pulls and pull.is_standing:
                self.standing[pull.number] = (pull.lane, self.now + STANDING_S)
            elif sent < pull.num_pulls:
                ends = 1 if self.plan.is_batched else pull.num_pulls - sent
                self.messages.extend([Ended(pull.number)] * ends)
        assert not pulls or self.num_expected <= claimed(self.plan) <= self.room + MAX_OVER
        return pulls

    def publish(self, lane: Lane, count: int = 1) -> None:
        """Let a client publish requests."""
        self.waiting[lane] += count
        for number, (stands_on, _) in list(self.standing.items()):
            if stands_on == lane:
                del self.standing[number]
                self.send(lane)

    def send(self, lane: Lane) -> None:
        self.waiting[lane] -= 1
        self.messages.append(Request(lane, self.waiting[lane]))

    def receive(self) -> None:
        """Let the worker receive the next message on its way."""
        if self.messages:
            message = self.messages.popleft()
            if isinstance(message, Ended):
                self.plan.end_pull(message.number, PullStatus.EMPTY, self.now)
            else:
                self.plan.count_message(message.lane, waiting=message.waiting)
                self.taken.append(message.lane)
                self.room -= 1

    def settle(self) -> None:
        """Pull and receive until no message is on its way and the plan pulls no more."""
        for _ in range(1000):
            if not (self.pull() or self.messages):
                return
            self.receive()
        raise AssertionError("there is no end to the pulling")

    def advance(self, seconds: float) -> None:
        """Advance the time; all messages on their way arrive."""
        while self.messages:
            self.receive()
        self.now += seconds
        for number, (_, ends_at) in list(self.standing.items()):
            if ends_at <= self.now:
                del self.standing[number]
                self.messages.append(Ended(number))
        while self.messages:
            self.receive()

    def lose(self) -> None:
        """Lose all messages on their way and the pulls at the server."""
        self.messages.clear()
        self.standing.clear()

    def reconnect(self) -> None:
        """Let the connection break and return."""
        self.lose()
        self.plan.reset()

    def set_room(self, room: int) -> None:
        """Set the room, as if requests ended or arrived elsewhere."""
        self.room = room


EVENTS: st.SearchStrategy[Callable[[World], None]] = st.one_of(
    st.builds(partial, st.just(World.publish), lane=st.sampled_from(LANES), count=st.integers(1, 4)),
    st.builds(partial, st.just(World.set_room), room=st.integers(-1, 6)),
    st.builds(partial, st.just(World.advance), seconds=st.sampled_from([0.1, STANDING_S, LOST_S + STANDING_S])),
    st.sampled_from([World.receive, World.lose, World.reconnect]),
)


def play(world: World, events: list[Callable[[World], None]]) -> None:
    """Run the events, and let the worker pull after each of them."""
    for event in events:
        event(world)
        world.pull()


@pytest.mark.slow
@given(st.lists(EVENTS, min_size=20, max_size=40), st.booleans())
def test_a_pull_claims_at_most_three_more_requests_than_the_room(
    events: list[Callable[[World], None]], is_batched: bool
) -> None:
    """After each pull, at most three more requests than the room may arrive, regardless of earlier events."""
    world = World()
    world.plan.is_batched = is_batched
    play(world, events)  # World.pull asserts the rule


@given(st.lists(EVENTS, max_size=40), st.booleans())
def test_a_worker_with_room_finally_pulls_every_lane(events: list[Callable[[World], None]], is_batched: bool) -> None:
    """A worker with room finally receives all waiting requests, and then has a pull on each lane."""
    world = World()
    world.plan.is_batched = is_batched
    play(world, events)
    world.room = 1000
    world.advance(LOST_S + STANDING_S)
    world.settle()

    assert not any(world.waiting.values())
    assert sorted(lane for lane, _ in world.standing.values()) == sorted(LANES)


def test_an_idle_worker_has_one_waiting_pull_on_each_lane() -> None:
    """If all lanes are empty, one pull waits on each lane, so that the next request arrives immediately."""
    world = World(room=100)
    world.settle()

    assert {lane for lane, _ in world.standing.values()} == set(LANES)
    assert claimed(world.plan) == len(LANES)

    world.publish("normal")
    world.receive()
    (pull,) = world.pull()

    assert pull == Pull("normal", pull.number, 1, None, True)


def test_if_more_requests_wait_the_next_pull_requests_as_many_as_the_room_allows() -> None:
    """If more requests wait behind the first, the next pull requests the rest, up to the room and the largest batch."""
    world = World(room=4)
    world.settle()
    world.plan.count_message("low", waiting=10)
    (pull,) = world.pull()

    assert pull == Pull("low", pull.number, 4, None, False)

    world = World(room=10_000)
    world.settle()
    world.plan.count_message("low", waiting=9_000)
    (pull,) = world.pull()

    assert pull.num_pulls == MAX_BATCH


def test_without_room_the_state_of_the_queue_is_unknown_after_a_second() -> None:
    """A worker without room does not pull. A second later, the state of the queue is unknown to it."""
    world = World(room=1)
    assert world.plan.lanes_waiting(world.now) is None
    world.settle()
    assert world.plan.lanes_waiting(world.now) == ()
    world.set_room(0)
    assert world.plan.lanes_waiting(world.now + STANDING_S) == ()
    assert world.plan.lanes_waiting(world.now + STANDING_S + 0.001) is None
    world.plan.reset()
    assert world.plan.lanes_waiting(world.now) is None


def test_a_worker_filled_before_its_last_lane_answers_learns_that_the_queue_is_empty() -> None:
    """If placed requests fill a worker before its last lane answers, it still learns that the queue is empty."""
    world = World(room=4)
    while world.plan.lanes_waiting(world.now) is None:
        # The room is used up while the pull on the last lane is on its way.
        world.room = 0 if any(pull.lane == "low" for pull in world.pull()) else world.room
        world.receive()
    assert world.plan.lanes_waiting(world.now) == ()
    assert world.pull() == []
    assert not any(lane == "low" for lane, _ in world.standing.values())


def test_a_lane_with_more_messages_counts_as_waiting_until_a_pull_finds_no_message() -> None:
    """A lane that had more messages counts as waiting until a pull finds it empty."""
    world = World(room=10)
    world.settle()
    world.publish("normal", 3)
    world.receive()
    assert world.plan.lanes_waiting(world.now) == ("normal",)
    world.settle()
    assert world.taken == ["normal"] * 3
    assert world.plan.lanes_waiting(world.now) == ()


def test_a_pull_on_an_unknown_lane_requests_one_message() -> None:
    """A pull on an unknown lane requests one message, because an empty pull costs the server as much as a message."""
    (pull,) = World(room=10_000).pull()

    assert pull.num_pulls == 1


@pytest.mark.parametrize("room", [0, -1, -1000])
def test_a_worker_without_room_does_not_pull(room: int) -> None:
    """Without room, a worker does not pull until an event changes the room."""
    world = World(room=room)

    assert world.pull() == []
    assert world.plan.next_at(world.now) is None


def test_a_worker_with_more_messages_on_their_way_than_room_does_not_pull() -> None:
    """A worker with more messages on their way than room does not pull, not even the first lane."""
    world = World(room=6)
    world.settle()
    world.plan.count_message("normal", waiting=10)
    world.pull()
    world.plan.count_message("resume", waiting=10)

    for room, counts in [(1, []), (5, []), (7, [2])]:
        world.room = room

        assert [pull.num_pulls for pull in world.pull()] == counts

    assert claimed(world.plan) == 10


def test_a_lane_that_was_empty_is_pulled_again_when_there_is_room() -> None:
    """An empty lane counts as empty only for the next pull, because later it may have more urgent requests."""
    world = World()
    world.pull()
    world.room = 0
    world.receive()

    assert world.pull() == []

    world.room = 1

    assert [(pull.lane, pull.is_standing) for pull in world.pull()] == [("resume", False)]


def test_after_a_refusal_a_lane_is_pulled_later_and_the_other_lanes_meanwhile() -> None:
    """After a refusal, a lane is pulled again a little later. The lanes behind it are pulled meanwhile."""
    world = World()
    (refused,) = world.pull()
    world.messages.clear()
    world.plan.end_pull(refused.number, PullStatus.REFUSED, world.now)

    assert [pull.lane for pull in world.pull()] == ["high"]
    assert world.plan.next_at(world.now) == RETRY_S

    world.now = RETRY_S
    world.receive()

    assert "resume" in [pull.lane for pull in world.pull()]


def test_a_lane_counts_as_empty_only_after_the_last_answer_to_a_pull() -> None:
    """A lane counts as empty only after the last message or status of a pull."""
    world = World(room=3)
    world.settle()
    world.standing.clear()
    world.plan.count_message("resume", waiting=10)
    (probe,) = world.pull()
    world.plan.count_message("resume", waiting=0)
    world.plan.end_pull(probe.number, PullStatus.EMPTY, world.now)

    assert probe.num_pulls == 3
    assert world.pull() == []

    world.plan.end_pull(probe.number, PullStatus.EMPTY, world.now)

    assert [(pull.lane, pull.is_standing) for pull in world.pull()] == [("resume", True)]


def test_if_requests_may_be_large_a_pull_limits_their_size_or_number() -> None:
    """If requests may be large, a pull requests many small messages or few of any size."""
    world = World(PullPlan(LANES, PULLED_BYTES // 4), room=1000)
    world.settle()
    world.plan.count_message("resume", waiting=1000)
    (pull,) = world.pull()

    assert (pull.num_pulls, pull.max_bytes) == (MAX_BATCH, PULLED_BYTES // MAX_BATCH)

    for _ in range(MAX_BATCH):
        assert world.pull() == []
        world.plan.end_pull(pull.number, PullStatus.TOO_LARGE, world.now)
    (few,) = world.pull()

    assert (few.lane, few.num_pulls, few.max_bytes) == ("resume", 4, None)

    world.now = FEW_S
    world.plan.end_pull(few.number, PullStatus.COMPLETE, world.now)
    for _ in range(4):
        world.plan.count_message("resume", waiting=1000)
    (pull,) = world.pull()

    assert pull.num_pulls == MAX_BATCH


def test_the_end_of_a_batched_pull_is_the_end_of_all_its_messages() -> None:
    """A pull that is published once for many messages has one end, after which the lane is pulled again."""
    world = World(room=100)
    world.plan.is_batched = True
    world.settle()
    world.standing.clear()
    world.plan.count_message("resume", waiting=10)
    (probe,) = world.pull()
    assert probe.num_pulls == 20
    world.plan.count_message("resume", waiting=0)
    world.plan.end_pull(probe.number, PullStatus.EMPTY, world.now)

    assert [(pull.lane, pull.is_standing) for pull in world.pull()] == [("resume", True)]


def test_a_lost_pull_is_repeated() -> None:
    """A pull without an answer counts as lost after a second, and a late answer is ignored."""
    world = World()
    (lost,) = world.pull()
    world.lose()

    assert world.pull() == []
    assert world.plan.next_at(world.now) == LOST_S

    world.now = LOST_S
    (again,) = world.pull()

    assert (again.lane, again.number != lost.number) == ("resume", True)

    world.plan.end_pull(lost.number, PullStatus.EMPTY, world.now)

    assert claimed(world.plan) == 1


@pytest.mark.parametrize(
    ("code", "description", "answer"),
    [
        ("404", "No Messages", PullStatus.EMPTY),
        ("408", "Request Timeout", PullStatus.EMPTY),
        ("503", "", PullStatus.MISSING),
        ("409", "Consumer Deleted", PullStatus.MISSING),
        ("409", "Message Size Exceeds MaxBytes", PullStatus.TOO_LARGE),
        ("409", "Batch Completed", PullStatus.COMPLETE),
        ("409", "Server Shutdown", PullStatus.REFUSED),
        ("409", "Exceeded MaxWaiting", PullStatus.REFUSED),
        ("", "", PullStatus.REFUSED),
    ],
)
def test_each_status_of_the_server_has_its_own_meaning(code: str, description: str, answer: PullStatus) -> None:
    """Each status of the server means an empty lane, a complete pull, a missing queue, or a retry."""
    assert decode_status(code, description) is answer


def pull_all(published: dict[Lane, int], room: int = 1) -> list[Lane]:
    """Return the lanes of all requests in the order in which a worker with room for `room` at a time pulls them."""
    world = World(room=0)
    for lane, count in published.items():
        world.publish(lane, count)
    while any(world.waiting.values()):
        world.set_room(room)
        world.settle()
    return world.taken


@pytest.mark.parametrize("room", [1, 8, 64, 200])
def test_of_eight_requests_each_lane_gets_its_turns(room: int) -> None:
    """Of eight requests, five come from `resume` and one from each other lane, if all lanes have requests."""
    taken = pull_all(dict.fromkeys(LANES, 500), room)[: 8 * 100]

    assert {lane: taken.count(lane) / 100 for lane in LANES} == pytest.approx(
        {"resume": 5, "high": 1, "normal": 1, "low": 1}, abs=0.4
    )


@pytest.mark.slow
@given(st.fixed_dictionaries(dict.fromkeys(LANES, st.integers(0, 40))))
def test_turns_of_an_empty_lane_go_to_the_first_lane_in_strict_order(published: dict[Lane, int]) -> None:
    """Each request is of the lane of its turn, or of the first lane in strict order if that lane has no request."""
    expected, left = [], dict(published)
    for turn in range(sum(published.values())):
        lane = next(lane for lane in (TURNS[turn % len(TURNS)], *STRICT) if left[lane])
        left[lane] -= 1
        expected.append(lane)

    assert pull_all(published) == expected


@given(st.lists(EVENTS, max_size=40))
def test_without_resumed_requests_seven_of_eight_are_strict(
    events: list[Callable[[World], None]],
) -> None:
    """After any events, seven of eight requests are of lane `normal` if lanes `normal` and `low` have requests."""
    world = World()
    play(world, events)
    world.reconnect()
    world.waiting = dict.fromkeys(LANES, 0) | {"normal": 100, "low": 100}
    world.taken.clear()
    for _ in range(80):
        world.room = 1
        world.settle()

    assert 68 <= world.taken[:80].count("normal") <= 72
