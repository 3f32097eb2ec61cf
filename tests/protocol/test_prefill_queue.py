"""The prefill queue: which requests get a prefill worker, wait, or are served without one."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollbus.bus.protocol.queue.prefill_queue import (
    FULL_S,
    SILENT_S,
    Decision,
    PrefillFallback,
    PrefillQueue,
    PrefillRequirements,
    PrefillWorkerInfo,
)


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


def test_if_the_last_prefill_worker_is_lost_all_requests_continue_immediately() -> None:
    """If the last prefill worker is lost, all waiting requests continue without one immediately."""
    queue = queue_of("a", "b")
    queue.decide([prefill_worker("w", 1)], 0)

    assert queue.decide([], 0.1) == [Decision("b", None, PrefillFallback.NO_WORKER)]


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
