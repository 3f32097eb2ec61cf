"""The vLLM engine behind the worker's `Engine` protocol."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ....bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ....schemas.chunk import FinishReason
from ....schemas.errors import ControlCode, ControlError, EngineDead, InvalidRequest
from ....schemas.messages import KvTransfer
from ....schemas.presence import Capabilities, EngineStats, WorkerRole
from ....schemas.request import GenerateRequest
from ....schemas.sampling import SamplingParams
from ....schemas.weights import Verified
from ..gpus import DEFAULT_SHARE, GpuMemory, describe_user, own_processes, read_gpus
from .calls import Calls, check_supported
from .capabilities import describe_engine, find_refusals, kv_cache_tokens_of, prefix_age_of
from .corrections import OUTDATE, OWN_FIRST, WATCH
from .feed import CoreFeed
from .kv.config import FIELD as KV_FIELD
from .kv.config import connector_config, decode_params
from .launch import Launch, preempts_only_paused
from .loads import Adapters, LoadSerials, sum_answers
from .outputs import OpenRequests
from .params import to_vllm
from .reload import FINISH_TRANSFER, INIT_TRANSFER, START_TRANSFER, UPDATE_TRANSFER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

CANCEL_AGAIN_S = 0.5
"""Seconds between two calls of `on_cancel`. A cancelled start kills the new processes of vLLM at each call."""
SHUTDOWN_S = 30.0
"""Seconds in which the engine's processes may exit by themselves before they are killed."""
WARM_UP_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 4
GREEDY = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=WARM_UP_TOKENS, top_p=0.9, top_k=5, min_p=0.01, seed=0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=WARM_UP_TOKENS, repetition_penalty=1.1, logit_bias={0: -1.0}, ignore_eos=True)
WARM_UP_ROUNDS = ((GREEDY,), (SEEDED,), (RANDOM,), (RANDOM, RANDOM), (GREEDY, SEEDED, RANDOM))
"""Sampling parameters of the requests that run together in each round. vLLM compiles code at its first use. It compiles
separately for one row and for several rows, and for random sampling without seeds
(v1/sample/ops/topk_topp_sampler.py: compiled_random_sample)."""


