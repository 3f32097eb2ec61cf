"""The interface between a worker and its engine.

The interface works in engine steps: the worker adds requests one at a time, and the engine yields the output of one
step for all requests. The worker owns identity, admission and transport. The engine owns scheduling and sampling.
Every request that `add` accepted ends with exactly one `RequestStep` that has a `finish_reason`. The exception: if the
engine dies, `steps` raises `EngineDead`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
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
