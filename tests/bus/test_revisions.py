"""Which revisions of a signed state are valid. The bucket is simulated."""

import base64
import json
from pathlib import Path
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from rollbus.bus.auth.credentials import Role, Signatures, load_credentials
from rollbus.bus.auth.users import ensure_users
from rollbus.bus.control import revisions as module
from rollbus.bus.control.revisions import Revisions
from rollbus.bus.nats.connection import Connection
from rollbus.bus.nats.jetstream import NO_MESSAGE
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import DesiredState
from rollbus.schemas.messages import encode_json

MODEL = "m"
SUBJECT = "$KV.rollbus.F.m"


class Bucket:
    """A simulated JetStream API that serves as the connection of `Revisions`."""

    def __init__(self, folder: Path) -> None:
        boss, worker = ensure_users(folder, [("F", Role.ADMIN, "boss"), ("F", Role.WORKER, "w")])
        self._author = Signatures(load_credentials(boss.path))
        self.signatures = Signatures(load_credentials(worker.path))
        self.created = "monday"
        self.messages: dict[int, dict[str, Any]] = {}
        self.num_asked = 0

    def write(self, sequence: int, epoch: int, *, is_signed: bool = True) -> None:
        """Store a state."""
        data = encode_json(DesiredState(model=MODEL, epoch=epoch))
        headers = self._author.headers(SUBJECT, data) if is_signed else {}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.messages[sequence] = {
            "seq": sequence,
            "time": "2026-01-01T00:00:00Z",
            "data": base64.b64encode(data).decode(),
            "hdrs": base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode(),
        }

    async def request(self, subject: str, payload: bytes, **_: object) -> Msg:
        """Answer a JetStream request."""
        self.num_asked += 1
        answer: dict[str, Any] = {"created": self.created}
        if ".MSG.GET." in subject:
            question = json.loads(payload)
            found = [number for number in self.messages if number >= question.get("seq", 0)]
            number = max(found, default=None) if "last_by_subj" in question else min(found, default=None)
            answer = {"error": {"err_code": NO_MESSAGE}} if number is None else {"message": self.messages[number]}
        return Msg(cast(Connection, self), data=json.dumps(answer).encode())

    async def epochs(self, revisions: Revisions) -> tuple[int | None, int]:
        """Return the epoch that is found and the sequence number for the next write."""
        found = await revisions.find(MODEL)
        return None if found.state is None else found.state.epoch, found.sequence


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    """Return a bucket with the epochs 1 and 2."""
    bucket = Bucket(tmp_path)
    bucket.write(10, 1)
    bucket.write(50, 2)
    return bucket


def reader(bucket: Bucket) -> Revisions:
    """Return a new `Revisions` that has not read anything."""
    return Revisions(cast(Connection, bucket), Subjects("F"))


async def test_an_older_epoch_does_not_count_again(bucket: Bucket) -> None:
    """An older epoch that is written again does not count, neither for a known reader nor for a new one."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.write(60, 1)

    assert await bucket.epochs(early) == (2, 60)
    assert await bucket.epochs(reader(bucket)) == (2, 60)


async def test_older_epochs_are_accepted_if_the_bucket_was_created_again(bucket: Bucket) -> None:
    """A reader accepts older epochs if the server states that the bucket was created again."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.messages.clear()
    bucket.created = "tuesday"
    bucket.write(60, 1)

    assert await bucket.epochs(early) == (1, 60)


async def test_a_server_that_is_behind_returns_its_older_state(bucket: Bucket) -> None:
    """If the server is behind, the reader returns the server's older state. `ReadOrder` handles this case."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    del bucket.messages[50]

    assert await bucket.epochs(early) == (1, 10)


async def test_a_reader_keeps_its_state_if_the_history_has_no_signed_state(bucket: Bucket) -> None:
    """If all signed states have left the history, a reader keeps the state that it knows. A new reader finds none."""
    early = reader(bucket)
    assert await bucket.epochs(early) == (2, 50)
    bucket.messages.clear()
    for number in range(51, 60):
        bucket.write(number, 9, is_signed=False)

    assert await bucket.epochs(early) == (2, 59)
    assert await bucket.epochs(reader(bucket)) == (None, 59)


async def test_a_read_of_a_known_state_needs_one_call(bucket: Bucket) -> None:
    """A read takes one call for a known state, two for a new revision, and three for one that does not count."""
    early = reader(bucket)

    async def cost() -> int:
        before = bucket.num_asked
        await bucket.epochs(early)
        return bucket.num_asked - before

    assert [await cost(), await cost()] == [4, 1]
    bucket.write(60, 3)
    assert [await cost(), await cost()] == [2, 1]
    bucket.write(61, 9, is_signed=False)
    assert [await cost(), await cost()] == [3, 1]


async def test_names_without_a_valid_state_do_not_displace_valid_states(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader remembers a limited number of models; invented names leave the last valid state in memory."""
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    revisions = reader(bucket)
    before = await bucket.epochs(revisions)
    for number in range(20):
        assert (await revisions.find(f"invented-{number}")).state is None
    bucket.messages.clear()
    bucket.write(60, 9, is_signed=False)

    assert revisions.debug_state() == {"models": 3, "refused": 40}
    assert (await bucket.epochs(revisions))[0] == before[0] == 2
