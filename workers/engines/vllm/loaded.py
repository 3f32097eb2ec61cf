"""Which weights and adapters an engine has loaded, as far as requests must know."""

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
    """Of this load; see `LoadSerials`."""
    lora_request: "LoRARequest"
    """How vLLM is told to use it."""


class LoadSerials:
    """What is loaded, counted: every load of weights or of an adapter gets a serial that no other load has.

    vLLM's prefix cache knows neither weights nor an adapter's version (v1/core/kv_cache_utils.py:
    _gen_lora_extra_hash_keys), so the serials go into the salt of each request at its admission: what older weights
    have put into the cache is not found any more, and needs no flush that would cost the requests in flight.
    """

    def __init__(self) -> None:
        self._serials = itertools.count()
        self._weights_serial = next(self._serials)
        self.adapters: dict[str, VllmAdapter] = {}
        """By name; as many as the engine holds at most."""

    def new_serial(self) -> int:
        """For a load that begins."""
        return next(self._serials)

    def replace_weights(self) -> None:
        """The weights are about to change: requests added from now on share no cache with those before."""
        self._weights_serial = self.new_serial()

    def adapter_of(self, request: GenerateRequest) -> VllmAdapter | None:
        """The adapter that `request` names.

        Raises:
            InvalidRequest: it is not loaded.
        """
        if request.lora is None:
            return None
        adapter = self.adapters.get(request.lora)
        if adapter is None:
            allowed = ", ".join(self.adapters) or "none, as no adapter is loaded"
            raise InvalidRequest(
                field="lora", problem=f"{request.lora!r} is not loaded on this worker", allowed=allowed
            )
        return adapter

    def salt_of(self, request: GenerateRequest, *, takes_kv: bool = False) -> str:
        """The salt of its entries in the prefix cache: what is loaded, then the user's own.

        Args:
            takes_kv: its KV may come from elsewhere. What it leaves in the cache is for others like it only: of tokens
                that were not computed here the experts are unknown, and they do not ask for them.
        """
        adapter = self.adapter_of(request)
        serial = str(self._weights_serial) if adapter is None else f"{self._weights_serial}.{adapter.serial}"
        if takes_kv:
            serial += ".kv"
        return f"{serial}:{request.cache_salt or ''}"
