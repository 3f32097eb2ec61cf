"""The last commands of a fleet, and the events of its last day."""

import pytest

from rollbus.bus.protocol.fleet import desired
from rollbus.bus.protocol.telemetry import day_log
from rollbus.bus.protocol.telemetry.command_book import MAX_COMMANDS, MAX_LINES, MAX_WORKERS, CommandBook
from rollbus.bus.protocol.telemetry.day_log import DAY_S, DayEvent, DayLog, WorkerDay, command_event
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.presence import WorkerPresence
from rollbus.schemas.weights import Staging, WeightSource
from tests.support import fleet
from tests.support.fleet import presence


def ack(worker: str, status: AckStatus, command_id: str = "c", **fields: object) -> Ack:
    """Return a worker's command ack."""
    return fleet.ack(id=command_id, command="update_weights", worker=worker, status=status, **fields)


UPDATE = UpdateWeights(id="c", version=3, source=WeightSource(path="/x"), epoch=7)


def test_a_worker_is_first_awaited_then_at_a_stage_then_final() -> None:
    """Each worker is first awaited, then at a stage, then final. A final answer does not change any more."""
    book = CommandBook()
    book.add_command(UPDATE, "boss", ["a", "b"], 100.0)
    (line,) = book.lines(101.0)
    assert (line.id, line.command, line.controller, line.at, line.epoch) == ("c", "update_weights", "boss", 100.0, 7)
    assert (line.done, line.counts) == (False, {"awaited": 2})
    progress = Staging(source="/x", stage="fetching", done_bytes=5, total_bytes=10)
    book.add_ack(ack("a", AckStatus.PROGRESS, stage="fetching", progress=progress), "boss", 100.0)
    (line,) = book.lines(101.0)
    answer = line.workers["a"]
    assert (answer.status, answer.stage) == ("progress", "fetching")
    assert (answer.progress.done_bytes, answer.progress.total_bytes) == (5, 10)
    error = AckError(code=ControlCode.BAD_SOURCE, message="x" * 2000)
    book.add_ack(ack("b", AckStatus.FAILED, error=error, seconds=1.5), "boss", 100.0)
    book.add_ack(ack("a", AckStatus.APPLIED), "boss", 100.0)
    book.add_ack(ack("a", AckStatus.PROGRESS, stage="late"), "boss", 100.0)
    (line,) = book.lines(101.0)
    assert (line.done, line.counts) == (True, {"applied": 1, "failed": 1})
    assert line.workers["a"].stage is None
    assert len(line.workers["b"].error or "") == 200


def test_acks_of_workers_that_the_command_does_not_address_are_only_counted() -> None:
    """An ack of a worker that the command does not address is only counted."""
    book = CommandBook()
    book.add_command(UPDATE, "boss", ["a"], 100.0)
    book.add_command(UPDATE, "boss", ["a", "b", "c"], 200.0)
    before = book.lines(300.0)
    book.add_ack(ack("b", AckStatus.APPLIED), "boss", 300.0)
    assert (book.lines(300.0), book.strangers) == (before, 1)


def test_a_command_that_the_observer_did_not_receive_is_known_by_its_acks() -> None:
    """A command that the observer did not receive is known by its acks and their workers.

    Commands that one worker invents take at most half of the entries.
    """
    book = CommandBook()
    for number in range(MAX_COMMANDS):
        book.add_command(Pause(id=f"p{number}"), "boss", ["a"], 100.0)
    for number in range(100):
        book.add_ack(ack("liar", AckStatus.ACCEPTED, f"made-up-{number}"), "boss", 101.0)
    ids = [line.id for line in book.lines(101.0)]
    assert [name for name in ids if name.startswith("p")] == [f"p{number}" for number in range(19, 9, -1)]
    book.add_ack(ack("a", AckStatus.ACCEPTED, epoch=4), "front", 102.0)
    book.add_ack(ack("b", AckStatus.APPLIED), "front", 103.0)
    line = book.lines(104.0)[0]
    assert (line.id, line.command, line.controller, line.at, line.epoch) == ("c", "update_weights", "front", 102.0, 4)
    assert (line.done, line.counts) == (False, {"accepted": 1, "applied": 1})
    book.add_ack(ack("a", AckStatus.APPLIED), "front", 105.0)
    assert book.lines(105.0)[0].done


