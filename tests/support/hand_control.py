"""Workers that answer commands as the test specifies, and a client that sends these commands."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

import rollbus
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckError, AckStatus
from rollbus.schemas.control import Abort, AnyCommand, DesiredState
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.messages import Frame, decode_ack, decode_command, decode_frame, encode_json
from rollbus.schemas.presence import WorkerState
from tests.support.fleet import capabilities, presence
from tests.support.nats_server import opened
from tests.support.waits import SOON_S

Reply = Callable[[AnyCommand], Sequence[dict[str, Any]]]
"""Returns the fields of the acks to a command, in order."""

ACCEPTED = {"status": AckStatus.ACCEPTED}
APPLIED = {"status": AckStatus.APPLIED}


def failed(code: ControlCode, message: str = "by hand") -> dict[str, Any]:
    """Return the fields of a `failed` ack."""
    return {"status": AckStatus.FAILED, "error": AckError(code=code, message=message)}


def obedient(command: AnyCommand) -> Sequence[dict[str, Any]]:
    """Return the acks of a worker that applies the command; an abort finds all its requests."""
    return (ACCEPTED, {**APPLIED, "request_ids": command.request_ids} if isinstance(command, Abort) else APPLIED)


def silent(_command: AnyCommand) -> Sequence[dict[str, Any]]:
    """Return no acks."""
    return ()


def unless(kind: type[AnyCommand], *answers: dict[str, Any]) -> Reply:
    """Return a reply with these acks for one kind of command, and with the acks of `obedient` for all others."""
    return lambda command: answers if isinstance(command, kind) else obedient(command)


@dataclass
class ControlledWorker:
    """A worker that only publishes presence and acks."""

    nats: Connection
    subjects: Subjects
    name: str
    model: str = "m"
    incarnation: str = "life-1"
    state: WorkerState = WorkerState.SERVING
    weight_version: int = 0
    abilities: dict[str, Any] = field(default_factory=dict)
    """Fields of its capabilities; without any, it is of an earlier release."""
    reply: Reply = obedient
    heard: list[AnyCommand] = field(default_factory=list)
    """The commands for this worker, including repeated ones."""
    waiting: asyncio.Queue[AnyCommand] = field(default_factory=lambda: asyncio.Queue(1000))
    """The same commands, for a test that reads them one by one."""
    epoch: int = 0
    """The epoch of the last command that it acked as applied."""
    controller: str = ""
    """The controller of the latest command."""

    async def announce(self, state: WorkerState | None = None, *, lease_s: float = 60.0, **fields: Any) -> None:
        """Publish the presence of this worker."""
        self.state = state or self.state
        said = presence(
            worker=self.name,
            incarnation=self.incarnation,
            model=self.model,
            state=self.state,
            weight_version=self.weight_version,
            uptime_s=0.0,
            lease_s=lease_s,
            capabilities=capabilities(engine="hand", **self.abilities),
            **{"epoch": self.epoch, **fields},
        )
        await publish(self.nats, self.subjects.presence(self.name), encode_json(said))

    async def ack(self, command: AnyCommand, **fields: Any) -> None:
        """Publish an ack to `command`."""
        about: dict[str, Any] = {"incarnation": self.incarnation, "epoch": command.epoch, **fields}
        ack = Ack(id=command.id, command=command.command, worker=self.name, model=self.model, **about)
        await publish(self.nats, self.subjects.ack(self.controller, self.name), encode_json(ack))
        if ack.status is AckStatus.APPLIED and ack.epoch is not None:
            self.epoch = ack.epoch
            await self.announce()

    async def take(self, message: Msg) -> None:
        """Receive a command and ack it if it is for this worker."""
        command = decode_command(message.data)
        if command.model not in (None, self.model) or self.name not in (command.workers or (self.name,)):
            return
        self.controller = message.subject.rpartition(".")[2]
        self.heard.append(command)
        self.waiting.put_nowait(command)
        for fields in self.reply(command):
            await self.ack(command, **fields)

    async def answer_ping(self, _message: Msg) -> None:
        """Publish the presence of this worker, unless its state is `stopped` or `failed`."""
        if self.state not in (WorkerState.STOPPED, WorkerState.FAILED):
            await self.announce()


@dataclass
class Controls:
    """Hand-written workers and the client that sends them commands."""

    rb: rollbus.Client
    workers: dict[str, ControlledWorker]
    store: DesiredStore
    nats: Connection

    def __getitem__(self, worker: str) -> ControlledWorker:
        """Return one of the workers."""
        return self.workers[worker]

    def count(self, command: str) -> int:
        """Return how often all workers together have received a command."""
        return sum(heard.command == command for worker in self.workers.values() for heard in worker.heard)


@contextlib.asynccontextmanager
async def controlled(
    nats_url: str, fleet: str, *names: str, models: dict[str, str] | None = None, client_url: str | None = None
) -> AsyncIterator[Controls]:
    """Run hand-written workers and the client `me`; `models` gives a worker's model if it is not `m`."""
    subjects = Subjects(fleet)
    async with opened(nats_url) as nats, asyncio.timeout(SOON_S):
        workers = {name: ControlledWorker(nats, subjects, name, model=(models or {}).get(name, "m")) for name in names}
        for worker in workers.values():
            await subscribe(nats, subjects.controls, worker.take)
            await subscribe(nats, subjects.ping, worker.answer_ping)
        await nats.flush()
        async with rollbus.connect(client_url or nats_url, fleet=fleet, client="me") as rb:
            yield Controls(rb, workers, DesiredStore(nats, subjects), nats)


