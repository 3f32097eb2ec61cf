"""Workers that answer commands as the test says, and a client that gives them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

import rollbus
from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Abort, Ack, AckError, AckStatus, AnyCommand
from rollbus.schemas.errors import ControlCode
from rollbus.schemas.messages import decode_command, encode_json
from rollbus.schemas.presence import WorkerState
from tests.support.connections import opened
from tests.support.patience import SOON_S
from tests.support.presences import capabilities, presence

__all__ = [
    "ACCEPTED",
    "APPLIED",
    "ControlledWorker",
    "Reply",
    "controlled",
    "failed",
    "obedient",
    "silent",
    "unless",
]

Reply = Callable[[AnyCommand], Sequence[dict[str, Any]]]
"""Gives the fields of the answers to a command, in order."""

ACCEPTED = {"status": AckStatus.ACCEPTED}
APPLIED = {"status": AckStatus.APPLIED}


def failed(code: ControlCode, message: str = "by hand") -> dict[str, Any]:
    """The fields of an answer that says no."""
    return {"status": AckStatus.FAILED, "error": AckError(code=code, message=message)}


def obedient(command: AnyCommand) -> Sequence[dict[str, Any]]:
    """Applies whatever is asked for, and has all that is to be ended."""
    return (ACCEPTED, {**APPLIED, "request_ids": command.request_ids} if isinstance(command, Abort) else APPLIED)


def silent(_command: AnyCommand) -> Sequence[dict[str, Any]]:
    """Says nothing."""
    return ()


def unless(kind: type[AnyCommand], *answers: dict[str, Any]) -> Reply:
    """A worker that obeys, but for one kind of command."""
    return lambda command: answers if isinstance(command, kind) else obedient(command)


@dataclass
class ControlledWorker:
    """A worker that has nothing but answers."""

    nats: Connection
    subjects: Subjects
    name: str
    model: str = "m"
    incarnation: str = "life-1"
    state: WorkerState = WorkerState.SERVING
    weight_version: int = 0
    reply: Reply = obedient
    heard: list[AnyCommand] = field(default_factory=list)
    """Commands for this worker, repeats included."""
    waiting: asyncio.Queue[AnyCommand] = field(default_factory=lambda: asyncio.Queue(1000))
    """The same, for a test that takes them one by one."""
    controller: str = ""
    """Who gave the last one."""

    async def announce(self, state: WorkerState | None = None, *, lease_s: float = 60.0, **fields: Any) -> None:
        """Say that this worker lives."""
        self.state = state or self.state
        said = presence(
            worker=self.name,
            incarnation=self.incarnation,
            model=self.model,
            state=self.state,
            weight_version=self.weight_version,
            uptime_s=0.0,
            lease_s=lease_s,
            capabilities=capabilities(engine="hand"),
            **fields,
        )
        await publish(self.nats, self.subjects.presence(self.name), encode_json(said))

    async def ack(self, command: AnyCommand, **fields: Any) -> None:
        """Answer `command`."""
        about: dict[str, Any] = {"incarnation": self.incarnation, "epoch": command.epoch, **fields}
        ack = Ack(id=command.id, command=command.command, worker=self.name, model=self.model, **about)
        await publish(self.nats, self.subjects.ack(self.controller, self.name), encode_json(ack))

    async def take(self, message: Msg) -> None:
        """Hear a command, and answer it if it is for this worker."""
        command = decode_command(message.data)
        if command.model not in (None, self.model) or self.name not in (command.workers or (self.name,)):
            return
        self.controller = message.subject.rpartition(".")[2]
        self.heard.append(command)
        self.waiting.put_nowait(command)
        for fields in self.reply(command):
            await self.ack(command, **fields)

    async def answer_ping(self, _message: Msg) -> None:
        """Say that this worker lives, if it does."""
        if self.state not in (WorkerState.STOPPED, WorkerState.FAILED):
            await self.announce()


@dataclass
class Controls:
    """Workers by hand, and who gives them commands."""

    rb: rollbus.Client
    workers: dict[str, ControlledWorker]
    store: DesiredStore
    nats: Connection

    def __getitem__(self, worker: str) -> ControlledWorker:
        """One of the workers."""
        return self.workers[worker]

    def count(self, command: str) -> int:
        """How often all workers together have heard a command."""
        return sum(heard.command == command for worker in self.workers.values() for heard in worker.heard)


@contextlib.asynccontextmanager
async def controlled(
    nats_url: str, fleet: str, *names: str, models: dict[str, str] | None = None, client_url: str | None = None
) -> AsyncIterator[Controls]:
    """Run workers by hand that serve `m`, or what `models` says, and the client `me`, which may go another way."""
    subjects = Subjects(fleet)
    async with opened(nats_url) as nats, asyncio.timeout(SOON_S):
        workers = {name: ControlledWorker(nats, subjects, name, model=(models or {}).get(name, "m")) for name in names}
        for worker in workers.values():
            await subscribe(nats, subjects.controls, worker.take)
            await subscribe(nats, subjects.ping, worker.answer_ping)
        await nats.flush()
        async with rollbus.connect(client_url or nats_url, fleet=fleet, client="me") as rb:
            yield Controls(rb, workers, DesiredStore(nats, subjects), nats)
