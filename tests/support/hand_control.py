"""Workers that answer commands as the test says, and a client that gives them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from nats.aio.msg import Msg

import bus
from bus.connection import Connection, publish, subscribe
from bus.control.store import DesiredStore
from bus.subjects import Subjects
from schemas.control import Abort, Ack, AckError, AckStatus, AnyCommand
from schemas.errors import ControlCode
from schemas.messages import decode_command, encode_json
from schemas.presence import Capabilities, WorkerPresence, WorkerState
from tests.support.connections import opened

__all__ = [
    "ACCEPTED",
    "APPLIED",
    "ControlledWorker",
    "Reply",
    "controlled",
    "failed",
    "incomplete",
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


async def incomplete(command: Awaitable[bus.Ledger]) -> bus.CommandIncomplete:
    """The error that a command ends with."""
    with pytest.raises(bus.CommandIncomplete) as caught:
        await command
    return caught.value


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
        presence = WorkerPresence(
            worker=self.name,
            incarnation=self.incarnation,
            model=self.model,
            state=self.state,
            weight_version=self.weight_version,
            in_flight=0,
            free_slots=1,
            uptime_s=0,
            lease_s=lease_s,
            capabilities=Capabilities(
                engine="hand",
                engine_version="1",
                max_model_len=10,
                vocab_size=10,
                max_num_seqs=1,
                max_logprobs=0,
                dtype="float32",
            ),
            **fields,
        )
        await publish(self.nats, self.subjects.presence(self.name), encode_json(presence))

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

    rb: bus.Client
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
    async with opened(nats_url) as nats, asyncio.timeout(60):
        workers = {name: ControlledWorker(nats, subjects, name, model=(models or {}).get(name, "m")) for name in names}
        for worker in workers.values():
            await subscribe(nats, subjects.controls, worker.take)
            await subscribe(nats, subjects.ping, worker.answer_ping)
        await nats.flush()
        async with bus.connect(client_url or nats_url, fleet=fleet, client="me") as rb:
            yield Controls(rb, workers, DesiredStore(nats, subjects), nats)