class VllmEngine:
    """One vLLM engine, in its own processes.

    Args:
        model: folder of a checkpoint, or any other value that vLLM accepts as `model`.
        engine_args: fields of vLLM's `AsyncEngineArgs`; an unknown field makes `start` fail.
        log_level: level of vLLM's own logs, which go to stderr; None: the environment variable `VLLM_LOGGING_LEVEL`,
            or WARNING if it is not set.
        role: every role except `both` needs `kv_transfer_config` in `engine_args`.

    Raises:
        InvalidRequest: the KV connector does not fit the role.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine_args: Mapping[str, Any] | None = None,
        log_level: str | None = None,
        role: WorkerRole = "both",
    ) -> None:
        chosen = dict(engine_args or {})
        connector = connector_config(role, chosen.pop(KV_FIELD, None))
        if connector is not None:
            chosen[KV_FIELD] = connector
        self._share = float(chosen.get("gpu_memory_utilization", DEFAULT_SHARE))
        self._launch = Launch(str(model), chosen, log_level)
        self._role: WorkerRole = role
        self._feed: CoreFeed | None = None
        self._requests = OpenRequests(None)
        self._capabilities: Capabilities | None = None
        self._loaded = LoadSerials()
        self._controls: Controls | None = None
        self._is_paused = False
        self._is_closed = False
        # Bytes that the last sleep freed, by GPU.
        self._freed: dict[str, int] = {}

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "starting" if self._capabilities is None else "running"
        return f"<VllmEngine {state} open={len(self._requests)}>"

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of this engine; valid after `start` has returned."""
        if self._capabilities is None:
            raise EngineDead("the engine has not been started")
        return self._capabilities

    @property
    def reports_recomputed_kv(self) -> bool:
        """True if each step states whether its KV was recomputed; valid after `start` has returned."""
        return self._feed is not None and self._running().watches_kv

    @property
    def stats(self) -> EngineStats:
        """Load of the engine, as the engine cores reported it with their last steps."""
        return EngineStats() if self._feed is None else self._feed.meter.stats()

    @property
    def oldest_prefix_s(self) -> float | None:
        """Seconds since the last use of the oldest prefix that the cache may still contain; see `PrefixAge`."""
        age = None if self._feed is None else self._feed.meter.prefix_age
        return None if age is None else age.oldest_s(time.monotonic())

    async def start(self) -> None:
        """Load the model in a thread, so that the event loop is not blocked, and warm up.

        Cancellation: stops the engine's processes and waits for their exit.

        Raises:
            EngineDead: the engine did not start; the message gives the reason.
        """
        async with contextlib.AsyncExitStack() as unless_started:
            unless_started.push_async_callback(self._shut_down)
            await to_the_end(self._launch.run, on_cancel=self._launch.cancel)
            self._capabilities = describe_engine(self._launch.llm.vllm_config, self._role)
            self._controls = Controls(self._launch.llm, self._loaded, self._capabilities)
            await self._prepare_workers(self._controls)
            await self._open(self._launch.llm)
            unless_started.pop_all()
        logger.info("engine.started engine=%r capabilities=%s", self, self._capabilities)

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Submit `request`, whose `sampling.n` is 1, under the engine-unique `key`; see `Engine.add`.

        Cancellation: the request may have been submitted; abort it.

        Raises:
            InvalidRequest: vLLM rejects a parameter or would change it; nothing was submitted.
            EngineDead: the engine is dead.
        """
        feed = self._running_feed()
        refusal = self._running().refusals.prompt_logprobs
        if refusal is not None and request.sampling.prompt_logprobs is not None:
            raise InvalidRequest("sampling.prompt_logprobs", refusal, "null")
        transfer = decode_params(kv, request, self._launch.llm.vllm_config.kv_transfer_config)
        engine_id = self._requests.add(key, request, None if transfer is None else kv)
        await self._submit(feed, engine_id, request, transfer)

    async def _submit(
        self, feed: CoreFeed, engine_id: str, request: GenerateRequest, transfer: dict[str, Any] | None = None
    ) -> None:
        """Submit a request that was opened under `engine_id` to the engine."""
        capabilities = self.capabilities
        returns_rows = capabilities.routed_experts is not None and request.return_routed_experts is not False
        try:
            max_len = capabilities.max_model_len
            params = to_vllm(request, max_model_len=max_len, returns_rows=returns_rows, kv=transfer)
            await feed.submit(engine_id, request, params)
        except Exception:
            # Boundary: remove a rejected request completely. A cancelled request may have been submitted; it is
            # aborted.
            self._requests.remove(engine_id)
            raise

    async def restart(self, key: str) -> None:
        """Restart a request without a token, with the current cache salt; see `Engine.restart`.

        Cancellation: the request may have been submitted; abort it.
        """
        feed = self._running_feed()
        restarted = self._requests.restart(key)
        if restarted is None:
            return
        # The restart uses a new engine id, so that late outputs of the old id are ignored.
        old_id, new_id, request = restarted
        await feed.abort([old_id])
        await self._submit(feed, new_id, request)

    async def abort(self, keys: Sequence[str]) -> None:
        """End each of these requests with a `RequestStep` of finish reason ABORT, after their earlier steps.

        Ignore unknown keys and requests whose last step is not read yet.
        """
        if self._feed is not None and not self._is_closed:
            await self._feed.abort(self._requests.engine_ids(keys))

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield the output of each engine step, until the engine is closed. Call this once.

        A step that only computes a part of a prompt has no output, and is yielded as progress.

        Raises:
            EngineDead: the engine died; every open request is lost.
        """
        while not self._is_closed:
            steps = await self._next_steps()
            if steps or (self._feed and self._feed.meter.has_moved):
                yield steps

    async def pause(self) -> None:
        """Pause the engine and wait until every sampled token is read; see `Engine.pause`.

        Cancellation: the engine may be paused; `resume` is correct in both cases.
        """
        feed, calls = self._running_feed(), self._running().calls
        # Do not use `pause_generation`: it sleeps for a fixed time instead of waiting for the sampled tokens.
        await calls.call("engine_core.pause_scheduler_async", mode="keep", clear_cache=False)
        self._is_paused = True
        async with calls.until_death():
            await feed.barrier()
        feed.meter.interrupt()

    async def resume(self) -> None:
        """Continue from the point of `pause`; no effect if the engine is not paused."""
        await self._running().calls.call("engine_core.resume_scheduler_async")
        self._is_paused = False

    async def reset_cache(self, *, preempt: bool) -> bool:
        """Reset the prefix cache; see `Engine.reset_cache`."""
        if preempt and not self._is_paused and preempts_only_paused(self._launch.llm.vllm_config):
            await self.pause()
            try:
                return await self._reset_cache(preempt=True)
            finally:
                await self.resume()
        return await self._reset_cache(preempt=preempt)

    async def _reset_cache(self, *, preempt: bool) -> bool:
        try:
            return all(await self._running().calls.on_replicas("reset_prefix_cache", preempt))
        except ControlError as exc:
            if exc.code is ControlCode.UNSUPPORTED:
                raise
            # vLLM raises this although it has preempted every request that used the cache.
            logger.warning("engine.cache_reset_failed reason=%s", exc.message)
            return False

    async def load_weights(self, path: Path) -> Verified | None:
        """Replace all weights by those of a checkpoint; this unloads all adapters. See `Engine.load_weights`.

        Cancellation: the engine continues to load, and no code receives the result.
        """
        await self._clear_nan()
        controls, model_config = self._running(), self._launch.llm.vllm_config.model_config
        check_supported(controls.refusals.weight_updates)
        self._loaded.replace_weights()
        answers = await controls.calls.on_workers("rollbus_load_weights", path=str(path))
        # The worker processes have the same values.
        model_config.model, model_config.revision = str(path), None
        verified = sum_answers(answers)
        logger.info("engine.weights_loaded path=%s verified=%s", path, verified)
        await self._forget_old_weights()
        return verified

    async def _forget_old_weights(self) -> None:
        """Record that all worker processes have new weights: adapters are unloaded, and the KV cache is outdated."""
        self._loaded.adapters.clear()
        await self._running().outdate_kv()

    @property
    def loras(self) -> Mapping[str, int]:
        """Versions of the adapters that requests may name, by name."""
        return {name: adapter.version for name, adapter in self._loaded.adapters.items()}

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Load an adapter, or replace the adapter of this name in place; see `Engine.load_lora`."""
        await self._running().adapters.load(name, path, version)
        await self._running().outdate_kv(self._loaded.adapters[name].lora_request.lora_int_id)

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no open request uses; ignore an adapter that is not loaded."""
        await self._running().adapters.unload(name)

    async def sleep(self, level: int) -> None:
        """Free memory; the engine must have no requests."""
        check_supported(self._running().refusals.sleep)
        before = {gpu.name: gpu.free for gpu in await asyncio.to_thread(read_gpus, load_nvml)}
        await self._running().calls.call("sleep", level)
        after = await asyncio.to_thread(read_gpus, load_nvml)
        self._freed = {gpu.name: max(gpu.free - before.get(gpu.name, gpu.free), 0) for gpu in after}

    async def wake(self) -> None:
        """Undo `sleep`; after level 2 the weights must be loaded again."""
        check_supported(self._running().refusals.sleep)
        await self._running().calls.call("wake_up")
        if self._is_paused:  # vLLM's own wake also resumes the engine.
            await self.pause()

    async def find_memory_user(self) -> str | None:
        """Compare the free memory of the GPUs with what `sleep` freed, or before the start with what vLLM will take.

        vLLM takes `gpu_memory_utilization` of each GPU. An engine on several machines knows only this machine's GPUs.
        """

        def needed(gpu: GpuMemory) -> int:
            return self._freed.get(gpu.name, 0) if self._controls is not None else int(gpu.total * self._share)

        gpus = await asyncio.to_thread(read_gpus, load_nvml)
        return describe_user(gpus, needed, own_processes())

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to vLLM's own transfer engine."""
        await self._transfer(INIT_TRANSFER, info=dict(info))

    async def start_weight_update(self) -> None:
        """Begin to receive weights; after this call the weights are half written until `finish_weight_update`."""
        self._loaded.replace_weights()
        await self._transfer(START_TRANSFER)

    async def update_weight_chunk(self, info: Mapping[str, Any]) -> None:
        """Receive some of the weights; an error ends the update, which must then be started again."""
        await self._transfer(UPDATE_TRANSFER, info=dict(info))

    async def finish_weight_update(self) -> Verified | None:
        """Finish the update after the last chunk; this unloads all adapters."""
        verified = sum_answers(await self._transfer(FINISH_TRANSFER))
        await self._forget_old_weights()
        await self._clear_nan()
        return verified

    async def abandon_weight_update(self) -> None:
        """End an unfinished update; return only if all worker processes execute calls."""
        await self._running().calls.on_workers("rollbus_abandon_transfer")

    async def _transfer(self, step: str, **info: Any) -> list[dict[str, Any]]:
        check_supported(self._running().refusals.weight_transfer)
        return await self._running().calls.on_workers("rollbus_transfer", step=step, **info)

    async def close(self) -> None:
        """Stop the engine and every process that it started; safe to call twice and after a failed `start`.

        Cancellation: waits for the exit of the processes before it takes effect.
        """
        self._is_closed = True
        if self._controls is not None:
            self._controls.calls.end("the engine was closed")
        self._launch.cancel()
        await self._shut_down()

    async def _prepare_workers(self, controls: "Controls") -> None:
        try:
            await controls.calls.on_workers("rollbus_correct")
        except ControlError as exc:
            raise EngineDead(f"vLLM {self.capabilities.engine_version} is not usable: {exc.message}") from exc
        await controls.watch_kv()

    async def _open(self, llm: "AsyncLLM") -> None:
        """Read the engine's output and warm up, which compiles the kernels and verifies the row rule."""
        feed, given = CoreFeed(llm, self._loaded, await llm.get_supported_tasks()), self.capabilities
        mask_vocab_size = given.vocab_size if given.sampling_mask else None
        self._feed, self._requests = feed, OpenRequests(given.routed_experts, vocab_size=mask_vocab_size)
        has_prompt_logprobs = self._running().refusals.prompt_logprobs is None
        for together in warm_up_rounds(given, has_prompt_logprobs=has_prompt_logprobs):
            for number, request in enumerate(together):
                await self.add(f"warm-up-{number}", request)
            while len(self._requests):
                for step in await self._next_steps():
                    if isinstance(step, RequestStep) and step.finish_reason is FinishReason.ERROR:
                        raise EngineDead(f"a warm-up request failed: {step.error}")
        config = self._launch.llm.vllm_config
        feed.meter.restart(prefix_age_of(config), kv_cache_tokens_of(config))

    async def _shut_down(self) -> None:
        llm = self._launch.pop_llm()
        self._feed = None
        if llm is not None:
            reader = getattr(getattr(llm.engine_core, "resources", None), "output_queue_task", None)
            await to_the_end(partial(llm.shutdown, timeout=SHUTDOWN_S))
            if reader is not None:
                # The shutdown cancels this vLLM task. Wait here for its end.
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
            logger.error("engine.output_rejected requests=%d", len(broken))
            await feed.abort(broken)
        return steps

    async def _clear_nan(self) -> None:
        """Clear NaN that invalid weights left in the KV cache: valid weights would not overwrite it."""
        if self._requests.has_seen_nan:
            await self._running().calls.on_workers("rollbus_clear_nan")
            self._requests.has_seen_nan = False

    def _running_feed(self) -> CoreFeed:
        if self._feed is None or self._is_closed:
            raise EngineDead("the engine is not running")
        return self._feed

    def _running(self) -> "Controls":
        if self._controls is None or self._is_closed:
            raise EngineDead("the engine is not running")
        return self._controls


