"""Answers read commands immediately from memory, at a limited rate."""

import time
from collections.abc import Callable
from typing import Any, Final

from ...schemas.control import ReadExperts, ReadRequest
from ...schemas.errors import ControlCode, ControlError
from ..requests.expert_counter import ExpertCounter
from ..requests.worker_requests import WorkerRequestTable

__all__ = ["Read", "TelemetryReads"]

Read = ReadExperts | ReadRequest
"""The read commands. They change nothing, so the worker answers a repeated command again."""
READS_PER_S: Final = 20
"""Maximum answers of one worker per second. An HTTP service with open pages sends three reads in 5 s."""


class TelemetryReads:
    """Answers the read commands of a worker.

    Args:
        experts: counts the chosen experts.
        requests: requests of the worker, with their timelines.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, experts: ExpertCounter, requests: WorkerRequestTable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._experts = experts
        self._requests = requests
        self._clock = clock
        self._second_ends = clock()
        self._num_answered = 0

    def answer(self, command: Read) -> dict[str, Any]:
        """Return the additional fields of the `Ack` of `command`.

        Raises:
            ControlError: the worker has no answer, or the limit per second is reached.
        """
        self._check_rate()
        match command:
            case ReadExperts():
                return {"experts": self._experts.load(command.since, command.window, self._clock())}
            case ReadRequest():
                found, num_left_out = self._requests.read_timelines(command, self._clock())
                return {"timelines": tuple(found), "timelines_left_out": num_left_out}

    def _check_rate(self) -> None:
        now = self._clock()
        if now >= self._second_ends:
            self._second_ends, self._num_answered = now + 1, 0
        if self._num_answered >= READS_PER_S:
            raise ControlError(
                ControlCode.NOT_SERVING,
                f"this worker has answered {READS_PER_S} reads within a second; allowed: {READS_PER_S} per second",
            )
        self._num_answered += 1
