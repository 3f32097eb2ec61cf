"""The log of a fleet's last day."""

import pytest

from rollbus.bus.protocol.fleet import desired
from rollbus.bus.protocol.telemetry import command_book
from rollbus.bus.protocol.telemetry.command_book import DAY_S, DayEvent, DayLog, WorkerDay, command_event
from rollbus.schemas.control import DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.presence import WorkerPresence
from rollbus.schemas.weights import WeightSource
from tests.support.presences import presence

T = 1_000_000.0
FOLDER = WeightSource(path="/weights")


def whats(day: WorkerDay) -> list[tuple[str, str | None, float]]:
    """Return the events of workers."""
    return [(each.what, each.worker, each.at - T) for each in day.log.events]


def look(day: WorkerDay, at: float, *workers: WorkerPresence) -> None:
    """Look at workers whose presence has just arrived."""
    day.update([(each, T + at) for each in workers], T + at)


def test_a_new_process_is_a_restart_and_a_new_lease_is_not() -> None:
    """A shorter uptime under a new incarnation is a restart. A fenced process that comes back has returned."""
    day = WorkerDay(T)
    look(day, 0.0, presence(worker="a", uptime_s=50.0), presence(worker="b", uptime_s=50.0))
    look(
        day,
        60.0,
        presence(worker="a", incarnation="2", uptime_s=20.0, last_error="killed by SIGKILL"),
        presence(worker="b", incarnation="2", uptime_s=110.0),
    )
    assert whats(day) == [("started", "a", -50), ("started", "b", -50), ("restarted", "a", 40), ("returned", "b", 60)]
    assert day.log.events[2].detail == "killed by SIGKILL"


def test_a_worker_is_gone_after_the_second_look_without_it() -> None:
    """One look without a worker is no loss. A lost worker is gone since it was seen last, and may return."""
    day = WorkerDay(T)
    look(day, 0.0, presence(uptime_s=2 * DAY_S))
    look(day, 5.0)
    look(day, 10.0, presence(uptime_s=2 * DAY_S))
    assert whats(day) == []
    for at in (15.0, 20.0, 25.0):
        look(day, at)
    assert whats(day) == [("gone", "w", 10)]
    look(day, 30.0, presence(uptime_s=2 * DAY_S))
    look(day, 35.0, presence(uptime_s=2 * DAY_S))
    assert whats(day) == [("gone", "w", 10), ("returned", "w", 30)]


def test_known_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, the workers that are gone for the longest time are forgotten, and never a live one."""
    monkeypatch.setattr(command_book, "MAX_KNOWN", 4)
    day = WorkerDay(T)
    for at in range(6):
        look(day, float(at), *(presence(worker=f"{at}-{i}", uptime_s=2 * DAY_S) for i in range(5)))
    look(day, 6.0, *(presence(worker=f"{at}-0", uptime_s=2 * DAY_S) for at in range(6)))
    assert [name for _, name, _ in whats(day) if name == "0-0"] == []


def test_a_log_is_bounded_and_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with many events pushes out its own oldest events. The log says from when it is complete."""
    monkeypatch.setattr(command_book, "MAX_EVENTS", 4)
    log = DayLog(T - 100)
    many = [DayEvent(at=T + i, what="restarted", model="m", worker="a") for i in range(10)]
    log.add([DayEvent(at=T - 50, what="started", model="m", worker="b"), *many], T)
    assert [(each.worker, each.at - T) for each in log.events] == [("b", -50), ("a", 7), ("a", 8), ("a", 9)]
    assert log.since == T + 6
    log.add([], T + DAY_S)
    assert [each.worker for each in log.events] == ["a", "a", "a"]


def test_states_tell_the_commands_that_made_them() -> None:
    """A state tells its command, the workers, the author and details; an undo and a reset are told apart."""
    first = DesiredState(model="m")
    paused, _ = desired.record(first, Pause(id="p", mode="wait", workers=("b", "a")), "operator", T)
    update = UpdateWeights(id="u", version=3, source=FOLDER, label="step-3")
    updated, epoch = desired.record(paused, update, "trainer", T)
    undone = desired.set_back(updated, paused, "weights", epoch)
    resumed, _ = desired.record(undone, Resume(id="r"))
    states = [first, paused, updated, undone, resumed, desired.cleared(resumed)]
    events = [command_event(state, T + i) for i, state in enumerate(states)]
    assert events[0] is None
    found = [(each.what, each.workers, each.by, each.detail, each.epoch) for each in events if each is not None]
    assert found == [
        ("pause", ("a", "b"), "operator", "wait", 1),
        ("update_weights", (), "trainer", "v3 “step-3”", 2),
        ("undo", (), "", "", 3),
        ("resume", (), "", "", 4),
        ("reset", (), "", "", 5),
    ]