def load_nvml() -> Any:
    """Import the NVML binding that vLLM ships."""
    from vllm.third_party import pynvml

    return pynvml


class Controls:
    """The calls to a started engine, and what they need.

    Args:
        loaded: serials of the loaded weights and adapters.

    Attributes:
        watches_kv: True if the engine core reports recomputed KV; False until `watch_kv`.
    """

    def __init__(self, llm: "AsyncLLM", loaded: LoadSerials, capabilities: Capabilities) -> None:
        self.refusals = find_refusals(llm.vllm_config)
        self.calls = Calls(llm)
        self.adapters = Adapters(self.calls, loaded, max_loras=capabilities.max_loras, refusal=self.refusals.loras)
        self.watches_kv = False

    async def watch_kv(self) -> None:
        """Let the engine core report recomputed KV and run the worker's requests first, if its scheduler allows this.

        Call this before the first request.

        Raises:
            EngineDead: the engine has ended.
        """
        try:
            await self.calls.on_cores(WATCH)
            self.watches_kv = True
            await self.calls.on_cores(OWN_FIRST)
        except ControlError as exc:
            logger.warning("engine.kv_watch_failed reason=%s", exc.message)

    async def outdate_kv(self, lora_number: int | None = None) -> None:
        """Report that the weights, or the adapter of this number, were replaced; see `corrections.outdate_kv`.

        Raises:
            ControlError: `engine_error`.
            EngineDead: the engine has ended.
        """
        if self.watches_kv:
            await self.calls.on_cores(OUTDATE, lora_number)


