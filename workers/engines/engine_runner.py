"""Runs the engine of a worker."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from msgspec.structs import replace

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...schemas.errors import EngineDead, RequestError
from ...schemas.messages import KvTransfer
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from .engine import Engine

logger = logging.getLogger(__name__)


class EngineRunner:
    """Submits requests to an engine, forwards its steps and detects its death, even if the engine reports none.

    Every coroutine raises `EngineDead` if the engine is dead.

    Args:
        engine: the engine, not started.
        timeout_s: seconds without a step after which an engine with open requests counts as dead.
    """

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        self.engine = engine
        self._timeout_s = timeout_s
        self.capabilities: Capabilities | None = None
        """Capabilities of the engine; None until it has started."""
        # Keys from `add` until the step that ends the request. Bounded by the number of requests that the worker
        # accepts.
        self._inside: set[str] = set()
        self._being_added: set[str] = set()
        # Subset of `_inside`: their KV transfer may still run. An abort during the transfer kills the engine
        # (vllm#46240).
        self._fetching: set[str] = set()
        self._to_abort: set[str] = set()
        # Subset of `_inside`: the engine has received an abort for them.
        self._aborted: set[str] = set()
        self._abort_wanted = asyncio.Event()
        self._added = asyncio.Event()
        self._quiet_s = 0.0
        self.is_engine_paused = False
        """True if the engine runs no steps because it was paused."""
        self.cache_epoch = 0
        """Number of times that the prefix cache was reset, or may have been reset."""

    @property
    def num_free(self) -> int:
        """Number of requests that the engine would start immediately; 0 until it has started."""
        if self.capabilities is None:
            return 0
        return max(self.capabilities.max_num_seqs - len(self._inside), 0)

    @contextmanager
    def emptying_cache(self) -> Iterator[None]:
        """Count a reset of the prefix cache in this block, even a failed or cancelled one: it may be partial."""
        try:
            yield
        finally:
            self.cache_epoch += 1

    @property
    def num_inside(self) -> int:
        """Number of open requests in the engine."""
        return len(self._inside)

    def is_fetching(self, key: str) -> bool:
        """True if the KV transfer of this request may still run; an abort waits for its end."""
        return key in self._fetching

    def has_any(self, keys: Iterable[str]) -> bool:
        """True if the engine has at least one of these requests."""
        return not self._inside.isdisjoint(keys)

    async def start(self) -> None:
        """Start the engine.

        Raises:
            EngineDead: the engine did not start.
        """
        await self.engine.start()
        able = (
            "request_groups",
            "group_backlog",
            "telemetry_reads",
            "transfer_leases",
            "base_adapters",
            "request_lists",
        )
        self.capabilities = replace(self.engine.capabilities, **dict.fromkeys(able, True))

    async def run(self, on_steps: Callable[[Sequence[RequestStep | TokenBatch]], None]) -> NoReturn:
        """Pass the output of each engine step to `on_steps`, until the engine dies.

        Raises:
            EngineDead: always.
        """
        async for steps in self.engine.steps():
            self._quiet_s = 0.0
            for step in steps:
                if isinstance(step, TokenBatch):
                    # A batch neither begins nor ends a request.
                    continue
                if step.finish_reason is not None:
                    self._inside.discard(step.key)
                    self._aborted.discard(step.key)
                if step.key in self._fetching:
                    self._fetching.discard(step.key)
                    if step.key in self._to_abort:
                        self._abort_wanted.set()
            on_steps(steps)
        raise EngineDead("the engine stopped unexpectedly")

    def reserve(self, keys: Iterable[str]) -> None:
        """Count requests as inside before `add` is called for each: they occupy slots, and aborts reach them."""
        self._inside.update(keys)
        self._being_added.update(keys)

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Add `request`, which the worker has validated, to the engine under a key that was never used before.

        Args:
            kv: see `Engine.add`.

        Raises:
            InvalidRequest: the adapter rejects the request; it did not reach the engine.
        """
        self.reserve([key])
        if kv is not None and kv.params:
            self._fetching.add(key)
        try:
            await self.engine.add(key, request, kv)
        except Exception:
            # Boundary: remove a rejected request completely. A cancelled request may have been submitted; it is
            # aborted.
            self._inside.discard(key)
            self._fetching.discard(key)
            raise
        finally:
            self._end_adding([key])

    def _end_adding(self, keys: Iterable[str]) -> None:
        """Record that the adding of these requests is over: the engine has them now, or never receives them."""
        self._being_added.difference_update(keys)
        self._added.set()
        # Aborts that arrived during the adding: the engine would have ignored an abort of a key that it did not have
        # yet.
        if not self._to_abort.isdisjoint(keys):
            self._abort_wanted.set()

    async def restart(self, keys: Sequence[str]) -> Mapping[str, RequestError]:
        """Restart these requests in the paused engine, in this order; see `Engine.restart`.

        Skip requests that are being aborted or that the engine does not have. Wait for requests that are being added,
        because they may have the cache salt of older weights.

        Returns:
            The error for each request that the engine now rejects, by key; the engine has removed these requests.
        Cancellation: each request is in the engine or can be aborted there.
        """
        while not self._being_added.isdisjoint(keys):
            self._added.clear()
            await self._added.wait()
        leaving = self._to_abort | self._aborted | self._fetching
        meant = [key for key in keys if key in self._inside and key not in leaving]
        refused: dict[str, RequestError] = {}
        self._being_added.update(meant)
        try:
            for key in meant:
                try:
                    await self.engine.restart(key)
                except RequestError as exc:
                    self._inside.discard(key)
                    refused[key] = exc
        finally:
            self._end_adding(meant)
        return refused

    def abort(self, keys: Iterable[str]) -> None:
        """Schedule an abort of these requests; each ends with a step. Ignore requests that the engine does not have.

        A request whose KV transfer runs is aborted after its first step and keeps its slot until then.
        """
        self._to_abort.update(self._inside.intersection(keys))
        if self._to_abort:
            self._abort_wanted.set()

    async def run_aborts(self) -> None:
        """Send scheduled aborts to the engine, until cancelled."""
        while True:
            await self._abort_wanted.wait()
            self._abort_wanted.clear()
            await self._abort()

    async def _abort(self) -> None:
        keys = self._to_abort - self._being_added - self._fetching
        self._to_abort -= keys
        self._aborted |= keys & self._inside
        await self.engine.abort(sorted(keys & self._inside))

    async def pause(self) -> None:
        """Pause the engine; see `Engine.pause`."""
        if not self.is_engine_paused:
            await self.engine.pause()
            self.is_engine_paused = True

    async def resume(self) -> None:
        """Resume the engine; see `Engine.resume`."""
        # Send aborts before the engine resumes: some requests were aborted so that the engine runs no further step of
        # them.
        await self._abort()
        # Resume also after a cancelled pause: resuming a running engine has no effect.
        await self.engine.resume()
        self.is_engine_paused = False

    def watch(self, interval_s: float) -> None:
        """Check that the engine still completes steps. Call this every `interval_s` seconds.

        This counts calls instead of clock time, so a freeze of this whole process does not count as silence of the
        engine.

        Raises:
            EngineDead: the engine has open requests and completed no step for `timeout_s` seconds.
        """
        is_due = self._inside and not self.is_engine_paused
        self._quiet_s = self._quiet_s + interval_s if is_due else 0.0
        if self._quiet_s > self._timeout_s:
            raise EngineDead(f"the engine has open requests and completed no step for {self._timeout_s:g} s")
