"""Listens to the commands of all controllers and to what workers answer, while somebody wants to see them.

A user needs the permission to hear acks, which admins and frontends have. Where users have credentials, commands go
from their controllers to the workers' account and reach nobody else: a command is known there by its acks alone. Reads
are left out: they change nothing, and their answers are large.
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
from ..nats.connection import Connection
from ..nats.permitted import subscribe_permitted
from ..protocol.fleet.authority import check_age
from ..protocol.fleet.presence_table import PresenceTable
from ..protocol.telemetry.command_book import CommandBook, CommandLine
from ..subjects import Subjects

__all__ = ["CommandListener"]

logger = logging.getLogger(__name__)

MAX_ACK_BYTES: Final = 256 << 10
"""Of an ack that is decoded: those of reads have up to megabytes. That of new weights has the routing of a canary:
46 KB at 61 layers."""
MAX_PENDING: Final = 8192
"""Messages that wait here: what workers answer in a second or two. Those beyond it are dropped; a command's ledger at
its controller is not touched."""
MAX_PENDING_BYTES: Final = 64 << 20
READS: Final = (ReadExperts, ReadRequest, State)
STATE: Final = State(id="x").command
READ_ACK: Final = b'"command":"read_'
"""In the first bytes of the ack of a read."""


class CommandListener:
    """Follows the commands of a fleet. Lives on the bus thread.

    Attributes:
        bad_messages: commands and acks that did not decode, bore another's name, or were not signed by their author.
        passed_over: acks that are too large, or answer reads.
    """

    def __init__(self, nats: Connection, subjects: Subjects, table: PresenceTable) -> None:
        self._nats = nats
        self._subjects = subjects
        self._table = table
        self._book = CommandBook()
        self._subscriptions: list[Subscription] = []
        self._may_hear_commands = nats.signatures.own is None
        self.bad_messages = 0
        self.passed_over = 0

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<CommandListener {self._book!r} bad={self.bad_messages} listens={bool(self._subscriptions)}>"

    async def start(self) -> None:
        """Listen; safe to repeat.

        Raises:
            PermissionDenied: this user may not.
            BusBroken, BusClosed: the connection is gone.
        """
        if self._subscriptions:
            return
        async with AsyncExitStack() as undo:
            # One without the other would show workers that never answer.
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
        """Listen no more; what was heard stays."""
        while self._subscriptions:
            subscription = self._subscriptions.pop()
            if not self._nats.is_closed:
                await subscription.unsubscribe()

    def lines(self) -> tuple[CommandLine, ...]:
        """Return the last commands that were heard, the newest first."""
        return self._book.lines(time.time())

    async def _on_command(self, message: Msg) -> None:
        controller = message.subject.rpartition(".")[2]
        try:
            signed = self._nats.signatures.check(message.subject, message.data, message.headers)
            if signed is not None and signed.by.name != controller:
                raise RemoteProtocolError(f"it is signed by {signed.by.role} {signed.by.name}")
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
                raise RemoteProtocolError(f"worker {ack.worker} answered on {message.subject}")
        except RemoteProtocolError as exc:
            self._note_bad(message, exc)
            return
        if ack.command == STATE:
            self.passed_over += 1
        elif self._table.get(worker) is not None:
            self._book.add_ack(ack, controller.rpartition(".")[2], time.time())

    def _note_bad(self, message: Msg, error: Exception) -> None:
        self.bad_messages += 1
        if self.bad_messages.bit_count() == 1:  # at 1, 2, 4, 8 ...: a flood of them makes no flood of events
            logger.warning("command.bad_heard subject=%s so_far=%s error=%s", message.subject, self.bad_messages, error)


def _may(signed: Signed, model: str) -> bool:
    return signed.by.covers_model(model)