def test_a_command_is_done_after_its_timeout() -> None:
    """A command is done after its timeout, even if some workers have not answered."""
    book = CommandBook()
    book.add_command(Pause(id="p", timeout_s=5.0), "boss", ["a"], 100.0)
    assert not book.lines(114.0)[0].done
    assert book.lines(116.0)[0].done
    assert book.lines(116.0)[0].counts == {"awaited": 1}


def test_the_book_keeps_a_limited_number_of_commands_and_workers() -> None:
    """The book keeps the newest commands with a limited number of workers.

    Older commands keep only workers that have not applied them.
    """
    book = CommandBook()
    workers = [f"w{number}" for number in range(MAX_WORKERS + 5)]
    for number in range(MAX_COMMANDS + 5):
        book.add_command(Pause(id=f"p{number}"), "boss", workers, 100.0)
        book.add_ack(ack("w0", AckStatus.APPLIED, f"p{number}"), "boss", 100.0)
    lines = book.lines(100.0)
    assert [line.id for line in lines] == [f"p{number}" for number in range(MAX_COMMANDS + 4, 4, -1)]
    assert [len(line.workers) for line in lines] == [MAX_WORKERS] * 2 + [MAX_LINES] * (MAX_COMMANDS - 2)
    assert all(line.counts == {"applied": 1, "awaited": MAX_WORKERS - 1} for line in lines)
    assert all("w0" not in line.workers for line in lines[2:])


def test_a_command_that_arrives_after_its_first_ack_counts_that_ack() -> None:
    """If a command arrives after its first ack, the ack counts and the other workers are awaited.

    Workers that it does not address are removed.
    """
    book = CommandBook()
    book.add_ack(ack("a", AckStatus.APPLIED), "boss", 100.0)
    book.add_ack(ack("stranger", AckStatus.APPLIED), "boss", 100.0)
    book.add_command(UPDATE, "boss", ["a", "b"], 101.0)
    (line,) = book.lines(102.0)
    assert (line.epoch, line.done, line.counts) == (7, False, {"applied": 1, "awaited": 1})
    book.add_ack(ack("b", AckStatus.APPLIED), "boss", 103.0)
    assert book.lines(103.0)[0].done


def test_a_command_that_several_workers_answered_is_not_displaced() -> None:
    """A worker that is the first to answer many commands displaces no command that other workers have answered too."""
    book = CommandBook()
    book.add_ack(ack("fast", AckStatus.PROGRESS, "update"), "boss", 100.0)
    book.add_ack(ack("slow", AckStatus.APPLIED, "update"), "boss", 101.0)
    for number in range(MAX_COMMANDS - 1):
        book.add_ack(ack("fast", AckStatus.APPLIED, f"c{number}"), "boss", 102.0)
    assert book.lines(103.0)[-1].counts == {"progress": 1, "applied": 1}


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
    monkeypatch.setattr(day_log, "MAX_KNOWN", 4)
    day = WorkerDay(T)
    for at in range(6):
        look(day, float(at), *(presence(worker=f"{at}-{i}", uptime_s=2 * DAY_S) for i in range(5)))
    look(day, 6.0, *(presence(worker=f"{at}-0", uptime_s=2 * DAY_S) for at in range(6)))
    assert [name for _, name, _ in whats(day) if name == "0-0"] == []


def test_a_log_is_bounded_and_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with many events pushes out its own oldest events. The log says from when it is complete."""
    monkeypatch.setattr(day_log, "MAX_EVENTS", 4)
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
