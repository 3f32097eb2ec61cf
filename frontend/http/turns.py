"""Token requests wait here for their users' turns while the fleet's capacity is used.

Workers pull requests from the queue in the order of their arrival. So this service puts only a few more requests into
the queue than the workers can run. Otherwise a flood from one user would delay all later requests of other users.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec.structs import replace

from ... import bus
from ...schemas.errors import RequestTimeout
from ...schemas.limits import DEFAULT_TIMEOUT_S
from ...schemas.presence import WorkerPresence
from .fair_line import FairLine, Ticket
from .metrics import Metrics

__all__ = ["MIN_LEFT_S", "FleetTurn", "Turns", "room_of"]

MIN_AHEAD: Final = 8
"""Minimum number of samples in the fleet's queue, so that a worker with a free slot need not wait for this service."""
MIN_LEFT_S: Final = 0.001
"""Least rest of a timeout in seconds: a request's timeout is above 0."""


def room_of(workers: Sequence[WorkerPresence], model: str) -> int | None:
    """Return the limit on open samples of a model in the fleet; None if no worker announces its number of slots."""
    slots = sum(
        worker.capabilities.max_num_seqs
        for worker in workers
        if worker.model == model
        and worker.state.is_present
        and worker.capabilities is not None
        and worker.capabilities.role != "prefill"
    )
    return slots + max(slots // 4, MIN_AHEAD) if slots else None


@dataclass(frozen=True, slots=True)
class FleetTurn:
    """A request that may go to the fleet now."""

    request: bus.GenerateRequest
    """The request with the rest of its timeout."""
    arrived_at: float
    """Time at which the request began to wait for its turn, on `time.monotonic()`."""
    end: Callable[[], None]
    """Call this when the request has ended in the fleet. Repeated calls are safe."""


class Turns:
    """The waiting requests of all models.

    Args:
        workers: returns the current workers.
        default_room: limit on open samples of a model if no worker announces its number of slots.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerPresence]], default_room: int, metrics: Metrics) -> None:
        self._workers = workers
        self._default_room = default_room
        self._metrics = metrics
        # By model. Only models with requests have an entry.
        self._lines: dict[str, FairLine] = {}
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._by_request: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, user: str, request: bus.GenerateRequest) -> AsyncIterator[FleetTurn]:
        """Wait for a request's turn. The turn ends with the block at the latest.

        Raises:
            RequestTimeout: the request's turn did not come within its timeout.
        """
        model, arrived_at = request.model or "", time.monotonic()
        ticket = Ticket(user, request.sampling.n, request.priority)
        self._lines.setdefault(model, FairLine()).add(ticket)
        end = partial(self._end, model, ticket)
        try:
            self._call_up(model)
            yield FleetTurn(request if ticket.is_due else await self._wait(ticket, request), arrived_at, end)
        finally:
            end()

    async def _wait(self, ticket: Ticket, request: bus.GenerateRequest) -> bus.GenerateRequest:
        begun = time.monotonic()
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        waiter = self._waiters[ticket] = self._by_request[id(request)] = asyncio.get_running_loop().create_future()
        try:
            with self._metrics.waiting.labels(request.model or "").track_inprogress():
                async with asyncio.timeout(timeout_s):
                    await waiter
        except TimeoutError:
            message = f"not finished within {timeout_s:g} s: the request waited behind other requests of this service"
            raise RequestTimeout(stage="admission", message=message, request_id=request.request_id) from None
        finally:
            del self._waiters[ticket], self._by_request[id(request)]
        return replace(request, timeout_s=max(timeout_s - (time.monotonic() - begun), MIN_LEFT_S))

    def end_wait(self, request: bus.GenerateRequest) -> None:
        """Let a request that is aborted go to the client of the bus before its turn, because only that aborts it."""
        if (waiter := self._by_request.get(id(request))) is not None and not waiter.done():
            waiter.set_result(None)

    def _end(self, model: str, ticket: Ticket) -> None:
        line = self._lines.get(model)
        if line is None:
            return
        line.end(ticket)
        self._call_up(model)
        if not line:
            del self._lines[model]

    def _call_up(self, model: str) -> None:
        room = room_of(self._workers(), model) or self._default_room
        while (ticket := self._lines[model].next(room)) is not None:
            if (waiter := self._waiters.get(ticket)) is not None and not waiter.done():
                waiter.set_result(None)
