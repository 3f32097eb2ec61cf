"""Selects the positions of engine steps that count for the load of experts, and the plane of each.

A position counts each time that the engine computes it: generated tokens, and prompt tokens behind the cached ones once
the request has its first token. The engine never computes the last generated token of a request. After a preemption the
engine computes all positions again without rows: these count as computed and not as seen. Requests of the worker itself
and steps after the end of a request do not count.
"""

import time

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...bus.protocol.telemetry.expert_book import ExpertBook, Window, is_countable
from ...schemas.errors import ControlCode, ControlError
from ...schemas.limits import MAX_EXPERT_CELLS
from ...schemas.presence import RoutedExpertsInfo
from ...schemas.telemetry import ExpertLoad
from .worker_requests import WorkerRequest

__all__ = ["ExpertCounter"]


class ExpertCounter:
    """Counts the load of experts of one worker. Plain state, no I/O. Without routed experts it counts nothing."""

    def __init__(self) -> None:
        self._has_begun = False
        self._routing: RoutedExpertsInfo | None = None
        self._book: ExpertBook | None = None

    def __repr__(self) -> str:
        """One line with the book."""
        return f"<ExpertCounter {self._book!r}>"

    def begin(self, routing: RoutedExpertsInfo | None, now: float) -> None:
        """Start to count for an engine with these routed experts.

        Args:
            routing: None if the engine returns no routed experts.
        """
        self._has_begun = True
        self._routing = routing
        self.restart(now)

    def restart(self, now: float) -> None:
        """Remove all counts: the worker continues as another incarnation."""
        routing = self._routing
        self._book = None if routing is None or not is_countable(routing) else ExpertBook(routing, now, time.time())

    def load(self, since: int, window: Window, now: float) -> ExpertLoad | None:
        """Return the counts as `ExpertBook.load` does, or None if the engine returns no routed experts.

        Raises:
            ControlError: the engine has not started, or its model has too many experts.
        """
        if not self._has_begun:
            raise ControlError(ControlCode.NOT_SERVING, "the engine has not started")
        if self._routing is not None and self._book is None:
            shape = f"{self._routing.num_layers} layers x {self._routing.num_experts} experts"
            problem = f"the model has {shape}; allowed for counting: {MAX_EXPERT_CELLS} experts in all layers"
            raise ControlError(ControlCode.UNSUPPORTED, problem)
        return None if self._book is None else self._book.load(since, window, now)

    def add_batch(self, batch: TokenBatch, weight_version: int, now: float) -> None:
        """Count a batch of open requests, each of which already has its first token."""
        if self._book is not None:
            self._book.add_computed("generated", len(batch), weight_version, now)
            if batch.routed_experts is not None:
                self._book.add_rows("generated", batch.routed_experts, weight_version, now)

    def add_step(self, step: RequestStep, request: WorkerRequest, weight_version: int, now: float) -> None:
        """Count a step that was added to its open request.

        Steps before the first token are counted together with that token, in order, because only then
        `request.cached_tokens` is known.
        """
        if self._book is not None:
            self._count_computed(self._book, step, request, weight_version, now)
            if step.routed_experts is not None and len(step.routed_experts):
                self._count_rows(self._book, step, request, weight_version, now)

    @staticmethod
    def _count_computed(
        book: ExpertBook, step: RequestStep, request: WorkerRequest, weight_version: int, now: float
    ) -> None:
        num_tokens = len(step.token_ids)
        if not num_tokens:
            return
        num_before, num_prompt, num_generated = request.writer.taken_tokens - num_tokens, 0, num_tokens
        if not num_before:
            num_prompt = max(request.prompt_len - request.cached_tokens, 0)
            num_generated -= 1
        elif step.kv_recomputed:
            num_prompt = request.prompt_len
            num_generated += num_before - 1
        if num_prompt:
            book.add_computed("prompt", num_prompt, weight_version, now)
        if num_generated:
            book.add_computed("generated", num_generated, weight_version, now)

    @staticmethod
    def _count_rows(
        book: ExpertBook, step: RequestStep, request: WorkerRequest, weight_version: int, now: float
    ) -> None:
        rows, start = step.routed_experts, step.routed_experts_start
        if rows is None:
            return
        first_computed = max(request.cached_tokens - start, 0)
        first_generated = max(request.prompt_len - start, 0)
        if first_computed < min(first_generated, len(rows)):
            book.add_rows("prompt", rows[first_computed:first_generated], weight_version, now)
        if first_generated < len(rows):
            book.add_rows("generated", rows[first_generated:], weight_version, now)
