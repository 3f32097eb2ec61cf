"""Answers read commands immediately from memory, at a limited rate."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from ...schemas.control import ReadExperts, ReadRequest
from ...schemas.errors import ControlCode, ControlError
from ..requests.expert_counter import ExpertCounter
from ..requests.worker_requests import WorkerRequestTable

__all__ = ["Read", "TelemetryReads"]

Read = ReadExperts | ReadRequest
"""The read commands. They change nothing, so the worker answers a repeated command again."""
READS_PER_S: Final = 20
"""Maximum answers of one worker per second to controllers, and to all other clients. An HTTP service with open pages
sends three reads in 5 s."""
OWN_READS_PER_S: Final = 5
"""Maximum answers per second to a client that reads its own requests."""


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
        self._answered: Counter[str | None] = Counter()

    def answer(self, command: Read, client: str | None = None) -> dict[str, Any]:
        """Return the additional fields of the `Ack` of `command`.

        Args:
            client: client that may read only its own requests; None: a controller, which may read all.

        Raises:
            ControlError: the worker has no answer, or the limit per second is reached.
        """
        self._check_rate(client)
        match command:
            case ReadExperts():
                return {"experts": self._experts.load(command.since, command.window, self._clock())}
            case ReadRequest():
                command = command if client is None else replace(command, client=client)
                found, num_left_out = self._requests.read_timelines(command, self._clock())
                return {"timelines": tuple(found), "timelines_left_out": num_left_out}

    def _check_rate(self, client: str | None) -> None:
        now = self._clock()
        if now >= self._second_ends:
            self._second_ends = now + 1
            self._answered.clear()
        allowed = READS_PER_S if client is None else OWN_READS_PER_S
        of_clients = self._answered.total() - self._answered[None]
        if self._answered[client] >= allowed or (client is not None and of_clients >= READS_PER_S):
            problem = f"this worker has answered {allowed} reads within a second; allowed: {allowed} per second"
            if client is not None:
                problem += f" for each client, and {READS_PER_S} for all clients"
            raise ControlError(ControlCode.NOT_SERVING, problem)
        self._answered[client] += 1
