"""What a worker says of commands: composed, noted and handed to be published."""

import logging
import time
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from bus.connection import publish
from bus.subjects import Subjects
from schemas.control import Ack, AckError, AckStatus
from schemas.errors import ControlError
from schemas.limits import MAX_ERROR_CHARS
from schemas.messages import encode_json
from workers.control.command_log import CommandLog, Heard
from workers.control.desire import Outcome
from workers.control.parts import Parts

__all__ = ["Answers"]

logger = logging.getLogger(__name__)

UNREADABLE: Final = "unreadable"
"""The name of a command that does not decode."""


class Answers:
    """Says `Ack`s, none after the final one of a command.

    They leave as frames do: while the worker may speak, in order; what waits is lost with its lease.
    """

    def __init__(self, parts: Parts, log: CommandLog) -> None:
        self._parts = parts
        self._log = log
        self._subjects = Subjects(parts.config.fleet)

    def check_controller(self, controller: str) -> str:
        """The name of who asks, which has to stand in a subject.

        Raises:
            InvalidRequest: it cannot.
        """
        self._subjects.ack(controller, self._parts.config.worker_id)
        return controller

    def say(self, heard: Heard, status: AckStatus, **fields: Any) -> None:
        """Say how far a command is, unless its final word was said."""
        seconds = round(time.monotonic() - heard.heard_at, 3)
        ack = self._ack(heard.command.id, heard.command.command, status, epoch=heard.epoch, seconds=seconds, **fields)
        if self._log.note(heard, ack):
            self._publish(heard.controller, ack)

    def report(self, heard: Heard, stage: str) -> None:
        """Say what is being done about a command, unless that was said last."""
        if heard.last is None or heard.last.stage != stage:
            self.say(heard, AckStatus.PROGRESS, stage=stage)

    def end(self, heard: Heard, outcome: Outcome, **fields: Any) -> None:
        """Say the final word."""
        capabilities = self._parts.runner.capabilities
        if outcome.canary is not None and capabilities is not None:
            fields["signature"] = capabilities.signature
        self.say(heard, outcome.status, error=outcome.error, canary=outcome.canary, frames=outcome.frames, **fields)

    def repeat(self, heard: Heard) -> None:
        """Say the last word again."""
        if heard.last is not None:
            self._publish(heard.controller, heard.last)

    def refuse(self, controller: str, command_id: str, error: ControlError) -> None:
        """Say the final word on a command that is not looked at."""
        said = AckError(code=error.code, message=error.message[:MAX_ERROR_CHARS])
        self._publish(controller, self._ack(command_id, UNREADABLE, AckStatus.FAILED, error=said))

    def _ack(self, command_id: str, command: str, status: AckStatus, **fields: Any) -> Ack:
        parts = self._parts
        return Ack(
            id=command_id,
            command=command,
            worker=parts.config.worker_id,
            incarnation=parts.life.incarnation,
            model=parts.config.model,
            status=status,
            weight_version=parts.links.versions.weight_version,
            in_flight=len(parts.links),
            **fields,
        )

    def _publish(self, controller: str, ack: Ack) -> None:
        data = encode_json(ack)
        if len(data) > self._parts.nats.max_payload and ack.frames:
            # Thousands of links under a small limit: the other facts count for more.
            logger.warning("ack.cut id=%s bytes=%s", ack.id, len(data))
            data = encode_json(replace(ack, frames=None))
        subject = self._subjects.ack(controller, self._parts.config.worker_id)
        self._parts.sending.settle([partial(publish, self._parts.nats, subject, data)])
