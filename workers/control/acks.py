"""The commands that a worker has received, and their acks.

Invariants: a command has at most one final ack. If a command is received again, its last ack is published again.
"""

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from ...bus.nats.connection import Connection, publish
from ...bus.subjects import Subjects
from ...schemas.acks import Ack, AckError, AckStatus
from ...schemas.control import AnyCommand
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_ERROR_CHARS, MAX_SEEN_COMMANDS, Recent
from ...schemas.messages import encode_json
from ...schemas.weights import Staging
from ..config import WorkerConfig
from ..lifecycle import WorkerLifecycle
from ..requests.in_flight import InFlightRequests
from ..requests.publisher import OutboundPublisher
from .desired import RegisterOutcome

logger = logging.getLogger(__name__)

PROGRESS_S: Final = 1.0
"""Seconds between two acks that only report staging progress, because many workers of a large fleet report it."""
UNREADABLE: Final = "unreadable"
"""Name in the ack of a command that cannot be decoded."""


@dataclass(slots=True, eq=False)
class ReceivedCommand:
    """One command."""

    command: AnyCommand
    controller: str
    """The controller that sent the command last, and receives the acks."""
    received_at: float
    """Time of the first receipt, on the clock of `CommandLog.add`."""
    epoch: int | None
    """Epoch in which the command was recorded. None if it is unknown, or for a one-off command."""
    needs_read: int = 0
    """Number of the read that can show the outcome, as `DesiredReader.request_read` counts reads."""
    limit: asyncio.Timeout | None = None
    """Time limit of a one-off command in execution, or None before its execution."""
    last: Ack | None = None
    """The last published ack, or None."""
    progress_at: float = -math.inf
    """Monotonic time of the last progress ack."""

    @property
    def author(self) -> str:
        """The user of the HTTP service for whom the command is, or else its controller."""
        return self.command.by or self.controller


class CommandLog:
    """Open commands and recently ended commands: at most `MAX_SEEN_COMMANDS` of each."""

    def __init__(self) -> None:
        self._under_way: dict[str, ReceivedCommand] = {}
        self._ended = Recent[str, ReceivedCommand](MAX_SEEN_COMMANDS)

    @property
    def under_way(self) -> list[ReceivedCommand]:
        """Commands without a final ack, in the order of arrival."""
        return list(self._under_way.values())

    def find(self, command_id: str) -> ReceivedCommand | None:
        """Return the command with this id, or None if it is new or was removed."""
        return self._under_way.get(command_id) or self._ended.get(command_id)

    def add(self, command: AnyCommand, controller: str, now: float) -> ReceivedCommand | None:
        """Add a new command. Return None if too many commands are open."""
        if len(self._under_way) >= MAX_SEEN_COMMANDS:
            return None
        received = self._under_way[command.id] = ReceivedCommand(command, controller, now, command.epoch)
        return received

    def is_under_way(self, received: ReceivedCommand) -> bool:
        """Return True if the command has no final ack and was not removed."""
        return self._under_way.get(received.command.id) is received

    def add_ack(self, received: ReceivedCommand, ack: Ack) -> bool:
        """Add an ack. Return False if the command has its final ack or was removed: the ack must not be published."""
        if not self.is_under_way(received):
            return False
        received.last = ack
        if ack.status.is_final:
            del self._under_way[received.command.id]
            self._ended[received.command.id] = received
        return True

    def clear(self) -> None:
        """Remove the open commands, because another incarnation of this worker must not answer them."""
        self._under_way.clear()


