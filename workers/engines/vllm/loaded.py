"""The loaded weights and adapters of an engine, for the cache salt and the adapter of each request."""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....schemas.errors import InvalidRequest
from ....schemas.request import GenerateRequest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["LoadSerials", "VllmAdapter"]


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
            raise InvalidRequest(
                field="lora", problem=f"{request.lora!r} is not loaded on this worker", allowed=allowed
            )
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
