"""Detection of poison requests: requests that kill engines are found, and requests beside them are not blamed."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollbus.bus.protocol.attempt.suspects import Company, Suspects
from rollbus.bus.protocol.queue.prefill_queue import (
    FULL_S,
    SILENT_S,
    Decision,
    PrefillFallback,
    PrefillQueue,
    PrefillRequirements,
    PrefillWorkerInfo,
)
from rollbus.bus.protocol.queue.pull_plan import HeldBack
from rollbus.schemas.limits import MAX_ENGINE_DEATHS, MAX_ENGINE_DEATHS_ALONE

M = "model"


def engine(number: int) -> tuple[str, str]:
    """Return an incarnation of the only worker."""
    return "w", str(number)


def died(suspects: Suspects[str], number: int, *lost: str, others: int = 0) -> dict[str, int]:
    """Record the death of engine `number`, which had `lost` and `others` more requests, all without a token."""
    company = suspects.at_death(engine(number), Company(len(lost) + others, len(lost) + others))
    return suspects.record_death(engine(number), M, lost, was_alone=company.num_untokened == 1)


@pytest.mark.proves("P54")
def test_suspects_are_tried_one_at_a_time() -> None:
    """The next suspect is tried when the current one has a token or has ended. A cleared suspect is removed."""
    suspects: Suspects[str] = Suspects()
    assert died(suspects, 0, "a", "b", "c") == {}
    assert all(map(suspects.is_held, "abc"))

    for key in "abc":
        assert suspects.next(M) == key
        assert suspects.next(M) is None
        assert not suspects.is_held(key)
        suspects.clear(key)
        assert key not in suspects

    assert suspects.next(M) is None


def test_each_model_has_its_own_suspect_on_trial() -> None:
    """Each model has its own suspect on trial."""
    suspects: Suspects[str] = Suspects()
    suspects.record_death(engine(0), "m1", ["a", "b"], was_alone=False)
    suspects.record_death(engine(1), "m2", ["c"], was_alone=True)

    assert [suspects.next(model) for model in ("m1", "m2", "m1", "m2")] == ["a", "c", None, None]
    assert dict(suspects.on_trial()) == {"m1": "a", "m2": "c"}


@pytest.mark.proves("P54")
def test_a_request_that_was_alone_in_two_deaths_is_poison() -> None:
    """A request that was alone in two deaths is poison, because no other request of the client can be the cause.

    One death is no proof.
    """
    suspects: Suspects[str] = Suspects()
    assert died(suspects, 0, "a") == {}
    assert suspects.next(M) == "a"
    assert died(suspects, 1, "a") == {"a": MAX_ENGINE_DEATHS_ALONE}
    assert "a" not in suspects


@pytest.mark.proves("P54")
def test_a_request_that_was_beside_others_is_poison_after_three_deaths() -> None:
    """A request that was beside others without a token is poison after three deaths in a row."""
    suspects: Suspects[str] = Suspects()
    assert died(suspects, 0, "a", "x") == {}
    assert suspects.next(M) == "a"
    assert died(suspects, 1, "a", "y") == {}
    for innocent in "xy":
        assert suspects.next(M) == innocent, "those in fewer deaths come first"
        suspects.clear(innocent)
    assert suspects.next(M) == "a"
    assert died(suspects, 2, "a", "z") == {"a": MAX_ENGINE_DEATHS}
    assert suspects.next(M) == "z"


def test_the_first_frame_about_a_death_decides_whether_a_request_was_alone() -> None:
    """The first frame about a death decides whether a request was alone, not the requests left at the last frame."""
    suspects: Suspects[str] = Suspects()
    died(suspects, 0, "a", "b")
    suspects.next(M)
    suspects.pass_over("a")
    suspects.next(M)
    assert died(suspects, 1, "a", others=1) == {}
    assert died(suspects, 1, "b") == {}


def test_a_token_of_a_request_resets_its_count_of_deaths() -> None:
    """A token of a request resets its count of deaths."""
    suspects: Suspects[str] = Suspects()
    died(suspects, 0, "a")
    suspects.next(M)
    suspects.clear("a")
    assert died(suspects, 1, "a") == {}


def test_a_suspect_that_no_worker_can_accept_does_not_delay_the_next_suspect() -> None:
    """A suspect that no worker can accept stays a suspect, and the next suspect is tried meanwhile."""
    suspects: Suspects[str] = Suspects()
    died(suspects, 0, "a", "b", "c")
    suspects.next(M)
    suspects.pass_over("a")
    assert suspects.next(M) == "b"
    suspects.clear("a")
    assert suspects.next(M) is None, "`b` is still on trial"
    assert "b" in suspects


def test_requests_that_are_held_only_because_of_a_silent_worker_are_released() -> None:
    """If a worker was only silent, requests held only because of it are released, and so is the next suspect.

    Suspects of other deaths remain.
    """
    suspects: Suspects[str] = Suspects()
    died(suspects, 0, "a", "b")
    suspects.next(M)
    died(suspects, 1, "a", "c")
    assert suspects.undo_death(engine(1)) == ["c", "b"]
    assert [key for key in "abc" if key in suspects] == ["a", "b"]
    suspects.clear("b")
    assert suspects.next(M) == "a"
    died(suspects, 2, "d")
    assert suspects.undo_death(engine(0)) == ["d"], "the trial of `a` is over"
    assert "a" not in suspects
    assert suspects.undo_death(engine(7)) == []


@dataclass
class World:
    """A client, its queue, and engines that run all waiting requests. An engine dies when it starts a bad request."""

    bad: frozenset[int]
    slots: int
    suspects: Suspects[int] = field(default_factory=Suspects)
    queue: deque[int] = field(default_factory=deque)
    num_deaths: int = 0
    done: list[int] = field(default_factory=list)
    poison: list[int] = field(default_factory=list)

    def step(self, pick: int) -> None:
        """Start an engine on the requests that fit, taken from anywhere in the queue."""
        self.queue.rotate(pick)
        taken = [self.queue.popleft() for _ in range(min(self.slots, len(self.queue)))]
        if self.bad.isdisjoint(taken):
            for key in taken:
                self.suspects.clear(key)
            self.done += taken
        else:
            self.num_deaths += 1
            poison = self.suspects.record_death(engine(self.num_deaths), M, taken, was_alone=len(taken) == 1)
            self.poison += poison
            assert all(self.suspects.is_held(key) for key in taken if key not in poison)
        if (tried := self.suspects.next(M)) is not None:
            self.queue.append(tried)
        assert sum(key in self.suspects for key in self.queue) <= 1


@pytest.mark.proves("P3")
@given(
    count=st.integers(1, 40),
    bad=st.frozensets(st.integers(0, 39), max_size=4),
    slots=st.integers(1, 40),
    picks=st.lists(st.integers(0, 40), max_size=20),
)
def test_in_a_burst_only_requests_that_kill_engines_fail_as_poison(
    count: int, bad: frozenset[int], slots: int, picks: list[int]
) -> None:
    """Innocent requests finish, bad requests fail as poison, and each bad request kills at most three engines."""
    world = World(frozenset(key for key in bad if key < count), slots)
    world.queue.extend(range(count))
    moves = iter(picks)
    while world.queue:
        world.step(next(moves, 0))

    assert sorted(world.poison) == sorted(world.bad)
    assert sorted(world.done) == sorted(set(range(count)) - world.bad)
    assert world.num_deaths <= MAX_ENGINE_DEATHS * len(world.bad)
    assert len(list(world.suspects.on_trial())) == 0


# The requests that a client holds while its share of a lane is full: in order, each once, none lost.


SHARE = 3
SUBJECTS = ("normal", "high")


class HeldBackWorld:
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


EVENTS: st.SearchStrategy[Callable[[HeldBackWorld], None]] = st.one_of(
    st.builds(partial, st.just(HeldBackWorld.publish), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(HeldBackWorld.accept), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(HeldBackWorld.lose_room), subject=st.sampled_from(SUBJECTS)),
    st.builds(partial, st.just(HeldBackWorld.discard), which=st.integers(0, 5)),
    st.sampled_from([HeldBackWorld.flush, HeldBackWorld.probe]),
)


@pytest.mark.proves("P44")
@given(st.lists(EVENTS, max_size=60))
def test_held_requests_are_stored_once_and_in_order_of_publication(
    events: list[Callable[[HeldBackWorld], None]],
) -> None:
    """After any events, each request that was not discarded is finally stored once, in the order of publication."""
    world = HeldBackWorld()
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
    world = HeldBackWorld()
    for _ in range(10):
        world.publish("normal")
    world.flush()

    assert world.stored == [0, 1, 2]
    assert world.held_back.pop_due() == []

    world.accept("normal")
    world.flush()

    assert world.stored == [0, 1, 2, 3]
    assert len(world.held_back) == 6


# The prefill queue: which requests get a prefill worker, wait, or are served without one.


def prefill_worker(
    worker: str, num_slots: int = 2, weight_version: int = 0, loras: tuple[str, ...] = ()
) -> PrefillWorkerInfo:
    """Return a prefill worker."""
    return PrefillWorkerInfo(worker, num_slots, 1000, weight_version, weight_version, frozenset(loras))


def requirements(affinity: str = "r", **fields: Any) -> PrefillRequirements:
    """Return the prefill requirements of a request."""
    return PrefillRequirements(**{"affinity": affinity, "prompt_len": 40, **fields})


def queue_of(*keys: str, until: float = 2.0) -> PrefillQueue[str]:
    """Return a queue of requests that arrived in this order at time 0."""
    queue = PrefillQueue[str]()
    for key in keys:
        queue.add(key, requirements(key), until=until)
    return queue


def test_prefill_workers_fill_in_proportion_to_their_slots() -> None:
    """Prefill workers fill in proportion to their slots and never beyond them."""
    queue = queue_of(*(f"r{i}" for i in range(10)))
    decisions = queue.decide([prefill_worker("a", 2), prefill_worker("b", 4)], 0)

    assert Counter(decision.worker for decision in decisions) == {"a": 2, "b": 4}
    assert Counter(decision.worker for decision in decisions[:3]) == {"a": 1, "b": 2}
    assert len(queue) == 4


def test_free_slots_go_to_requests_in_order_of_priority_then_of_arrival() -> None:
    """Free slots go to requests in order of priority, then of arrival."""
    queue = PrefillQueue[str]()
    for key, priority in (("x", 0), ("low", 1), ("y", 0), ("high", -1)):
        queue.add(key, requirements(priority=priority), until=2)
    order = []
    for _ in range(4):
        [decision] = queue.decide([prefill_worker("a", 1)], 0)
        order.append(decision.key)
        queue.remove(decision.key)

    assert order == ["high", "x", "y", "low"]


def test_requests_go_to_their_preferred_worker_until_that_worker_is_full() -> None:
    """Requests go to their preferred worker until it is full, and then to another worker."""
    queue = PrefillQueue[int]()
    for turn in range(5):
        queue.add(turn, requirements("s", preferred="b"), until=2)
    workers = [decision.worker for decision in queue.decide([prefill_worker("a", 4), prefill_worker("b", 4)], 0)]

    assert workers == ["b"] * 4 + ["a"]


def test_after_its_waiting_time_a_request_is_served_without_a_prefill_worker() -> None:
    """A request whose waiting time is over is served without a prefill worker. Later requests still wait."""
    queue = queue_of("a", "b")
    queue.decide([prefill_worker("w", 1)], 0)
    queue.add("c", requirements(), until=3)

    assert queue.decide([prefill_worker("w", 1)], 1.9) == []
    assert queue.next_decision_at() == 2.0
    assert queue.decide([prefill_worker("w", 1)], 2.0) == [Decision("b", None, PrefillFallback.BUSY)]
    assert queue.next_decision_at() == 3.0


@pytest.mark.parametrize(
    ("needed", "fitting"),
    [
        ({"min_weight_version": 3}, {"weight_version": 3}),
        ({"lora": "style"}, {"loras": ("style",)}),
    ],
)
def test_a_request_goes_to_a_worker_with_its_weights_or_adapter(
    needed: dict[str, Any], fitting: dict[str, Any]
) -> None:
    """A request goes to a worker with its weights or adapter.

    If there is none, it continues without a prefill worker immediately.
    """
    for prefill_workers, expected in (
        ([prefill_worker("a")], Decision("r", None, PrefillFallback.UNSUITABLE)),
        ([prefill_worker("a"), prefill_worker("b", **fitting)], Decision("r", "b", None)),
    ):
        queue = PrefillQueue[str]()
        queue.add("r", requirements(**needed), until=2)
        assert queue.decide(prefill_workers, 0) == [expected]


@pytest.mark.parametrize(("prompt_len", "worker"), [(998, "a"), (999, None)])
def test_a_prompt_with_room_for_only_one_token_gets_no_prefill_worker(prompt_len: int, worker: str | None) -> None:
    """A prompt with room for only one token is served without a prefill worker.

    The prefill phase could not tell the end of the request from its own end.
    """
    queue = PrefillQueue[str]()
    queue.add("r", requirements(prompt_len=prompt_len), until=2)

    assert queue.decide([prefill_worker("a")], 0)[0].worker == worker


def test_a_worker_that_rejected_a_request_is_skipped_for_a_while() -> None:
    """After a rejection, the queue skips a full worker for a moment, and a silent worker for a lease.

    The request keeps its deadline.
    """
    for is_full, pause_s in ((True, FULL_S), (False, SILENT_S)):
        queue = queue_of("r", until=100)
        queue.decide([prefill_worker("a")], 0)
        queue.reject("r", 0, is_full=is_full)
        queue.add("r", requirements(), until=100)

        assert queue.decide([prefill_worker("a")], pause_s - 0.01) == []
        assert queue.next_decision_at() == pause_s
        assert queue.decide([prefill_worker("a")], pause_s) == [Decision("r", "a", None)]


def test_after_a_rejection_another_worker_gets_the_request_immediately() -> None:
    """After a rejection, another worker gets the request immediately."""
    queue = queue_of("r")
    [first] = queue.decide([prefill_worker("a"), prefill_worker("b")], 0)
    queue.reject("r", 0, is_full=False)
    queue.add("r", requirements(), until=2)
    [second] = queue.decide([prefill_worker("a"), prefill_worker("b")], 0)

    assert {first.worker, second.worker} == {"a", "b"}


class PrefillQueueMachine(RuleBasedStateMachine):
    """A queue under any order of events, checked against its invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PrefillQueue[int]()
        self.now = 0.0
        self.serial = 0
        self.waiting: dict[int, float] = {}
        self.prefills: dict[int, str] = {}
        self.slots = {"a": 1, "b": 3}

    @rule(wait_s=st.floats(0, 2), priority=st.integers(-1, 1), min_version=st.integers(0, 1))
    def add(self, wait_s: float, priority: int, min_version: int) -> None:
        """Add a request."""
        until = self.now + wait_s
        self.queue.add(
            self.serial, requirements(str(self.serial), priority=priority, min_weight_version=min_version), until=until
        )
        self.waiting[self.serial] = until
        self.serial += 1

    @rule(at=st.integers(0, 30))
    def remove(self, at: int) -> None:
        """Remove a request in any state."""
        self.queue.remove(at)
        self.waiting.pop(at, None)
        self.prefills.pop(at, None)

    @rule(at=st.integers(0, 30), is_full=st.booleans())
    def refuse(self, at: int, is_full: bool) -> None:
        """Let a worker reject a request."""
        if self.prefills.pop(at, None) is not None:
            self.queue.reject(at, self.now, is_full=is_full)

    @rule(seconds=st.floats(0, 1))
    def pass_time(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds

    @rule(num_workers=st.integers(0, 2))
    def decide(self, num_workers: int) -> None:
        """Assert that each decided request was waiting.

        Requests that still wait are neither late nor without workers.
        """
        prefill_workers = [
            prefill_worker(worker, self.slots[worker], weight_version=worker == "a") for worker in "ab"[:num_workers]
        ]
        for key, worker, reason in self.queue.decide(prefill_workers, self.now):
            until = self.waiting.pop(key)
            assert (worker is None) == (reason is not None)
            assert reason is not PrefillFallback.BUSY or until <= self.now
            assert (reason is PrefillFallback.NO_WORKER) == (not prefill_workers and worker is None)
            if worker is not None:
                self.prefills[key] = worker
        assert all(until > self.now for until in self.waiting.values())
        assert not self.waiting or prefill_workers

    @invariant()
    def no_worker_exceeds_its_slots(self) -> None:
        """Assert that no worker exceeds its slots, and that the counts equal the decisions."""
        assert all(count <= self.slots[worker] for worker, count in Counter(self.prefills.values()).items())
        assert len(self.queue) == len(self.waiting)

    @invariant()
    def a_decision_is_due_by_the_first_deadline(self) -> None:
        """Assert that waiting requests have a next decision time no later than the first deadline."""
        next_decision = self.queue.next_decision_at()
        assert (next_decision is None) == (not self.waiting)
        assert next_decision is None or next_decision <= min(self.waiting.values())


PrefillQueueMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefillQueue = PrefillQueueMachine.TestCase


@given(st.integers(1, 40), st.integers(1, 5))
def test_each_request_is_served_once_and_in_order(count: int, num_slots: int) -> None:
    """As prefill phases end, each request is served once and in order."""
    queue = queue_of(*(f"r{i}" for i in range(count)), until=1e9)
    served: list[str] = []
    while len(queue):
        decisions = queue.decide([prefill_worker("a", num_slots)], 0)
        assert decisions
        for decision in decisions:
            served.append(decision.key)
            queue.remove(decision.key)

    assert served == [f"r{i}" for i in range(count)]