class AckPublisher:
    """Publishes acks in order while the worker holds its lease, but no ack after the final ack of a command."""

    def __init__(
        self,
        config: WorkerConfig,
        nats: Connection,
        lifecycle: WorkerLifecycle,
        in_flight: InFlightRequests,
        publisher: OutboundPublisher,
    ) -> None:
        self._config = config
        self._nats = nats
        self._lifecycle = lifecycle
        self._in_flight = in_flight
        self._publisher = publisher
        self._subjects = Subjects(config.fleet)
        self.log = CommandLog()

    def publish_ack(self, received: ReceivedCommand, status: AckStatus, **fields: Any) -> None:
        """Publish an ack of a command, unless its final ack is already published."""
        seconds = round(time.monotonic() - received.received_at, 3)
        ack = self._ack(
            received.command.id, received.command.command, status, epoch=received.epoch, seconds=seconds, **fields
        )
        if self.log.add_ack(received, ack):
            self._publish(received.controller, ack)

    def publish_progress(self, received: ReceivedCommand, stage: str, progress: Staging | None = None) -> None:
        """Publish the stage of a command. Within a stage, publish progress at most once per `PROGRESS_S`."""
        last, now = received.last, time.monotonic()
        if last is not None and last.stage == stage:
            has_moved = progress is not None and last.progress is not None and progress != last.progress
            if not has_moved or now < received.progress_at + PROGRESS_S:
                return
        received.progress_at = now
        self.publish_ack(received, AckStatus.PROGRESS, stage=stage, progress=progress)

    def publish_final(self, received: ReceivedCommand, outcome: RegisterOutcome, **fields: Any) -> None:
        """Publish the final ack of a command."""
        capabilities = self._in_flight.runner.capabilities
        if outcome.canary is not None and capabilities is not None:
            fields["signature"] = capabilities.signature
        told = {name: getattr(outcome, name) for name in ("error", "canary", "verified", "frames", "timing")}
        self.publish_ack(received, outcome.status, **told | fields)

    def publish_answer(self, controller: str, command: AnyCommand, outcome: RegisterOutcome, **fields: Any) -> None:
        """Publish the only ack of a read command, which the command log does not contain."""
        ack = self._ack(command.id, command.command, outcome.status, error=outcome.error, **fields)
        self._publish(controller, ack)

    def repeat(self, received: ReceivedCommand) -> None:
        """Publish the last ack of a command again."""
        if received.last is not None:
            self._publish(received.controller, received.last)

    def reject(self, controller: str, command_id: str, error: ControlError) -> None:
        """Publish the final ack of a rejected command."""
        said = AckError(code=error.code, message=error.message[:MAX_ERROR_CHARS])
        self._publish(controller, self._ack(command_id, UNREADABLE, AckStatus.FAILED, error=said))

    def _ack(self, command_id: str, command: str, status: AckStatus, **fields: Any) -> Ack:
        links = self._in_flight.links
        return Ack(
            id=command_id,
            command=command,
            worker=self._config.worker_id,
            incarnation=self._lifecycle.incarnation,
            model=self._config.model,
            status=status,
            weight_version=links.versions.weight_version,
            in_flight=len(links.requests),
            **fields,
        )

    def _publish(self, controller: str, ack: Ack) -> None:
        subject, max_bytes = self._subjects.ack(controller, self._config.worker_id), self._nats.max_payload
        data = encode_json(ack)
        if len(data) > max_bytes:
            logger.warning("ack.truncated id=%s bytes=%s allowed=%s", ack.id, len(data), max_bytes)
            data = cut_ack(ack, max_bytes)
        self._publisher.enqueue_acks([partial(publish, self._nats, subject, data)])


def cut_ack(ack: Ack, max_bytes: int) -> bytes:
    """Encode an ack that is larger than the server accepts, without its least important fields."""
    # Drop the frame numbers of thousands of links first: the other fields are more important.
    ack = replace(ack, frames=None)
    data = encode_json(ack)
    while len(data) > max_bytes and ack.experts is not None and len(ack.experts.counts) > 1:
        # The newest version comes first, so drop the last one.
        ack = replace(ack, experts=replace(ack.experts, counts=ack.experts.counts[:-1]))
        data = encode_json(ack)
    while len(data) > max_bytes and ack.timelines:
        # The latest timelines come last, so drop from the front.
        num_cut = -(-len(ack.timelines) // 8)
        ack = replace(ack, timelines=ack.timelines[num_cut:], timelines_left_out=ack.timelines_left_out + num_cut)
        data = encode_json(ack)
    if len(data) > max_bytes and ack.experts is not None:
        problem = f"the answer has {len(data)} bytes; allowed by the NATS server's max_payload: {max_bytes}"
        error = AckError(code=ControlCode.UNSUPPORTED, message=problem)
        data = encode_json(replace(ack, status=AckStatus.FAILED, error=error, experts=None))
    return data
