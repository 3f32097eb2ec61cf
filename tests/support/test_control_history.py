"""The observer of commands sees what it is there for, and is silent about what is right."""

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.fleet.desired import record
from rollbus.bus.subjects import Subjects
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import Ack, AckStatus, Command, Pause, Resume, UpdateWeights
from rollbus.schemas.desired import DesiredState
from rollbus.schemas.messages import Frame, encode, encode_json
from rollbus.schemas.weights import WeightSource
from tests.support.control_history import ControlHistory

SUBJECTS = Subjects("f")
PAUSE = Pause(id="p")
UPDATE = UpdateWeights(id="u", version=2, source=WeightSource(path="/a"))


class Fleet:
    """A fleet whose every message the test writes."""

    def __init__(self) -> None:
        self.history = ControlHistory()
        self.state = DesiredState(model="m")

    def command(self, command: Command) -> None:
        """A controller publishes it."""
        self.history.take(SUBJECTS.control("c"), encode_json(command))

    def records(self, command: Pause | Resume | UpdateWeights) -> None:
        """It is written into the desired state."""
        self.state, _ = record(self.state, command)
        self.history.take("$KV.rollbus.f.m", encode_json(self.state))

    def ack(self, command: Command, status: AckStatus, incarnation: str = "i", **fields: object) -> None:
        """A worker answers it."""
        ack = Ack(
            id=command.id, command=command.command, worker="w", incarnation=incarnation, model="m", status=status,
            **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.history.take(SUBJECTS.ack("c", "w"), encode_json(ack))

    def frame(self, number: int, *, version: int = 1, tokens: int = 1, incarnation: str = "i") -> None:
        """A worker publishes tokens."""
        ids = np.arange(tokens, dtype="<i4").tobytes()
        chunk = Chunk(
            request_id="r", attempt=0, child=0, chunk_index=number, weight_version=version, token_ids_data=ids
        )
        self.history.take(SUBJECTS.frame("me", "w"), encode(Frame(1, incarnation, number, [], [chunk], 0, "life")))

    @property
    def problems(self) -> list[str]:
        """What the history found."""
        return self.history.problems


def test_tokens_of_a_paused_worker_are_seen() -> None:
    """A token in a new frame behind the applied pause is a problem; frames sent before, and empty ones, are none."""
    fleet = Fleet()
    fleet.frame(0)
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    fleet.frame(1)
    fleet.ack(PAUSE, AckStatus.APPLIED, frames={"me/life": 2})
    fleet.frame(1)
    fleet.frame(2, tokens=0)
    fleet.frame(0, incarnation="another life")
    assert fleet.problems == []
    fleet.frame(2)
    assert fleet.problems == ["w published tokens in frame 2 while paused (I4)"]


@pytest.mark.parametrize("how", ["command", "records"])
def test_a_resume_ends_a_pause(how: str) -> None:
    """From when a resume is published or recorded, tokens may come; a repeat of the pause changes nothing."""
    fleet = Fleet()
    fleet.records(PAUSE)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.command(PAUSE)
    fleet.command(Resume(id="r", workers=("other",)))
    fleet.command(Resume(id="r", model="other"))
    fleet.frame(0)
    assert len(fleet.problems) == 1
    getattr(fleet, how)(Resume(id="r2"))
    fleet.frame(1)
    assert len(fleet.problems) == 1


def test_a_pause_that_was_overtaken_before_its_answer_binds_nothing() -> None:
    """A worker may take the resume from the record, and go on before the resume itself is published."""
    fleet = Fleet()
    fleet.records(PAUSE)
    fleet.records(Resume(id="r"))
    fleet.ack(PAUSE, AckStatus.APPLIED, epoch=1)
    fleet.frame(0)
    assert fleet.problems == []
    fleet.records(Pause(id="p2"))
    fleet.ack(Pause(id="p2"), AckStatus.APPLIED, epoch=3)
    fleet.frame(1)
    assert len(fleet.problems) == 1


def test_tokens_of_older_weights_are_seen() -> None:
    """Behind an applied update every token is of its version, until another update is heard of."""
    fleet = Fleet()
    fleet.ack(UPDATE, AckStatus.APPLIED, weight_version=2, frames={"me/life": 1})
    fleet.frame(0, version=1)
    fleet.frame(1, version=2)
    assert fleet.problems == []
    fleet.frame(2, version=1)
    assert fleet.problems == ["w published tokens of versions [1] in frame 2 after its update to 2 (I4)"]
    fleet.command(UpdateWeights(id="u3", version=3, source=WeightSource(path="/b")))
    fleet.frame(3, version=3)
    assert len(fleet.problems) == 1


def test_a_failed_command_binds_nothing() -> None:
    """Only what was applied is promised."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.FAILED)
    fleet.ack(UPDATE, AckStatus.STALE)
    fleet.frame(0)
    assert fleet.problems == []


def test_a_spoilt_desired_state_binds_nothing() -> None:
    """Where it was deleted nobody knows what workers will do."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.history.take("$KV.rollbus.f.m", b"")
    fleet.frame(0)
    assert fleet.problems == []


def test_a_second_final_word_is_seen() -> None:
    """The same answer may be said again; another one, or a step back, is a problem."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.ack(PAUSE, AckStatus.ACCEPTED, incarnation="next")
    fleet.ack(PAUSE, AckStatus.STALE, incarnation="next")
    assert fleet.problems == []
    fleet.ack(PAUSE, AckStatus.FAILED)
    fleet.ack(PAUSE, AckStatus.PROGRESS, stage="pausing")
    fleet.ack(PAUSE, AckStatus.APPLIED, in_flight=3)
    assert len(fleet.problems) == 3


def test_what_nobody_answers_is_seen() -> None:
    """A command that was accepted is unanswered until its final word, as long as that life of the worker is there."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    assert fleet.history.unanswered({"i"}) == ["w pause"]
    assert fleet.history.unanswered({"another"}) == []
    fleet.ack(PAUSE, AckStatus.APPLIED)
    assert fleet.history.unanswered({"i"}) == []


def test_garbage_says_nothing() -> None:
    """What does not decode is for the workers to refuse."""
    fleet = Fleet()
    for subject in (
        SUBJECTS.control("c"),
        SUBJECTS.ack("c", "w"),
        SUBJECTS.frame("me", "w"),
        SUBJECTS.plain("x") + "1",
    ):
        for data in (b"", b"\xff", msgspec.json.encode({"command": "dance"})):
            fleet.history.take(subject, data)
    assert fleet.problems == []
