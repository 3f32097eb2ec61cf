"""Requests for tokens wait here for their users' turns, while the fleet has as many as it has room for.

A worker takes requests from the queue in the order in which they came. So this service puts only a few more there
than the workers can run. Otherwise one user's flood would be ahead of every later request of others.
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

__all__ = ["FleetTurn", "Turns", "room_of"]

MIN_AHEAD: Final = 8
"""Samples in the fleet's queue, so that a worker that has room for one need not wait for this service."""
MIN_LEFT_S: Final = 0.001


def room_of(workers: Sequence[WorkerPresence], model: str) -> int | None:
    """Return how many samples for a model the fleet is given at a time; None if no worker says how many it runs."""
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
    """With what is left of its time."""
    end: Callable[[], None]
    """To be called when the fleet is done with it; safe to repeat."""


class Turns:
    """The lines of all models.

    Args:
        workers: those that are there now.
        default_room: for samples under way where no worker says how many it runs.
    """

    def __init__(self, workers: Callable[[], Sequence[WorkerPresence]], default_room: int, metrics: Metrics) -> None:
        self._workers = workers
        self._default_room = default_room
        self._metrics = metrics
        # Of models with requests.
        self._lines: dict[str, FairLine] = {}
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, user: str, request: bus.GenerateRequest) -> AsyncIterator[FleetTurn]:
        """Wait for a request's turn, which ends with the block at the latest.

        Raises:
            RequestTimeout: it did not come within the request's time.
        """
        model = request.model or ""
        ticket = Ticket(user, request.sampling.n, request.priority)
        self._lines.setdefault(model, FairLine()).add(ticket)
        end = partial(self._end, model, ticket)
        try:
            self._call_up(model)
            yield FleetTurn(request if ticket.is_due else await self._wait(ticket, request), end)
        finally:
            end()

    async def _wait(self, ticket: Ticket, request: bus.GenerateRequest) -> bus.GenerateRequest:
        begun = time.monotonic()
        timeout_s = DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s
        waiter = self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            with self._metrics.waiting.labels(request.model or "").track_inprogress():
                async with asyncio.timeout(timeout_s):
                    await waiter
        except TimeoutError:
            message = f"not finished within {timeout_s:g} s: it waits behind other requests of this service"
            raise RequestTimeout(stage="admission", message=message, request_id=request.request_id) from None
        finally:
            del self._waiters[ticket]
        return replace(request, timeout_s=max(timeout_s - (time.monotonic() - begun), MIN_LEFT_S))

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
