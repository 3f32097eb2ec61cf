"""Detection of poison requests: requests that kill engines are found, and requests beside them are not blamed."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbus.bus.protocol.attempt.suspects import Company, Suspects
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
    """If a worker was only silent, requests held only because of it are released. Suspects of other deaths remain."""
    suspects: Suspects[str] = Suspects()
    died(suspects, 0, "a", "b")
    suspects.next(M)
    died(suspects, 1, "a", "c")
    assert suspects.undo_death(engine(1)) == ["c"]
    assert [key for key in "abc" if key in suspects] == ["a", "b"]
    assert suspects.next(M) == "b"
    suspects.clear("b")
    assert suspects.next(M) == "a"
    assert suspects.undo_death(engine(0)) == []
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
@settings(max_examples=200)
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