# A controller with hand-written JSON commands, and a log of all acks and frames in the server's order.


MODEL = "synthetic"


class HandController:
    """Publishes and records commands and logs the answers; `hand_controller` creates it."""

    def __init__(self, nats: Connection, fleet: str, name: str) -> None:
        self.nats = nats
        self.subjects = Subjects(fleet)
        self.name = name
        self.store = DesiredStore(nats, self.subjects)
        self.said: list[Ack | Frame] = []
        """Acks for this controller and frames of all workers for all clients, in the order of arrival."""
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Subscribe once to all subjects of the fleet, because one subscription keeps the order."""
        await subscribe(self.nats, self.subjects.presences.replace("presence.*", ">"), self._receive)

    async def _receive(self, message: Msg) -> None:
        kind = message.subject.split(".")[3]
        if kind == "frame":
            self.said.append(decode_frame(message.data))
        elif kind == "ack" and message.subject.split(".")[4] == self.name:
            self.said.append(decode_ack(message.data))
        self._changed.set()

    async def until(self, is_met: Callable[[], object]) -> None:
        """Wait until `is_met` returns true; check it after each received message."""
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    async def say(self, data: bytes) -> None:
        """Publish any bytes as a command."""
        await publish(self.nats, self.subjects.control(self.name), data)

    async def command(self, command: str, **fields: object) -> str:
        """Publish a command; return its id."""
        command_id = str(fields.setdefault("id", f"{self.name}-{next(self._numbers)}"))
        await self.say(json.dumps({"command": command, **fields}).encode())
        return command_id

    async def record(self, command: str, **fields: object) -> int:
        """Record a command without publishing it; return its epoch."""
        fields.setdefault("id", f"{self.name}-{next(self._numbers)}")
        _, epoch = await self.store.record(MODEL, decode_command(json.dumps({"command": command, **fields}).encode()))
        return epoch

    async def desired(self) -> DesiredState:
        """Return the desired state."""
        state = await self.store.read(MODEL)
        return DesiredState(model=MODEL) if state is None else state

    def acks(self, command_id: str) -> list[Ack]:
        """Return all acks to a command."""
        return [said for said in self.said if isinstance(said, Ack) and said.id == command_id]

    def finals(self, command_id: str) -> list[Ack]:
        """Return the final acks to a command, including repeated ones."""
        return [ack for ack in self.acks(command_id) if ack.status.is_final]

    async def final(self, command_id: str) -> Ack:
        """Wait for the first final ack to a command."""
        await self.until(lambda: self.finals(command_id))
        return self.finals(command_id)[0]

    async def do(self, command: str, **fields: object) -> Ack:
        """Publish a command and wait for its first final ack."""
        return await self.final(await self.command(command, **fields))

    async def applied(self, command: str, **fields: object) -> Ack:
        """Publish a command and assert that its first final ack is `applied`."""
        ack = await self.do(command, **fields)
        assert ack.status is AckStatus.APPLIED, ack
        return ack

    def check(self) -> None:
        """Assert I5: a worker sends one final ack per command and repeats only this ack after it."""
        words: dict[tuple[str, str], list[Ack]] = {}
        for said in self.said:
            if isinstance(said, Ack):
                words.setdefault((said.worker, said.id), []).append(said)
        for acks in words.values():
            first = next((index for index, ack in enumerate(acks) if ack.status.is_final), len(acks))
            assert all(ack == acks[first] for ack in acks[first:]), acks

    def chunks_between(self, first: Ack, last: Ack) -> int:
        """Return the number of chunks published between two acks."""
        between = self.said[self.said.index(first) : self.said.index(last)]
        return sum(len(said.chunks) for said in between if isinstance(said, Frame))


@contextlib.asynccontextmanager
async def hand_controller(url: str, fleet: str, *, name: str = "boss") -> AsyncIterator[HandController]:
    """Run a controller of the model `synthetic`, then assert I5."""
    async with opened(url) as nats:
        controller = HandController(nats, fleet, name)
        await controller.open()
        yield controller
        controller.check()
