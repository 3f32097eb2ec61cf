"""The command history reports each violation of I4 and I5 and no correct behavior."""

import msgspec
import numpy as np
import pytest

from rollbus.bus.protocol.fleet.desired import record
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.chunk import Chunk
from rollbus.schemas.control import Command, DesiredState, Pause, Resume, UpdateWeights
from rollbus.schemas.messages import Frame, encode, encode_json
from rollbus.schemas.weights import WeightSource
from tests.support.control_history import ControlHistory

SUBJECTS = Subjects("f")
PAUSE = Pause(id="p")
UPDATE = UpdateWeights(id="u", version=2, source=WeightSource(path="/a"))


class Fleet:
    """A fleet whose messages the test writes."""

    def __init__(self) -> None:
        self.history = ControlHistory()
        self.state = DesiredState(model="m")

    def command(self, command: Command) -> None:
        """Publish a command as a controller."""
        self.history.take(SUBJECTS.control("c"), encode_json(command))

    def records(self, command: Pause | Resume | UpdateWeights) -> None:
        """Record a command in the desired state."""
        self.state, _ = record(self.state, command)
        self.history.take("$KV.rollbus.f.m", encode_json(self.state))

    def ack(self, command: Command, status: AckStatus, incarnation: str = "i", **fields: object) -> None:
        """Publish a worker's ack."""
        ack = Ack(
            id=command.id, command=command.command, worker="w", incarnation=incarnation, model="m", status=status,
            **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.history.take(SUBJECTS.ack("c", "w"), encode_json(ack))

    def frame(self, number: int, *, version: int = 1, tokens: int = 1, incarnation: str = "i") -> None:
        """Publish a frame of a worker with one chunk."""
        ids = np.arange(tokens, dtype="<i4").tobytes()
        chunk = Chunk(
            request_id="r", attempt=0, child=0, chunk_index=number, weight_version=version, token_ids_data=ids
        )
        self.history.take(SUBJECTS.frame("me", "w"), encode(Frame(1, incarnation, number, [], [chunk], 0, "life")))

    @property
    def problems(self) -> list[str]:
        """The violations in the history."""
        return self.history.problems


def test_tokens_of_a_paused_worker_are_a_violation() -> None:
    """A token in a new frame after the applied pause is a violation; earlier and empty frames are not."""
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
    """Tokens are allowed after a resume is published or recorded. A repeated pause command does not change this."""
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


def test_a_pause_with_a_resume_before_its_ack_does_not_bind_the_worker() -> None:
    """A pause does not bind a worker if a resume was recorded before its ack: the worker may have resumed."""
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


def test_tokens_of_older_weights_are_a_violation() -> None:
    """After an applied update each token has the new version, until another update is published."""
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


def test_a_failed_command_does_not_bind_the_worker() -> None:
    """A failed or stale command does not bind a worker."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.FAILED)
    fleet.ack(UPDATE, AckStatus.STALE)
    fleet.frame(0)
    assert fleet.problems == []


def test_after_the_desired_state_is_deleted_no_command_binds_a_worker() -> None:
    """After the desired state is deleted, no earlier command binds a worker."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.APPLIED)
    fleet.history.take("$KV.rollbus.f.m", b"")
    fleet.frame(0)
    assert fleet.problems == []


def test_a_different_second_final_ack_is_a_violation() -> None:
    """An incarnation may repeat its final ack. A different final ack or a later progress ack is a violation."""
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


def test_a_command_without_a_final_ack_is_unanswered() -> None:
    """An accepted command is unanswered until its final ack, as long as that incarnation exists."""
    fleet = Fleet()
    fleet.ack(PAUSE, AckStatus.ACCEPTED)
    assert fleet.history.unanswered({"i"}) == ["w pause"]
    assert fleet.history.unanswered({"another"}) == []
    fleet.ack(PAUSE, AckStatus.APPLIED)
    assert fleet.history.unanswered({"i"}) == []


def test_messages_that_cannot_be_decoded_are_ignored() -> None:
    """The history ignores messages that it cannot decode."""
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