def warm_up_rounds(capabilities: Capabilities, *, has_prompt_logprobs: bool) -> Iterator[list[GenerateRequest]]:
    """Yield the requests of each round, which run together.

    Args:
        has_prompt_logprobs: True if this engine returns prompt logprobs.
    """
    room = capabilities.max_model_len - WARM_UP_TOKENS
    prompt = np.arange(min(WARM_UP_PROMPT_TOKENS, room)) % capabilities.vocab_size
    for together in WARM_UP_ROUNDS:
        chosen = together if has_prompt_logprobs else [replace(one, prompt_logprobs=None) for one in together]
        if capabilities.sampling_mask:
            # This engine rejects other requests (v1/engine/input_processor.py: "sampling distribution replay").
            chosen = [replace(one, temperature=one.temperature or 1.0, top_k=one.top_k or 1) for one in chosen]
        # The salt keeps other requests from finding this prompt in the prefix cache.
        yield [GenerateRequest(prompt_token_ids=prompt, sampling=sampling, cache_salt="warm-up") for sampling in chosen]


async def to_the_end(work: Callable[[], None], *, on_cancel: Callable[[], None] | None = None) -> None:
    """Run `work` in a thread and wait until it has ended.

    Cancellation: call `on_cancel` repeatedly until `work` has ended, because a thread cannot be stopped.
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
        # Retrieve the exception, so that asyncio does not log it as never retrieved.
        future.exception()
        raise
