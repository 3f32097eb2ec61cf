"""The seam between a worker and the engine inside it.

An engine is shaped by steps: it takes requests one at a time and hands over what one step produced for
all of them. The worker above owns identity, admission and transport; the engine owns scheduling and sampling.
Every request that `add` accepted ends with exactly one `RequestStep` that has `finish_reason` set, unless
the engine dies, which `steps` reports by raising `EngineDead`.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ...schemas.messages import KvTransfer
from ...schemas.presence import Capabilities, EngineStats
from ...schemas.request import GenerateRequest
from ...schemas.weights import Verified

__all__ = ["Engine", "RequestStep", "TokenBatch"]


class Engine(Protocol):
    """One inference engine. All methods are called from one event loop.

    Every coroutine but `close` raises `EngineDead` if the engine is gone.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; valid once `start` has returned."""

    @property
    def reports_recomputed_kv(self) -> bool:
        """Each step says whether the KV before its tokens was computed anew (`RequestStep.kv_recomputed`)."""

    @property
    def stats(self) -> EngineStats:
        """Its load now, for announcements; may be asked at any time, and costs no call to the engine."""

    @property
    def oldest_prefix_s(self) -> float | None:
        """Seconds since the oldest prefix was used that its prefix cache may still have.

        What was used earlier is forgotten, unless a request holds it. None: it may have forgotten none, or it does not
        say.
        """

    async def start(self) -> None:
        """Load the model and warm up, so that the first real request is as fast as the others.

        Raises:
            EngineDead: the engine could not be started; the message says why.
        """

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`.

        `request` has passed the worker's checks against `capabilities`.

        Args:
            kv: None: a whole request. Without `params`, of an engine of role `prefill`: a prefill leg, whose last step
                brings `kv_params`, and whose KV is kept for a while for whoever comes with them. With `params`, of this
                engine's own connector, weights and adapter: the KV of all whole blocks before the last tokens is
                fetched, counts as cached, and has no rows. Where that fails, the request ends with `error_code`
                KV_TRANSFER_FAILED.

        Raises:
            InvalidRequest: a parameter that this engine refuses; nothing was submitted.
        """

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests with a `RequestStep` of finish reason ABORT each; unknown keys are ignored.

        Never called for one whose KV may be on its way: one with `kv.params` that has made no step yet.
        """

    async def restart(self, key: str) -> None:
        """Take the request of `key` out of the frozen engine and add it anew, under the weights and adapters of now.

        Nothing of what the engine has computed for it is used again, neither rows nor KV, and no step tells of it. It
        joins the end of the queue, so a caller that restarts requests in the order of their arrival keeps that order.
        A request that has a token, a prefill or decode leg, and a key that the engine does not know stay as they are.

        Never called for a request that is being added or aborted.

        Raises:
            InvalidRequest: the engine refuses it now; it is not in the engine any more.
        """

    def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield what each engine step produced; called once. A request is in one element of a step at most.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """

    async def pause(self) -> None:
        """Freeze what is running: no step is made until `resume`. Requests may be added and aborted meanwhile.

        When this returns, `steps` has yielded all that was sampled before, and its reader has come back for more.
        Repeating it is harmless.
        """

    async def resume(self) -> None:
        """Go on where `pause` froze; harmless when not paused."""

    async def reset_cache(self, *, preempt: bool) -> bool:
        """Forget the prefix cache; False: it could not be, as requests hold parts of it.

        Args:
            preempt: take it from them; they are computed anew when they go on.
        """

    async def load_weights(self, path: Path) -> Verified | None:
        """Replace all weights by those of a checkpoint whose files, names, shapes and dtypes were checked.

        Returns what was compared afterwards; None: nothing was.

        Called while paused, or with nothing running. Adapters are as before afterwards, or gone: `loras` says so.
        Requests added afterwards find nothing in the prefix cache that older weights have put there.

        Raises:
            ControlError: `engine_error`, the weights are as they were; `half_written`, nobody knows what they are;
                `unsupported`.
        """

    @property
    def loras(self) -> Mapping[str, int]:
        """The adapters that requests may name, with their versions."""

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Load an adapter whose files were checked, or replace the one of this name, also for requests in flight.

        Called while paused, or with nothing running. Requests added afterwards find nothing in the prefix cache that
        an older adapter of this name has put there.

        Raises:
            ControlError: `engine_error`, what was there is as it was; `unsupported`.
        """

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no request in flight uses; one that is not there is fine.

        Raises:
            ControlError: `engine_error`, it is still there.
        """

    async def sleep(self, level: int) -> None:
        """Give up memory; nothing is running.

        Raises:
            ControlError: `unsupported`, `engine_error`.
        """

    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights have to be loaded again.

        Raises:
            ControlError: `unsupported`, `engine_error`.
        """

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to the engine's own transfer engine; like the next three, raises `ControlError`."""

    async def start_weight_update(self) -> None:
        """Begin to take weights; called while paused, or with nothing running. From here on they are half written."""

    async def update_weight_chunk(self, info: Mapping[str, Any]) -> None:
        """Take some of them."""

    async def finish_weight_update(self) -> Verified | None:
        """All of them are there. Result, cached prefixes and adapters as after `load_weights`."""

    async def close(self) -> None:
        """Stop the engine and every process it started; safe to call twice and after a failed `start`."""
