"""Receives the commands of all controllers and the acks of workers while a program displays them.

A user needs the permission to receive acks, which admins and frontends have. With credentials, commands go only from
controllers to the account of the workers, so the listener knows a command only by its acks. Reads are left out, because
they change nothing and their acks are large.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from ...schemas.control import ReadExperts, ReadRequest, State
from ...schemas.errors import ControlError, InvalidRequest, PermissionDenied, RemoteProtocolError
from ...schemas.messages import decode_ack, decode_command
from ..auth.signatures import Signed
from ..logs import RejectionCount
from ..nats.connection import Connection
from ..nats.permitted import subscribe_permitted
from ..protocol.fleet.authority import check_age
from ..protocol.fleet.presence_table import PresenceTable
from ..protocol.telemetry.command_book import CommandBook, CommandLine
from ..subjects import Subjects

__all__ = ["CommandListener"]

logger = logging.getLogger(__name__)

MAX_ACK_BYTES: Final = 256 << 10
"""Maximum size of an ack that is decoded. Acks of reads have up to several megabytes. The ack of new weights has the
routed experts of a canary: 46 KB with 61 layers."""
MAX_PENDING: Final = 8192
"""Maximum number of waiting messages, about one or two seconds of acks. Further messages are dropped. The command
result of the controller is not affected."""
MAX_PENDING_BYTES: Final = 64 << 20
READS: Final = (ReadExperts, ReadRequest, State)
STATE: Final = State(id="x").command
READ_ACK: Final = b'"command":"read_'
"""Part of the first bytes of a read's ack."""


class CommandListener:
    """Records the commands of a fleet. Runs on the bus thread.

    Attributes:
        rejected: commands and acks that could not be decoded, had another sender's name, or were not
            signed by their author.
        passed_over: number of acks that are too large or answer reads.
    """

    def __init__(self, nats: Connection, subjects: Subjects, table: PresenceTable) -> None:
        self._nats = nats
        self._subjects = subjects
        self._table = table
        self._book = CommandBook()
        self._subscriptions: list[Subscription] = []
        self._may_hear_commands = nats.signatures.own is None
        self.rejected = RejectionCount()
        self.passed_over = 0

    def __repr__(self) -> str:
        """Return one line with counts."""
        return f"<CommandListener {self._book!r} bad={self.rejected.so_far} listens={bool(self._subscriptions)}>"

    async def start(self) -> None:
        """Subscribe to commands and acks. Calling this twice is allowed.

        Raises:
            PermissionDenied: this user may not receive acks.
            BusBroken, BusClosed: the connection is lost.
        """
        if self._subscriptions:
            return
        async with AsyncExitStack() as undo:
            # With commands but without acks, it would look as if workers never answered.
            undo.push_async_callback(self.stop)
            if self._may_hear_commands:
                try:
                    await self._subscribe(self._subjects.controls, self._on_command)
                except PermissionDenied:
                    self._may_hear_commands = False
            await self._subscribe(self._subjects.acks, self._on_ack)
            undo.pop_all()

    async def _subscribe(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> None:
        subscription = await subscribe_permitted(
            self._nats, subject, handler, max_pending_msgs=MAX_PENDING, max_pending_bytes=MAX_PENDING_BYTES
        )
        self._subscriptions.append(subscription)

    async def stop(self) -> None:
        """Unsubscribe. The recorded commands stay."""
        while self._subscriptions:
            subscription = self._subscriptions.pop()
            if not self._nats.is_closed:
                await subscription.unsubscribe()

    def lines(self) -> tuple[CommandLine, ...]:
        """Return the last recorded commands, newest first."""
        return self._book.lines(time.time())

    async def _on_command(self, message: Msg) -> None:
        controller = message.subject.rpartition(".")[2]
        try:
            signed = self._nats.signatures.check(message.subject, message.data, message.headers)
            if signed is not None and signed.by.name != controller:
                raise RemoteProtocolError(f"the command is signed by {signed.by.role} {signed.by.name}")
            self._receive(controller, message.data, signed)
        except (ControlError, InvalidRequest, RemoteProtocolError) as exc:
            self._note_bad(message, exc)

    def _receive(self, controller: str, data: bytes, signed: Signed | None) -> None:
        command = decode_command(data)
        if isinstance(command, READS):
            return
        if signed is not None:
            check_age(signed.age_s)
            if not signed.by.covers_command(command.command):
                raise RemoteProtocolError(f"{signed.by.role} {signed.by.name} may not give {command.command}")
        live = [worker for worker in self._table.workers(command.model) if signed is None or _may(signed, worker.model)]
        named = None if command.workers is None else frozenset(command.workers)
        concerned = [worker.worker for worker in live if named is None or worker.worker in named]
        self._book.add_command(command, controller, concerned, time.time())

    async def _on_ack(self, message: Msg) -> None:
        if len(message.data) > MAX_ACK_BYTES or READ_ACK in message.data[:256]:
            self.passed_over += 1
            return
        controller, _, worker = message.subject.rpartition(".")
        try:
            ack = decode_ack(message.data)
            if worker != ack.worker:
                raise RemoteProtocolError(f"worker {ack.worker} sent an ack on {message.subject}")
        except RemoteProtocolError as exc:
            self._note_bad(message, exc)
            return
        if ack.command == STATE:
            self.passed_over += 1
        elif self._table.get(worker) is not None:
            self._book.add_ack(ack, controller.rpartition(".")[2], time.time())

    def _note_bad(self, message: Msg, error: Exception) -> None:
        if so_far := self.rejected.add():
            logger.warning("command.rejected subject=%s so_far=%s error=%s", message.subject, so_far, error)


def _may(signed: Signed, model: str) -> bool:
    return signed.by.covers_model(model)
