"""What the engine made, on its way to the routes: versions are put to it, and single tokens are gathered."""

import logging
from collections.abc import Iterable

from bus.protocol.gathering import Gathering
from bus.protocol.states import HeldEvent
from bus.protocol.step import RequestStep, TokenBatch
from schemas.chunk import FinishReason
from schemas.errors import ErrorCode, LocalProtocolError, RequestError
from schemas.limits import MAX_KV_PARAMS_BYTES
from workers.endings import Endings
from workers.held import Held, HeldRequests, Instructions
from workers.link_stats import LinkStats
from workers.routes import Routes
from workers.versions import Versions

__all__ = ["Outputs"]

logger = logging.getLogger(__name__)


class Outputs:
    """From the engine's steps to the routes of the requests in hand. Plain state, no I/O.

    Invariant: a route is given each token once and in order, with the version that held when it was made.
    """

    def __init__(
        self, held: HeldRequests, routes: Routes, versions: Versions, endings: Endings, stats: LinkStats
    ) -> None:
        self._held = held
        self._routes = routes
        self._versions = versions
        self._endings = endings
        self._stats = stats
        self._gathering = Gathering()

    def __repr__(self) -> str:
        """One line with counts."""
        return f"<Outputs {self._gathering!r}>"

    @property
    def is_gathering(self) -> bool:
        """There are tokens that no route has been given yet."""
        return len(self._gathering) > 0

    def take(self, steps: Iterable[RequestStep | TokenBatch], now: float, todo: Instructions) -> None:
        """Take what one step made; requests whose output makes no sense are failed and aborted."""
        for step in steps:
            if isinstance(step, TokenBatch):
                self._take_batch(step, now, todo)
            else:
                self._take_step(step, now, todo)

    def _take_step(self, step: RequestStep, now: float, todo: Instructions) -> None:
        held = self._held.open(step.key)
        if held is None:
            self._stats.late_steps += 1
            return
        if step.kv_params is not None and len(step.kv_params) > min(MAX_KV_PARAMS_BYTES, self._routes.max_part_bytes):
            self._stats.kv_too_large += 1
            step.kv_params = None
        if not self._hand_over(held, todo) or not self._give(held, step, self._versions.weight_version, todo):
            return
        self._stats.count(step, held, now)
        held.awaits_kv = held.awaits_kv and not len(step.token_ids)
        if step.finish_reason is not None:
            self._stats.ended += 1
            was_stopped = step.finish_reason is FinishReason.ABORT
            self._held.end(held, HeldEvent.STOPPED if was_stopped else HeldEvent.FINISHED)

    def _take_batch(self, batch: TokenBatch, now: float, todo: Instructions) -> None:
        """Gather what may be gathered of a batch; the rest is taken as it is."""
        found = [self._held.open(key) for key in batch.keys]
        gathered = [held for held in found if held is not None and held.gathers]
        if len(gathered) < len(found):
            for step in batch.pick([i for i, held in enumerate(found) if held is None or not held.gathers]).split():
                self._take_step(step, now, todo)
            batch = batch.pick([i for i, held in enumerate(found) if held is not None and held.gathers])
        if not gathered:
            return
        if not self._gathering.takes(batch, self._versions.weight_version):
            self.hand_over(todo)
        try:
            full = self._gathering.add(batch, self._versions.weight_version)
        except LocalProtocolError as exc:
            for held in gathered:
                self._break(held, exc, todo)
            return
        self._stats.count_batch(batch, gathered, now)
        for name in full:
            held_in_full = self._held.open(name)
            if held_in_full is not None:
                self._hand_over(held_in_full, todo)

    def hand_over(self, todo: Instructions) -> None:
        """Give the routes all that was gathered."""
        for name in self._gathering.keys:
            held = self._held.open(name)
            if held is None:
                # It has ended meanwhile, other than by the engine.
                self._gathering.drop(name)
            else:
                self._hand_over(held, todo)

    def _hand_over(self, held: Held, todo: Instructions) -> bool:
        """Give the route of an open request what was gathered of it; False where that is the end of the request."""
        run = self._gathering.pop(held.name)
        return run is None or self._give(held, run, self._gathering.weight_version, todo)

    def _give(self, held: Held, step: RequestStep, weight_version: int, todo: Instructions) -> bool:
        """Give a step to the route of an open request; False where that is the end of the request."""
        lora_version = None if held.lora is None else self._versions.loras.get(held.lora)
        try:
            held.route.take(held.origin.key, step, weight_version, lora_version)
        except LocalProtocolError as exc:
            self._break(held, exc, todo)
            return False
        self._routes.touch(held.route)
        return True

    def _break(self, held: Held, exc: LocalProtocolError, todo: Instructions) -> None:
        """End a request of which the engine said what makes no sense."""
        logger.error("request.broken name=%s error=%s", held.name, exc)
        self._endings.fail(held, RequestError(code=ErrorCode.PROTOCOL_ERROR, message=str(exc)))
        todo.abort.append(held.name)

    def clear(self) -> None:
        """Forget what was gathered."""
        self._gathering.clear()
