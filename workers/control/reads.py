"""Answers commands that only look inside a worker: at once, from memory, and not more often than costs little."""

import time
from collections.abc import Callable
from typing import Any, Final

from ...bus.protocol.telemetry.timeline import TimelineBook
from ...schemas.control import ReadExperts, ReadRequest
from ...schemas.errors import ControlCode, ControlError
from ..requests.expert_counter import ExpertCounter

__all__ = ["Read", "TelemetryReads"]

Read = ReadExperts | ReadRequest
"""The commands that are answered here. They change nothing, so that a repeat may be answered anew."""
READS_PER_S: Final = 20
"""Answers of one worker: an HTTP service that shows the fleet asks three times in 5 s, and a few may be at it."""


class TelemetryReads:
    """What a worker answers to reads.

    Args:
        experts: counts which experts were chosen.
        timelines: of the worker's requests.
        clock: in seconds, never going back.
    """

    def __init__(
        self, experts: ExpertCounter, timelines: TimelineBook, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experts = experts
        self._timelines = timelines
        self._clock = clock
        self._second_ends = clock()
        self._num_answered = 0

    def answer(self, command: Read) -> dict[str, Any]:
        """Return what the `Ack` of `command` says besides.

        Raises:
            ControlError: there is no answer, or too many were given within a second.
        """
        self._check_rate()
        match command:
            case ReadExperts():
                return {"experts": self._experts.load(command.since, command.window, self._clock())}
            case ReadRequest():
                found, num_left_out = self._timelines.find(command.request_id)
                return {"timelines": tuple(found), "timelines_left_out": num_left_out}

    def _check_rate(self) -> None:
        now = self._clock()
        if now >= self._second_ends:
            self._second_ends, self._num_answered = now + 1, 0
        if self._num_answered >= READS_PER_S:
            raise ControlError(
                ControlCode.NOT_SERVING,
                f"this worker has answered {READS_PER_S} reads within a second; allowed: {READS_PER_S} a second",
            )
        self._num_answered += 1
