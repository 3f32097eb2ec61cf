"""LoRA adapters in a vLLM engine: load, swap in place, unload; each answer of the engine is checked."""

import itertools
from pathlib import Path

from ....schemas.errors import ControlCode, ControlError
from .calls import Calls, check_supported
from .loaded import LoadSerials, VllmAdapter

__all__ = ["Adapters"]


class Adapters:
    """Brings adapters into the engine and out of it; what requests may name is in `LoadSerials.adapters`.

    An adapter keeps its number in vLLM for as long as its name is known here, also when the engine has lost it with
    the weights that it was made for: requests in flight refer to the number.

    Args:
        max_loras: how many the engine holds; beyond it vLLM would drop the oldest without a word.
        refusal: why there can be none; None: there can.
    """

    def __init__(self, calls: Calls, loaded: LoadSerials, *, max_loras: int, refusal: str | None) -> None:
        self._calls = calls
        self._loaded = loaded
        self._max_loras = max_loras
        self._refusal = refusal
        self._next_number = itertools.count(1)
        self._numbers: dict[str, int] = {}

    async def load(self, name: str, path: Path, version: int) -> None:
        """Load an adapter, or replace the one of this name; see `Engine.load_lora`."""
        from vllm.lora.request import LoRARequest

        check_supported(self._refusal)
        adapters = self._loaded.adapters
        if name not in adapters and len(adapters) >= self._max_loras:
            problem = f"{len(adapters)} adapters are loaded, as many as the engine holds; unload one of them first"
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not loaded: {problem}")
        serial = self._loaded.new_serial()
        number = self._numbers.setdefault(name, next(self._next_number))
        try:
            await self._calls.on_workers("rollbus_load_lora", name=name, number=number, path=str(path))
        except ControlError as exc:
            if exc.code is ControlCode.HALF_WRITTEN:
                # Some of vLLM's processes may have the new one and some the old one.
                await self._calls.on_replicas("remove_lora", number)
            if not all(number in listed for listed in await self._calls.on_replicas("list_loras")):
                self._remove(name)
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not loaded: {exc.message}") from exc
        # Not in place any more: each request would load it again.
        lora_request = LoRARequest(name, number, str(path))
        adapters[name] = VllmAdapter(version=version, serial=serial, lora_request=lora_request)

    async def unload(self, name: str) -> None:
        """Unload an adapter, if it is there; see `Engine.unload_lora`."""
        number = self._numbers.get(name)
        if number is None:
            return
        removed = all(await self._calls.on_replicas("remove_lora", number))
        if not removed and any(number in listed for listed in await self._calls.on_replicas("list_loras")):
            raise ControlError(ControlCode.ENGINE_ERROR, f"adapter {name!r} was not unloaded: vLLM still has it")
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._loaded.adapters.pop(name, None)
        self._numbers.pop(name, None)
