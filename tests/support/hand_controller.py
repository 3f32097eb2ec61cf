"""A controller that writes its commands as JSON by hand, and a log of all that workers say, in the order of saying."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable

from nats.aio.msg import Msg

from rollbus.bus.control.store import DesiredStore
from rollbus.bus.nats.connection import Connection, publish, subscribe
from rollbus.bus.subjects import Subjects
from rollbus.schemas.control import Ack, AckStatus
from rollbus.schemas.desired import DesiredState
from rollbus.schemas.messages import Frame, decode_ack, decode_command, decode_frame
from tests.support.connections import opened

__all__ = ["MODEL", "HandController", "hand_controller"]

MODEL = "synthetic"


class HandController:
    """Made by `hand_controller`."""

    def __init__(self, nats: Connection, fleet: str, name: str) -> None:
        self.nats = nats
        self.subjects = Subjects(fleet)
        self.name = name
        self.store = DesiredStore(nats, self.subjects)
        self.said: list[Ack | Frame] = []
        """Acks for this controller, and frames of all workers for all clients, as they came."""
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Listen, with one subscription, which keeps the order."""
        await subscribe(self.nats, self.subjects.presences.replace("presence.*", ">"), self._take)

    async def _take(self, message: Msg) -> None:
        kind = message.subject.split(".")[3]
        if kind == "frame":
            self.said.append(decode_frame(message.data))
        elif kind == "ack" and message.subject.split(".")[4] == self.name:
            self.said.append(decode_ack(message.data))
        self._changed.set()

    async def until(self, is_met: Callable[[], object]) -> None:
        """Wait until something that was heard makes `is_met` true."""
        while not is_met():
            self._changed.clear()
            await self._changed.wait()

    async def say(self, data: bytes) -> None:
        """Publish any bytes as a command."""
        await publish(self.nats, self.subjects.control(self.name), data)

    async def command(self, command: str, **fields: object) -> str:
        """Publish a command; returns its id."""
        command_id = str(fields.setdefault("id", f"{self.name}-{next(self._numbers)}"))
        await self.say(json.dumps({"command": command, **fields}).encode())
        return command_id

    async def record(self, command: str, **fields: object) -> int:
        """Record a command and tell nobody; returns its epoch."""
        fields.setdefault("id", f"{self.name}-{next(self._numbers)}")
        _, epoch = await self.store.record(MODEL, decode_command(json.dumps({"command": command, **fields}).encode()))
        return epoch

    async def desired(self) -> DesiredState:
        """What is recorded."""
        state = await self.store.read(MODEL)
        return DesiredState(model=MODEL) if state is None else state

    def acks(self, command_id: str) -> list[Ack]:
        """All words on a command."""
        return [said for said in self.said if isinstance(said, Ack) and said.id == command_id]

    def finals(self, command_id: str) -> list[Ack]:
        """The final words on a command, repeated ones too."""
        return [ack for ack in self.acks(command_id) if ack.status.is_final]

    async def final(self, command_id: str) -> Ack:
        """Wait for the first final word on a command."""
        await self.until(lambda: self.finals(command_id))
        return self.finals(command_id)[0]

    async def do(self, command: str, **fields: object) -> Ack:
        """Publish a command and wait for the first final word on it."""
        return await self.final(await self.command(command, **fields))

    async def applied(self, command: str, **fields: object) -> Ack:
        """The same, and it must be `applied`."""
        ack = await self.do(command, **fields)
        assert ack.status is AckStatus.APPLIED, ack
        return ack

    def check(self) -> None:
        """I5: on each command each worker says one final word, the same if it is asked again, and nothing after."""
        words: dict[tuple[str, str], list[Ack]] = {}
        for said in self.said:
            if isinstance(said, Ack):
                words.setdefault((said.worker, said.id), []).append(said)
        for acks in words.values():
            first = next((index for index, ack in enumerate(acks) if ack.status.is_final), len(acks))
            assert all(ack == acks[first] for ack in acks[first:]), acks

    def chunks_between(self, first: Ack, last: Ack) -> int:
        """How many chunks were published after one word and before another."""
        between = self.said[self.said.index(first) : self.said.index(last)]
        return sum(len(said.chunks) for said in between if isinstance(said, Frame))


@contextlib.asynccontextmanager
async def hand_controller(url: str, fleet: str, *, name: str = "boss") -> AsyncIterator[HandController]:
    """Provide a controller of the model `synthetic`; afterwards I5 held."""
    async with opened(url) as nats:
        controller = HandController(nats, fleet, name)
        await controller.open()
        yield controller
        controller.check()
