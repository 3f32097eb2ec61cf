"""The vLLM engine behind the worker's `Engine` protocol."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import replace

from schemas.chunk import FinishReason
from schemas.errors import ControlCode, ControlError, EngineDead, InvalidRequest
from schemas.messages import KvHandover
from schemas.presence import Capabilities, Role
from schemas.request import GenerateRequest
from schemas.sampling import SamplingParams
from workers.engine import RequestStep, TokenBatch
from workers.engines.vllm.adapters import Adapters
from workers.engines.vllm.calls import Calls
from workers.engines.vllm.capabilities import describe_engine, find_refusals
from workers.engines.vllm.feeds import CoreFeed, Feed, RequestMaker
from workers.engines.vllm.generate_feed import GenerateFeed
from workers.engines.vllm.kv.config import FIELD as KV_FIELD
from workers.engines.vllm.kv.config import connector_config
from workers.engines.vllm.kv.params import unpacked
from workers.engines.vllm.launch import Launch
from workers.engines.vllm.loaded import Loaded
from workers.engines.vllm.outputs import OpenRequests
from workers.engines.vllm.params import to_vllm
from workers.engines.vllm.weights import Weights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["VllmEngine"]

logger = logging.getLogger(__name__)

Reading = Literal["auto", "core", "generate"]

SHUTDOWN_S = 30.0
"""For the engine's processes to end in order, before they are killed; seconds on a busy machine."""
CANCEL_AGAIN_S = 0.5
"""How often a cancelled start looks for processes that vLLM has started meanwhile."""
WARM_UP_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 4
GREEDY = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=WARM_UP_TOKENS, top_p=0.9, top_k=5, min_p=0.01, seed=0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=WARM_UP_TOKENS, repetition_penalty=1.1, logit_bias={0: -1.0}, ignore_eos=True)
WARM_UP_ROUNDS = ((GREEDY,), (SEEDED,), (RANDOM,), (RANDOM, RANDOM), (GREEDY, SEEDED, RANDOM))
"""Requests that run together. What vLLM compiles, it compiles when first used: for one row and for several, and for
random sampling without seeds apart from all other (v1/sample/ops/topk_topp_sampler.py: compiled_random_sample)."""


class _Unfit(EngineDead):
    """The engine runs, but not with this way of reading from it."""


