"""Records which weights and LoRA adapters a vLLM engine has loaded, and loads adapters."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....schemas.errors import ControlCode, ControlError, InvalidRequest
from ....schemas.limits import MAX_MODULE_CHARS, MAX_UNPROBED
from ....schemas.request import GenerateRequest
from ....schemas.weights import Verified
from .calls import Calls, check_supported

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAdapter:
    """A LoRA adapter that requests may name."""

    version: int
    serial: int
    """Serial of this load; see `LoadSerials`."""
    lora_request: "LoRARequest"
    """The argument by which vLLM uses the adapter for a request."""


class LoadSerials:
    """Serials of loads. Each load of weights or of an adapter gets a serial that no other load has.

    vLLM's prefix cache distinguishes neither weights nor versions of an adapter (v1/core/kv_cache_utils.py:
    _gen_lora_extra_hash_keys). The serials are therefore part of the cache salt of each request. Requests then do not
    find cache entries of older weights. The cache needs no reset, which would slow down the requests in flight.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._weights_serial = next(self._serials)
        self.adapters: dict[str, VllmAdapter] = {}
        """Loaded adapters by name, at most as many as the engine supports."""

    def new_serial(self) -> int:
        """Return the serial of a load that begins."""
        return next(self._serials)

    def replace_weights(self) -> None:
        """Set a new serial before the weights change: later requests share no cache entries with earlier requests."""
        self._weights_serial = self.new_serial()

    def adapter_of(self, request: GenerateRequest) -> VllmAdapter | None:
        """Return the adapter that `request` names; None: it names none.

        Raises:
            InvalidRequest: the adapter is not loaded.
        """
        if request.lora is None:
            return None
        adapter = self.adapters.get(request.lora)
        if adapter is None:
            allowed = ", ".join(self.adapters) or "none, because no adapter is loaded"
            raise InvalidRequest("lora", f"{request.lora!r} is not loaded on this worker", allowed)
        return adapter

    def salt_of(self, request: GenerateRequest, *, takes_kv: bool = False) -> str:
        """Return the salt of the request's prefix cache entries: the serials of the loads, then the request's own salt.

        Args:
            takes_kv: True if the KV of the request may come from another engine. Only other requests of this kind find
                its cache entries: the routed experts of tokens from another engine are unknown, and these requests do
                not want them.

        Raises:
            InvalidRequest: the adapter is not loaded.
        """
        adapter = self.adapter_of(request)
        serial = str(self._weights_serial) if adapter is None else f"{self._weights_serial}.{adapter.serial}"
        if takes_kv:
            serial += ".kv"
        return f"{serial}:{request.cache_salt or ''}"


class Adapters:
    """Loads adapters into the engine and unloads them; `LoadSerials.adapters` has the adapters that requests may name.

    Each adapter name has a number in vLLM. The name keeps its number until the adapter is unloaded or its load
    fails. It keeps the number even if new weights have unloaded all adapters: requests in flight refer to the number.

    Args:
        max_loras: maximum number of adapters in the engine; vLLM would silently unload the oldest adapter beyond it.
        refusal: reason why the engine supports no adapters; None: it supports them.
    """

    def __init__(self, calls: Calls, loaded: LoadSerials, *, max_loras: int, refusal: str | None) -> None:
        self._calls = calls
        self._loaded = loaded
        self._max_loras = max_loras
        self._refusal = refusal
        self._next_number = itertools.count(1)
        self._numbers: dict[str, int] = {}

    async def load(self, name: str, path: Path, version: int) -> None:
        """Load an adapter, or replace the adapter of this name; see `Engine.load_lora`."""
        from vllm.lora.request import LoRARequest

        check_supported(self._refusal)
        adapters = self._loaded.adapters
        if name not in adapters and len(adapters) >= self._max_loras:
            problem = f"{len(adapters)} adapters are loaded, the maximum of this engine; unload an adapter first"
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not loaded: {problem}")
        serial = self._loaded.new_serial()
        number = self._numbers.setdefault(name, next(self._next_number))
        try:
            await self._calls.on_workers("rollbus_load_lora", name=name, number=number, path=str(path))
        except ControlError as exc:
            if exc.code is ControlCode.HALF_WRITTEN:
                # Some vLLM worker processes may have the new adapter and others the old adapter.
                await self._calls.on_replicas("remove_lora", number)
            if not all(number in listed for listed in await self._calls.on_replicas("list_loras")):
                self._remove(name)
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not loaded: {exc.message}") from exc
        # No `load_inplace` here: vLLM would load the adapter again for each request.
        lora_request = LoRARequest(name, number, str(path))
        adapters[name] = VllmAdapter(version=version, serial=serial, lora_request=lora_request)

    async def unload(self, name: str) -> None:
        """Unload an adapter; ignore a name without a number. See `Engine.unload_lora`."""
        number = self._numbers.get(name)
        if number is None:
            return
        removed = all(await self._calls.on_replicas("remove_lora", number))
        if not removed and any(number in listed for listed in await self._calls.on_replicas("list_loras")):
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not unloaded: vLLM still lists it")
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._loaded.adapters.pop(name, None)
        self._numbers.pop(name, None)


def sum_answers(answers: Sequence[Mapping[str, Any]]) -> Verified:
    """Return the sum of the comparisons in all worker processes."""
    unprobed = sorted({name for answer in answers for name in answer["unprobed"]})
    return Verified(
        probed=sum(answer["probed"] for answer in answers),
        equal=sum(answer["equal"] for answer in answers),
        compared=sum(answer["compared"] for answer in answers),
        unprobed=tuple(name[:MAX_MODULE_CHARS] for name in unprobed[:MAX_UNPROBED]),
        num_unprobed=len(unprobed),
        seconds=max(answer["seconds"] for answer in answers),
    )
