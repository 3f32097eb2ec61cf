"""The interface between a worker and its engine, and the object that runs an engine.

The interface works in engine steps: the worker adds requests one at a time, and the engine yields the output of one
step for all requests. The worker owns identity, admission and transport. The engine owns scheduling and sampling.
Every request that `add` accepted ends with exactly one `RequestStep` that has a `finish_reason`. The exception: if the
engine dies, `steps` raises `EngineDead`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Protocol

from msgspec.structs import replace

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...schemas.errors import EngineDead, RequestError
from ...schemas.messages import KvTransfer
from ...schemas.presence import Capabilities, EngineStats
from ...schemas.request import GenerateRequest
from ...schemas.weights import Verified


class Engine(Protocol):
    """One inference engine. The worker calls all methods from one event loop.

    Every coroutine except `close` raises `EngineDead` if the engine is dead.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this engine; valid after `start` has returned."""

    @property
    def reports_recomputed_kv(self) -> bool:
        """True if each step states whether its KV was recomputed (`RequestStep.kv_recomputed`)."""

    @property
    def stats(self) -> EngineStats:
        """Current load of the engine, for presence; available at any time, without a call to the engine."""

    @property
    def oldest_prefix_s(self) -> float | None:
        """Seconds since the last use of the oldest prefix that the prefix cache may still contain.

        The engine has evicted every prefix with an earlier last use, unless a request holds it. None: the engine may
        not have evicted any prefix, or it does not report this.
        """

    async def start(self) -> None:
        """Load the model and warm up, so that the first real request is as fast as later requests.

        Raises:
            EngineDead: the engine did not start; the message gives the reason.
        """

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`.

        The worker has validated `request` against `capabilities`.

        Args:
            kv: None: a request without separate phases. Without `params`, on an engine of role `prefill`: a prefill
                phase. Its last step has `kv_params`, and the engine keeps its KV for a while for the request that has
                these parameters. With `params` of this engine's own connector, weights and adapter: a decode phase.
                The engine fetches the KV of all whole blocks before the last tokens; these tokens count as cached and
                have no rows. If the transfer fails, the request ends with `error_code` KV_TRANSFER_FAILED.

        Raises:
            InvalidRequest: the engine rejects a parameter; nothing was submitted.
        """

    async def abort(self, keys: Sequence[str]) -> None:
        """End each of these requests with a `RequestStep` of finish reason ABORT; ignore unknown keys.

        The worker never aborts a request whose KV transfer may still run: a request with `kv.params` and no step yet.
        """

    async def restart(self, key: str) -> None:
        """Remove the request of `key` from the paused engine and add it again, with the current weights and adapters.

        The engine discards everything that it has computed for the request, rows and KV, and no step reports the
        restart. The request joins the end of the engine's queue, so a caller that restarts requests in the order of
        their arrival keeps that order. A request that has a token or a prefill or decode phase is left unchanged. An
        unknown key is ignored.

        The worker never calls this for a request that it is adding or aborting.

        Raises:
            InvalidRequest: the engine now rejects the request and has removed it.
        """

    def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield the output of each engine step. Call this once. A request is in at most one element of a step.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """

    async def pause(self) -> None:
        """Pause the engine: it runs no step until `resume`. Requests may be added and aborted while it is paused.

        When this returns, `steps` has yielded every token sampled before, and its reader has processed them all.
        A repeated call has no effect.
        """

    async def resume(self) -> None:
        """Continue from the point of `pause`; no effect if the engine is not paused."""

    async def reset_cache(self, *, preempt: bool) -> bool:
        """Reset the prefix cache. Return False if that failed because requests hold parts of it.

        Args:
            preempt: preempt these requests; the engine recomputes their KV when it resumes them.
        """

    async def load_weights(self, path: Path) -> Verified | None:
        """Replace all weights by those of a checkpoint whose files, names, shapes and dtypes were validated.

        Return the comparisons made after the load; None: none were made.

        The worker calls this while the engine is paused or has no requests. The adapters are then unchanged or
        unloaded; see `loras`. Requests added later find no prefix cache entries of the older weights.

        Raises:
            ControlError: `engine_error`: the weights are unchanged; `half_written`: the weights are unknown;
                `unsupported`.
        """

    @property
    def loras(self) -> Mapping[str, int]:
        """Versions of the adapters that requests may name, by name."""

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Load an adapter whose files were validated, or replace the adapter of this name, also for open requests.

        The worker calls this while the engine is paused or has no requests. Requests added later find no prefix cache
        entries of an older adapter of this name.

        Raises:
            ControlError: `engine_error`: the adapters are unchanged; `unsupported`.
        """

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no open request uses; ignore an adapter that is not loaded.

        Raises:
            ControlError: `engine_error`: the adapter is still loaded.
        """

    async def sleep(self, level: int) -> None:
        """Free memory; the engine must have no requests.

        Raises:
            ControlError: `unsupported`, `engine_error`.
        """

    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights must be loaded again.

        Raises:
            ControlError: `unsupported`, `engine_error`.
        """

    async def find_memory_user(self) -> str | None:
        """Return who uses the memory that the engine needs to wake or to start, for example `GPU in use by pid 7`.

        None: the memory is free, or the engine cannot tell. The worker also calls this before `start`.
        """

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to the engine's own transfer engine. This and the next four methods raise `ControlError`."""

    async def start_weight_update(self) -> None:
        """Begin to receive weights, while paused or without requests. From here on the weights are half written."""

    async def update_weight_chunk(self, info: Mapping[str, Any]) -> None:
        """Receive some of the weights."""

    async def finish_weight_update(self) -> Verified | None:
        """Finish the update after the last chunk. Result, prefix cache and adapters are as after `load_weights`."""

    async def abandon_weight_update(self) -> None:
        """End an unfinished update, so that `load_weights` may follow; no effect without one.

        Return only if the engine executes calls again. A call of a transfer engine may wait for a peer that is gone.
        """

    async def close(self) -> None:
        """Stop the engine and every process that it started; safe to call twice and after a failed `start`."""


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

    def ends_soon(self, key: str) -> bool:
        """True if the engine ends this request soon after an abort: it runs, and no KV transfer of the request may."""
        return key in self._inside and key not in self._fetching and not self.is_engine_paused

    def has_any(self, keys: Iterable[str]) -> bool:
        """True if the engine has at least one of these requests."""
        return not self._inside.isdisjoint(keys)

    async def start(self) -> None:
        """Start the engine.

        Raises:
            EngineDead: the engine did not start.
        """
        await self.engine.start()
        self.capabilities = replace(
            self.engine.capabilities,
            request_groups=True,
            group_backlog=True,
            telemetry_reads=True,
            transfer_leases=True,
            base_adapters=True,
            request_lists=True,
        )

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
