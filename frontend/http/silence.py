"""Ends generations that have fallen silent; one that gives tokens may take as long as it likes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ... import bus
from ...schemas.errors import RequestTimeout
from ...schemas.presence import WorkerPresence, WorkerState

__all__ = ["Silence", "SilenceWatch"]

MAX_TICK_S = 1.0
"""Silence is measured as finely as workers announce their state."""


class Silence:
    """How long one generation has been silent.

    Attributes:
        seconds: since its last token, while the worker of that token was serving and the service waited for the next.
        worker: of the last token; None before the first one.
        is_over: it was silent for too long, and is being aborted.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.worker: str | None = None
        self.is_over = False
        self._is_read = True

    def heard(self, worker: str | None) -> None:
        """Take note of tokens from a worker. Until `resume`, it is the reader who keeps the generation waiting."""
        self.seconds, self.worker, self._is_read = 0.0, worker, False

    def resume(self) -> None:
        """Take note that the reader waits for the next tokens."""
        self._is_read = True

    def add(self, seconds: float, states: Mapping[str, WorkerState]) -> None:
        """Count time that has passed, if it was silence.

        Three times are no silence: before the first token, while the worker is paused, asleep or updating, and after
        it is lost, when the request waits for another worker.
        """
        if self._is_read and self.worker is not None and states.get(self.worker) is WorkerState.SERVING:
            self.seconds += seconds


class SilenceWatch:
    """Watches the open generations of a service.

    Args:
        timeout_s: silence that ends a generation; None: any is allowed.
        workers: those that are there now.
        abort: ends requests by their ids.
    """

    def __init__(
        self,
        timeout_s: float | None,
        workers: Callable[[], Sequence[WorkerPresence]],
        abort: Callable[[Sequence[str]], Awaitable[object]],
    ) -> None:
        self._timeout_s = timeout_s
        self._workers = workers
        self._abort = abort
        # By their request ids.
        self._open: dict[str, Silence] = {}

    @contextmanager
    def watched(self, request: bus.GenerateRequest) -> Iterator[Silence]:
        """Watch a generation while the block lasts."""
        silence = self._open[request.request_id] = Silence()
        try:
            yield silence
        finally:
            if self._open.get(request.request_id) is silence:
                del self._open[request.request_id]

    def check(self, silence: Silence, request_id: str) -> None:
        """Refuse what an aborted generation ends with.

        Raises:
            RequestTimeout: it was aborted for its silence.
        """
        if silence.is_over:
            message = f"no token came for {self._timeout_s:g} s"
            raise RequestTimeout(stage="generation", message=message, request_id=request_id)

    async def run(self) -> None:
        """Watch until cancelled."""
        if self._timeout_s is None:
            return
        tick_s = min(MAX_TICK_S, self._timeout_s / 4)
        while True:
            await asyncio.sleep(tick_s)
            if over := self.tick(tick_s, self._timeout_s):
                await self._abort(over)

    def tick(self, seconds: float, timeout_s: float) -> list[str]:
        """Count time that has passed; returns the ids of requests to abort."""
        states = {worker.worker: worker.state for worker in self._workers()}
        over = []
        for request_id, silence in self._open.items():
            silence.add(seconds, states)
            if silence.seconds >= timeout_s and not silence.is_over:
                silence.is_over = True
                over.append(request_id)
        return over
