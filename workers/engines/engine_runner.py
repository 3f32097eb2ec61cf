"""Runs the engine of a worker."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from msgspec.structs import replace

from ...schemas.errors import EngineDead, RequestError
from ...schemas.messages import KvTransfer
from ...schemas.presence import Capabilities
from ...schemas.request import GenerateRequest
from .engine import Engine, RequestStep, TokenBatch

__all__ = ["EngineRunner"]

logger = logging.getLogger(__name__)


class EngineRunner:
    """Submits requests to an engine, forwards its steps, and notices its death, also a silent one.

    Every coroutine raises `EngineDead` if the engine is gone.

    Args:
        engine: not started.
        timeout_s: an engine that has requests and makes no step for so long is dead.
    """

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        self.engine = engine
        self._timeout_s = timeout_s
        self.capabilities: Capabilities | None = None
        """What the engine can do; None until it has started."""
        # Keys from `add` until the step that ends them; as many as the worker takes.
        self._inside: set[str] = set()
        self._being_added: set[str] = set()
        # Of those inside: their KV may be on its way, and an engine dies of an abort meanwhile (vllm#46240).
        self._fetching: set[str] = set()
        self._to_abort: set[str] = set()
        # Of those inside: the engine was told to abort them.
        self._aborted: set[str] = set()
        self._abort_wanted = asyncio.Event()
        self._added = asyncio.Event()
        self._quiet_s = 0.0
        self.is_engine_paused = False
        """The engine makes no steps, as it was told."""
        self.cache_epoch = 0
        """How often its prefix cache was emptied, or may have been."""

    def __repr__(self) -> str:
        """One line with counts."""
        frozen = " frozen" if self.is_engine_paused else ""
        return f"<EngineRunner inside={len(self._inside)}{frozen} quiet_s={self._quiet_s:g} engine={self.engine!r}>"

    @property
    def num_free(self) -> int:
        """Requests that the engine would start at once; 0 until it has started."""
        if self.capabilities is None:
            return 0
        return max(self.capabilities.max_num_seqs - len(self._inside), 0)

    @contextmanager
    def emptying_cache(self) -> Iterator[None]:
        """Count that the prefix cache is emptied within, also where that fails or is cancelled: some of it may be."""
        try:
            yield
        finally:
            self.cache_epoch += 1

    @property
    def num_inside(self) -> int:
        """Requests that the engine has."""
        return len(self._inside)

    def is_fetching(self, key: str) -> bool:
        """The KV of this request may be on its way: the engine does not hear of an abort before it is there."""
        return key in self._fetching

    def has_any(self, keys: Iterable[str]) -> bool:
        """The engine has one of these."""
        return not self._inside.isdisjoint(keys)

    async def start(self) -> None:
        """Start the engine.

        Raises:
            EngineDead: it could not be started.
        """
        await self.engine.start()
        able = {"request_groups": True, "group_backlog": True, "telemetry_reads": True}
        self.capabilities = replace(self.engine.capabilities, **able)

    async def run(self, on_steps: Callable[[Sequence[RequestStep | TokenBatch]], None]) -> NoReturn:
        """Hand over what each step of the engine produced, until it dies.

        Raises:
            EngineDead: always.
        """
        async for steps in self.engine.steps():
            self._quiet_s = 0.0
            for step in steps:
                if isinstance(step, TokenBatch):
                    # Its requests neither begin nor end.
                    continue
                if step.finish_reason is not None:
                    self._inside.discard(step.key)
                    self._aborted.discard(step.key)
                if step.key in self._fetching:
                    self._fetching.discard(step.key)
                    if step.key in self._to_abort:
                        self._abort_wanted.set()
            on_steps(steps)
        raise EngineDead("the engine stopped by itself")

    def reserve(self, keys: Iterable[str]) -> None:
        """Count requests as inside before `add` is called with each: they have slots, and aborts reach them."""
        self._inside.update(keys)
        self._being_added.update(keys)

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Have the engine take `request`, which has passed the worker's checks, under a key never used before.

        Args:
            kv: see `Engine.add`.

        Raises:
            InvalidRequest: the engine refuses it and has not seen it.
        """
        self.reserve([key])
        if kv is not None and kv.params:
            self._fetching.add(key)
        try:
            await self.engine.add(key, request, kv)
        except Exception:
            # Boundary: nothing of a refused request stays. A cancelled one may have been submitted, and is aborted.
            self._inside.discard(key)
            self._fetching.discard(key)
            raise
        finally:
            self._end_adding([key])

    def _end_adding(self, keys: Iterable[str]) -> None:
        """The engine knows these requests now, or it never will."""
        self._being_added.difference_update(keys)
        self._added.set()
        # Given up meanwhile: the engine would have ignored an abort of what it did not know yet.
        if not self._to_abort.isdisjoint(keys):
            self._abort_wanted.set()

    async def restart(self, keys: Sequence[str]) -> Mapping[str, RequestError]:
        """Have the frozen engine begin anew with these requests, in this order; see `Engine.restart`.

        Requests that are being aborted are left out, and those that the engine does not have. A request that is on its
        way into the engine is waited for, as it may carry the salt of older weights.

        Returns:
            Why the engine refuses a request now, by key; the engine does not have that request any more.
        Cancellation: each request is in the engine, or can be aborted there.
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
        """Have the engine end these requests soon, each by a step; those that it does not have are ignored.

        One whose KV is on its way is ended after its first step: until then it keeps its slot.
        """
        self._to_abort.update(self._inside.intersection(keys))
        if self._to_abort:
            self._abort_wanted.set()

    async def run_aborts(self) -> None:
        """Carry out aborts, until cancelled."""
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
        """Freeze the engine; see `Engine.pause`."""
        if not self.is_engine_paused:
            await self.engine.pause()
            self.is_engine_paused = True

    async def resume(self) -> None:
        """Let the engine go on; see `Engine.resume`."""
        # Before it goes on: what was given up may be so because it must make no more steps of it.
        await self._abort()
        # Also where a pause was cancelled half-way: resuming an engine that runs is harmless.
        await self.engine.resume()
        self.is_engine_paused = False

    def watch(self, interval_s: float) -> None:
        """Called every `interval_s`: is the engine still moving?

        Counts calls, not the clock: time for which this whole process stood still was not the engine's.

        Raises:
            EngineDead: it has requests and has made no step for too long.
        """
        is_due = self._inside and not self.is_engine_paused
        self._quiet_s = self._quiet_s + interval_s if is_due else 0.0
        if self._quiet_s > self._timeout_s:
            raise EngineDead(f"it has requests and made no step for {self._timeout_s:g} s")
