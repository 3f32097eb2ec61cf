"""A controller with hand-written JSON commands, and a log of all acks and frames in the server's order."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable

from nats.aio.msg import Msg

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.acks import Ack, AckStatus
from rollbus.schemas.control import DesiredState
from rollbus.schemas.messages import Frame, decode_ack, decode_command, decode_frame
from tests.support.connections import opened

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