class VllmEngine:
    """One vLLM engine, in processes of its own.

    Args:
        model: folder of a checkpoint, or whatever else vLLM takes as `model`.
        engine_args: fields of vLLM's `AsyncEngineArgs`; unknown ones make `start` fail.
        read: `core` reads the engine core's step outputs, `generate` goes through `AsyncLLM.generate`; `auto` takes
            the first where this release of vLLM allows it.
        log_level: of vLLM's own logs, which go to stderr; None: the environment's `VLLM_LOGGING_LEVEL`, else warnings.
        role: other than `both` it needs `kv_transfer_config` among the `engine_args`.

    Raises:
        InvalidRequest: the KV connector does not fit the role.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine_args: Mapping[str, Any] | None = None,
        read: Reading = "auto",
        log_level: str | None = None,
        role: Role = "both",
    ) -> None:
        chosen = dict(engine_args or {})
        connector = connector_config(role, chosen.pop(KV_FIELD, None))
        if connector is not None:
            chosen[KV_FIELD] = connector
        self._launch = Launch(str(model), chosen, log_level)
        self._role: Role = role
        self._read: Reading = read
        self._feed: Feed | None = None
        self._feeds = AsyncExitStack()
        self._requests = OpenRequests(None, rows_with_tokens=False)
        self._capabilities: Capabilities | None = None
        self._loaded = Loaded()
        self._controls: _Controls | None = None
        self._is_paused = False
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "starting" if self._capabilities is None else "running"
        return f"<VllmEngine {state} feed={type(self._feed).__name__} open={len(self._requests)}>"

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; valid once `start` has returned."""
        if self._capabilities is None:
            raise EngineDead("the engine has not been started")
        return self._capabilities

    async def start(self) -> None:
        """Load the model in a thread, so that the event loop stays free, and warm up.

        Cancellation: stops the engine's processes and waits until they are gone.

        Raises:
            EngineDead: the engine could not be started; the message says why.
        """
        try:
            await _to_the_end(self._launch.run, on_cancel=self._launch.cancel)
            self._capabilities = describe_engine(self._launch.llm.vllm_config, self._role)
            self._controls = _Controls(self._launch.llm, self._loaded, self._capabilities)
            await self._open(self._launch.llm)
        except BaseException:
            await self._shut_down()
            raise
        logger.info("engine.started engine=%r capabilities=%s", self, self._capabilities)

    async def add(self, key: str, request: GenerateRequest, kv: KvHandover | None = None) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`; see `Engine.add`.

        Cancellation: the request may have been submitted; abort it.

        Raises:
            InvalidRequest: a parameter that vLLM refuses or would change; nothing was submitted.
            EngineDead: the engine is gone.
        """
        feed = self._running_feed()
        capabilities = self.capabilities
        refusal = self._running().refusals.prompt_logprobs
        if refusal is not None and request.sampling.prompt_logprobs is not None:
            raise InvalidRequest(field="sampling.prompt_logprobs", problem=refusal, allowed="null")
        returns_rows = capabilities.routed_experts is not None and request.return_routed_experts is not False
        transfer = unpacked(kv, request, self._launch.llm.vllm_config.kv_transfer_config)
        params = to_vllm(request, max_model_len=capabilities.max_model_len, returns_rows=returns_rows, kv=transfer)
        engine_id = self._requests.add(key, request, None if transfer is None else kv)
        try:
            await feed.submit(engine_id, request, params)
        except Exception:
            self._requests.remove(engine_id)
            raise

    async def abort(self, keys: Sequence[str]) -> None:
        """End these requests with a `RequestStep` of finish reason ABORT each, after the steps that came before.

        Unknown keys and requests that end in a step not yet read are left alone.
        """
        if self._feed is not None and not self._is_closed:
            await self._feed.abort(self._requests.engine_ids(keys))

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield what each engine step produced; called once. Ends when the engine is closed.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """
        while not self._is_closed:
            steps = await self._next_steps()
            if steps:
                yield steps

    async def pause(self) -> None:
        """Freeze what is running, once all that was sampled is handed over; see `Engine.pause`.

        Cancellation: the engine may be paused; `resume` is right in both cases.
        """
        feed, calls = self._running_feed(), self._running().calls
        # Not `pause_generation`, which instead of waiting for what was sampled sleeps for a while.
        await calls.call("engine_core.pause_scheduler_async", mode="keep", clear_cache=False)
        self._is_paused = True
        async with calls.until_death():
            await feed.barrier()

    async def resume(self) -> None:
        """Go on where `pause` froze; harmless when not paused."""
        await self._running().calls.call("engine_core.resume_scheduler_async")
        self._is_paused = False

    async def reset_cache(self, *, preempt: bool) -> bool:
        """Forget the prefix cache; see `Engine.reset_cache`."""
        try:
            return bool(await self._running().calls.call("reset_prefix_cache", reset_running_requests=preempt))
        except ControlError as exc:
            if exc.code is ControlCode.UNSUPPORTED:
                raise
            # What vLLM raises where it should have succeeded, as it has taken the cache from all who used it.
            logger.warning("engine.cache_not_reset reason=%s", exc.message)
            return False

    async def load_weights(self, path: Path) -> None:
        """Replace all weights by those of a checkpoint; the adapters are gone then. See `Engine.load_weights`.

        Cancellation: the engine goes on loading, and nobody hears how it ends.
        """
        await self._clear_nan()
        await self._running().weights.load(path)

    @property
    def loras(self) -> Mapping[str, int]:
        """The adapters that requests may name, with their versions."""
        return {name: adapter.version for name, adapter in self._loaded.adapters.items()}

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Load an adapter, or replace the one of this name in place; see `Engine.load_lora`."""
        await self._running().adapters.load(name, path, version)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no request in flight uses; one that is not there is fine."""
        await self._running().adapters.unload(name)

    async def sleep(self, level: int) -> None:
        """Give up memory; nothing is running."""
        self._check_sleeps()
        await self._running().calls.call("sleep", level)

    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights have to be loaded again."""
        self._check_sleeps()
        await self._running().calls.call("wake_up")
        if self._is_paused:
            # vLLM's own wake resumes too.
            await self.pause()

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to vLLM's own transfer engine."""
        await self._running().weights.init_transfer(info)

    async def start_weight_update(self) -> None:
        """Begin to take weights; from here on they are half written."""
        await self._running().weights.start_transfer()

    async def update_weight_chunk(self, info: Mapping[str, Any]) -> None:
        """Take some of them; after an error the update is over, and has to be started again."""
        await self._running().weights.take_chunk(info)

    async def finish_weight_update(self) -> None:
        """All of them are there; the adapters are gone."""
        await self._running().weights.finish_transfer()
        await self._clear_nan()

    async def close(self) -> None:
        """Stop the engine and every process it started; safe to call twice and after a failed `start`.

        Cancellation: waits until the processes are gone nevertheless.
        """
        self._is_closed = True
        if self._controls is not None:
            self._controls.calls.end("the engine was closed")
        self._launch.cancel()
        await self._shut_down()

    async def _open(self, llm: "AsyncLLM") -> None:
        """Choose how to read from the engine, by trying."""
        maker = RequestMaker(llm, self._loaded, await llm.get_supported_tasks())
        if self._read != "generate":
            try:
                if not CoreFeed.fits(llm):
                    raise _Unfit(f"vLLM {self.capabilities.engine_version} does not let its step outputs be read")
                await self._use(CoreFeed(llm, maker))
            except _Unfit as exc:
                if self._read == "core":
                    raise
                logger.warning("engine.falls_back_to_generate reason=%s", exc)
            else:
                return
        await self._use(GenerateFeed(llm, maker))

    async def _use(self, feed: Feed) -> None:
        """Read from `feed` and warm up, so that all is compiled and the row rule is seen to hold."""
        self._feed = await self._feeds.enter_async_context(feed)
        self._requests = OpenRequests(self.capabilities.routed_experts, rows_with_tokens=feed.rows_with_tokens)
        room = self.capabilities.max_model_len - WARM_UP_TOKENS
        prompt = np.arange(min(WARM_UP_PROMPT_TOKENS, room)) % self.capabilities.vocab_size
        has_prompt_logprobs = self._running().refusals.prompt_logprobs is None
        for together in WARM_UP_ROUNDS:
            for number, wanted in enumerate(together):
                sampling = wanted if has_prompt_logprobs else replace(wanted, prompt_logprobs=None)
                # Salted, so that no one else finds this prompt in the prefix cache.
                request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, cache_salt="warm-up")
                await self.add(f"warm-up-{number}", request)
            while len(self._requests):
                for step in await self._next_steps():
                    if isinstance(step, RequestStep) and step.finish_reason is FinishReason.ERROR:
                        raise _Unfit(f"a first request failed: {step.error}")

    async def _shut_down(self) -> None:
        llm = self._launch.take()
        try:
            await self._feeds.aclose()
        finally:
            self._feed = None
            if llm is not None:
                reader = getattr(getattr(llm.engine_core, "resources", None), "output_queue_task", None)
                await _to_the_end(partial(llm.shutdown, timeout=SHUTDOWN_S))
                if reader is not None:
                    # vLLM's own task: cancelled by its shutdown, and gone when this returns.
                    await asyncio.wait({reader})

    async def _next_steps(self) -> list[RequestStep | TokenBatch]:
        feed = self._running_feed()
        try:
            outputs = await feed.next()
        except EngineDead as exc:
            if self._is_closed:
                return []
            self._running().calls.end(str(exc))
            raise
        steps, broken = self._requests.read(outputs)
        if broken:
            logger.error("engine.output_refused requests=%d", len(broken))
            await feed.abort(broken)
        return steps

    async def _clear_nan(self) -> None:
        """Put right what weights that compute NaN have left in the KV cache, or good ones would not get rid of it."""
        if self._requests.has_seen_nan:
            await self._running().calls.on_workers("rollbus_clear_nan")
            self._requests.has_seen_nan = False

    def _running_feed(self) -> Feed:
        if self._feed is None or self._is_closed:
            raise EngineDead("the engine is not running")
        return self._feed

    def _running(self) -> "_Controls":
        if self._controls is None or self._is_closed:
            raise EngineDead("the engine is not running")
        return self._controls

    def _check_sleeps(self) -> None:
        refusal = self._running().refusals.sleep
        if refusal is not None:
            raise ControlError(ControlCode.UNSUPPORTED, refusal)


class _Controls:
    """What there is for a started engine besides its requests."""

    def __init__(self, llm: "AsyncLLM", loaded: Loaded, capabilities: Capabilities) -> None:
        self.refusals = find_refusals(llm.vllm_config)
        self.calls = Calls(llm)
        self.weights = Weights(
            llm,
            self.calls,
            loaded,
            load_refusal=self.refusals.weight_updates,
            transfer_refusal=self.refusals.weight_transfer,
        )
        self.adapters = Adapters(self.calls, loaded, max_loras=capabilities.max_loras, refusal=self.refusals.loras)


async def _to_the_end(work: Callable[[], None], *, on_cancel: Callable[[], None] | None = None) -> None:
    """Run `work` in a thread and stay until it has ended, also when cancelled: a thread cannot be abandoned.

    When cancelled, calls `on_cancel` again and again until `work` has ended.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            if on_cancel is not None:
                on_cancel()
            try:
                await asyncio.wait({future}, timeout=CANCEL_AGAIN_S)
            except asyncio.CancelledError:
                continue
        # Asked for, so that asyncio does not report it as forgotten.
        future.exception()
        raise
