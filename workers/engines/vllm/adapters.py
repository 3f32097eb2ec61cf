"""Loads, replaces and unloads the LoRA adapters of a vLLM engine, and checks each answer of the engine."""

import itertools
from pathlib import Path

from ....schemas.errors import ControlCode, ControlError
from .calls import Calls, check_supported
from .loaded import LoadSerials, VllmAdapter

__all__ = ["Adapters"]


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
