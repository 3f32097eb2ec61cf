"""The engine around a synthetic model: queue, batch, speed, and all commands of a controller."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ....bus.protocol.stream.engine_step import RequestStep, TokenBatch
from ....schemas.chunk import FinishReason
from ....schemas.decoding import MALFORMED
from ....schemas.errors import ControlCode, ControlError, EngineDead, ErrorCode, InvalidRequest
from ....schemas.limits import MAX_PRIORITY
from ....schemas.messages import KvTransfer
from ....schemas.presence import Capabilities, EngineStats
from ....schemas.request import GenerateRequest
from .batch import SyntheticBatch, ending_step
from .config import SyntheticConfig
from .model import (
    DROPPED,
    PrefixCache,
    ReceivedWeights,
    Running,
    SyntheticAdapter,
    SyntheticKv,
    SyntheticModel,
    SyntheticWeights,
    checksum_of,
)


class SyntheticEngine:
    """An `Engine` that computes its output from hashes; see the package.

    Args:
        model: folder of a checkpoint; None or a folder without `*.safetensors`: the weights are those of `config.seed`.

    Attributes:
        faults: faults from now on; a test may replace them.
    """

    def __init__(self, config: SyntheticConfig | None = None, model: Path | None = None) -> None:
        self._config = config or SyntheticConfig()
        self._folder = model
        self.capabilities: Capabilities = self._config.capabilities
        self.reports_recomputed_kv: bool = self._config.reports_recomputed_kv
        self.faults = self._config.faults
        self._cache = PrefixCache(self._config.prefix_cache_tokens) if self._config.prefix_cache else None
        self._model = SyntheticModel(self._config, self._cache)
        self._weights = SyntheticWeights.of(self._config.seed)
        self._received: ReceivedWeights | None = None
        self._loras: dict[str, SyntheticAdapter] = {}
        self._num_loads = self._num_lora_loads = 0
        self._waiting: deque[Running] = deque()
        # Requests whose prompts are being computed.
        self._prefilling: list[Running] = []
        self._running = SyntheticBatch(self._model, self._weights_of)
        # Requests whose KV is being transferred, with the KV transfer parameters.
        self._loading: dict[str, tuple[Running, bytes]] = {}
        self._failed: list[RequestStep] = []
        self._num_failed_loads = 0
        self._aborted: list[str] = []
        self._wake_up = asyncio.Event()
        self._is_paused = False
        self._sleep_level = 0
        # Set while the reader of `steps` has received all sampled tokens.
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._num_steps = 0
        self._began_at = 0.0
        self._dead: str | None = None

    def __repr__(self) -> str:
        """Return one line with counts."""
        waiting = len(self._waiting) + len(self._prefilling) + len(self._loading) + len(self._failed)
        return f"<SyntheticEngine running={len(self._running)} waiting={waiting} steps={self._num_steps}>"

    @property
    def stats(self) -> EngineStats:
        """Current load; without the counts of the prefix cache if there is none."""
        stats = self._running.stats(len(self._prefilling), len(self._waiting) + len(self._loading))
        return stats if self._cache is None else replace(stats, **self._cache.counts())

    @property
    def oldest_prefix_s(self) -> float | None:
        """Seconds since the last use of the oldest cached prefix; None: the cache has evicted no prefix."""
        return None if self._cache is None else self._cache.oldest_s(time.monotonic())

    async def start(self) -> None:
        """Load the checkpoint, if there is one."""
        if self._folder is not None and any(self._folder.glob("*.safetensors")):
            try:
                self._weights = SyntheticWeights.of(await asyncio.to_thread(checksum_of, self._folder))
            except ControlError as exc:
                raise EngineDead(exc.message) from exc

    async def add(self, key: str, request: GenerateRequest, kv: KvTransfer | None = None) -> None:
        """Queue a request before all less urgent requests. With KV transfer parameters, do so after the transfer."""
        self._check_alive()
        running = self._make_running(key, request, keeps_kv=kv is not None and kv.is_prefill)
        if kv is not None and kv.params:
            self._loading[key] = running, kv.params
            asyncio.get_running_loop().call_later(self._config.kv_load_s, self._load_kv, key)
        else:
            self._enqueue(running)

    def _make_running(self, key: str, request: GenerateRequest, *, keeps_kv: bool = False) -> Running:
        """Return a running request whose cache salt names the current weights and adapter."""
        adapter = None if request.lora is None else self._loras.get(request.lora)
        if request.lora is not None and adapter is None:
            raise InvalidRequest("lora", f"{request.lora!r} is not loaded", ", ".join(self._loras) or "none")
        self._model.check(request)
        salt = f"{self._num_loads}.{0 if adapter is None else adapter.salt}.{request.cache_salt or ''}"
        return Running(key, request, salt, keeps_kv=keeps_kv)

    async def restart(self, key: str) -> None:
        """Queue a request again, unless it has a token or is a prefill or decode phase."""
        self._check_alive()
        found = next((one for one in [*self._waiting, *self._prefilling] if one.key == key), None)
        if found is not None and not found.keeps_kv and found.kv is None:
            self._remove_unbegun(key)
            self._enqueue(self._make_running(key, found.request))

    def _remove_unbegun(self, key: str) -> bool:
        """Remove a request without a token. Return False if there is none with this key."""
        for requests in (self._waiting, self._prefilling):
            for one in requests:
                if one.key == key:
                    requests.remove(one)
                    return True
        return False

    def _enqueue(self, running: Running) -> None:
        at = len(self._waiting)
        while at and self._waiting[at - 1].request.priority > running.request.priority:
            at -= 1
        self._waiting.insert(at, running)
        self._wake_up.set()

    def _load_kv(self, key: str) -> None:
        """Finish the KV transfer of a request: queue the request, or let it fail with the next step."""
        if key not in self._loading:
            return
        running, params = self._loading.pop(key)
        problem = None
        try:
            running.kv = msgspec.msgpack.decode(params, type=SyntheticKv)
            if not self._model.fits(running.kv, running.request):
                problem = "the KV belongs to another prompt"
        except MALFORMED as exc:
            problem = f"the KV transfer parameters are not of this connector: {exc}"
        if self._num_failed_loads < self.faults.kv_loads:
            self._num_failed_loads += 1
            problem = "the KV transfer failed, as configured"
        if problem is None:
            self._enqueue(running)
            return
        code = ErrorCode.KV_TRANSFER_FAILED
        self._failed.append(ending_step(key, FinishReason.ERROR, error=problem, error_code=code))
        self._wake_up.set()

    async def abort(self, keys: Sequence[str]) -> None:
        """End requests with the next step, or immediately while paused; ignore unknown keys.

        An abort of a request whose KV is being transferred kills the engine.
        """
        if not self._loading.keys().isdisjoint(keys):
            self.kill("a request was aborted during its KV transfer")
        self._aborted.extend(keys)
        self._wake_up.set()

    async def close(self) -> None:
        """Kill the engine and remove all requests; `steps` then raises `EngineDead`."""
        self.kill(self._dead or "the engine was closed")
        self._waiting.clear()
        self._prefilling.clear()
        self._loading.clear()
        self._failed.clear()
        self._running.clear()

    def kill(self, reason: str = "killed") -> None:
        """Die like a real engine: immediately, with open requests."""
        self._dead = reason
        self._wake_up.set()
        self._all_read.set()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    # Steps

    async def steps(self) -> AsyncIterator[Sequence[RequestStep | TokenBatch]]:
        """Yield the output of each step; wait while there is no work."""
        while True:
            self._all_read.set()
            while not self._has_work() and self._dead is None:
                self._wake_up.clear()
                await self._wake_up.wait()
            self._all_read.clear()
            self._began_at = time.monotonic()
            # The duration of a step. Even a sleep of 0 s lets other tasks run.
            await asyncio.sleep(self._config.step_s)
            if self._num_steps == self._config.die_after_steps:
                self.kill(f"died after {self._num_steps} steps, as configured")
            self._check_alive()
            self._num_steps += 1
            output = self._step()
            if self._running.prefill_s:
                await asyncio.sleep(self._running.prefill_s)
                self._check_alive()
            yield output

    @property
    def _is_stopped(self) -> bool:
        return self._is_paused or bool(self._sleep_level)

    def _has_work(self) -> bool:
        if self._aborted:
            return True
        return not self._is_stopped and bool(self._waiting or self._prefilling or self._running or self._failed)

    def _step(self) -> list[RequestStep | TokenBatch]:
        aborted, self._aborted = self._aborted, []
        output: list[RequestStep | TokenBatch] = [step for key in aborted for step in self._abort(key)]
        if self._is_stopped:
            return output
        output += self._failed
        self._failed = []
        while self._waiting and (
            len(self._running) + len(self._prefilling) < self._config.max_num_seqs or self._is_urgent(self._waiting[0])
        ):
            self._prefilling.append(self._waiting.popleft())
            self._prefilling[-1].scheduled_at = self._began_at
        is_done = [self._model.advance(one, self._weights_of(one.request.lora)) for one in self._prefilling]
        self._running.preempt_every = self.faults.preempt_every
        joining = [one for one, done in zip(self._prefilling, is_done, strict=True) if done]
        self._prefilling = [one for one, done in zip(self._prefilling, is_done, strict=True) if not done]
        if self.faults.dies_of is not None:
            self._die_of(joining, self.faults.dies_of)
        return output + self._running.step(joining)

    def _die_of(self, joining: Sequence[Running], token: int) -> None:
        if any(running.request.prompt_token_ids[0] == token for running in joining):
            self.kill(f"died of a prompt that begins with {token}, as configured")
            self._check_alive()

    @staticmethod
    def _is_urgent(running: Running) -> bool:
        """True if this is a request of the worker itself, which runs before all others, even beyond `max_num_seqs`."""
        return running.request.priority == -MAX_PRIORITY

    def _abort(self, key: str) -> list[RequestStep]:
        if self._remove_unbegun(key) or self._running.remove([key]):
            return [ending_step(key, FinishReason.ABORT)]
        return []

    def _weights_of(self, lora: str | None) -> SyntheticWeights:
        adapter = None if lora is None else self._loras.get(lora)
        return self._weights if adapter is None else self._weights.with_adapter(adapter.checksum)

    # Pause and cache

    async def pause(self) -> None:
        """Run no step until `resume`, except to end aborted requests."""
        self._is_paused = True
        await self._all_read.wait()
        self._check_alive()
        self._running.rates.interrupt(time.monotonic())

    async def resume(self) -> None:
        """Run steps again."""
        self._check_alive()
        self._is_paused = False
        self._wake_up.set()

    async def reset_cache(self, *, preempt: bool) -> bool:
        """Reset the prefix cache. Return False if requests hold parts of it, unless `preempt`, or if a fault is set."""
        self._check_alive()
        if self.faults.reset_cache or (self._running and not preempt):
            return False
        if self._cache is not None:
            self._cache.clear()
        self._running.preempt()
        return True

    # Weights

    async def load_weights(self, path: Path) -> None:
        """Use the checksum of the files as the weights."""
        self._check_alive()
        fault = self.faults.load if self._num_loads >= self.faults.good_loads else None
        await asyncio.sleep(self.faults.load_s)
        _fail_if(fault == "refused", "rejected the load")
        weights = SyntheticWeights.of(await asyncio.to_thread(checksum_of, path))
        if fault == "hangs":
            self._weights = DROPPED
            await asyncio.Event().wait()
        if fault == "half_written":
            self._weights = DROPPED
            raise ControlError(ControlCode.HALF_WRITTEN, "the engine failed in the middle of a load, as configured")
        self._replace(weights.with_wrong_experts() if fault == "wrong_experts" else weights)

    def _replace(self, weights: SyntheticWeights) -> None:
        self._weights = weights
        self._num_loads += 1
        if self.faults.loses_loras:
            self._loras.clear()

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Do nothing; `info` may have any content."""
        self._check_alive()

    async def start_weight_update(self) -> None:
        """Begin to receive weights. From here on the weights are half written."""
        self._check_alive()
        _fail_if(self.faults.start_transfer, "rejected the weight transfer")
        self._received = ReceivedWeights()
        self._weights = DROPPED

    async def update_weight_chunk(self, info: Mapping[str, Any]) -> None:
        """Receive `{"data": base64}` or `{"seed": n}`; see `ReceivedWeights`."""
        await self._reach_peer()
        self._receiver().add(info)

    async def finish_weight_update(self) -> None:
        """Use the received weights."""
        self._check_alive()
        weights, self._received = self._receiver().weights(), None
        self._replace(weights)

    async def abandon_weight_update(self) -> None:
        """Discard what was received."""
        await self._reach_peer()
        self._received = None

    async def _reach_peer(self) -> None:
        self._check_alive()
        if self.faults.transfer_hangs:
            await asyncio.Event().wait()

    def _receiver(self) -> ReceivedWeights:
        if self._received is None:
            raise ControlError(ControlCode.ENGINE_ERROR, "no weight update was started")
        return self._received

    # Adapters

    @property
    def loras(self) -> Mapping[str, int]:
        """Versions of the loaded adapters, by name."""
        return {name: adapter.version for name, adapter in self._loras.items()}

    async def load_lora(self, name: str, path: Path, version: int) -> None:
        """Use the checksum of the files as the adapter."""
        self._check_alive()
        _fail_if(self.faults.load_lora, "rejected the adapter")
        if name not in self._loras and len(self._loras) >= self._config.max_loras:
            raise ControlError(ControlCode.ENGINE_ERROR, f"{self._config.max_loras} adapters are loaded, the maximum")
        checksum = await asyncio.to_thread(checksum_of, path)
        self._num_lora_loads += 1
        self._loras[name] = SyntheticAdapter(version, checksum, self._num_lora_loads)

    async def unload_lora(self, name: str) -> None:
        """Unload the adapter."""
        self._check_alive()
        _fail_if(self.faults.unload_lora, "did not unload the adapter")
        self._loras.pop(name, None)

    # Memory

    async def sleep(self, level: int) -> None:
        """Run no step until `wake`; level 2 discards weights and adapters."""
        self._check_alive()
        if self._running or self._waiting or self._prefilling or self._loading:
            raise ControlError(ControlCode.ENGINE_ERROR, "the engine cannot sleep: it has requests in flight")
        self._sleep_level = level
        if self._cache is not None:
            self._cache.clear()
        if level == 2:
            self._weights = DROPPED
            self._loras.clear()

    async def wake(self) -> None:
        """Undo `sleep`."""
        self._check_alive()
        self._sleep_level = 0
        self._wake_up.set()

    async def find_memory_user(self) -> str | None:
        """Return the process that `faults.memory_file` names while that file exists."""
        file = None if self.faults.memory_file is None else Path(self.faults.memory_file)
        return None if file is None or not file.exists() else f"GPU in use by pid {file.read_text().strip()}"


def _fail_if(is_faulty: bool, what: str) -> None:
    if is_faulty:
        raise ControlError(ControlCode.ENGINE_ERROR, f"the engine {what}, as configured")
