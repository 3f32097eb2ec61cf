"""Access to a started vLLM engine for everything other than requests."""

from typing import TYPE_CHECKING

from ....schemas.presence import Capabilities
from .adapters import Adapters
from .calls import Calls
from .capabilities import find_refusals
from .kv_watch import KvWatch
from .loaded import LoadSerials
from .weights import VllmWeightLoader

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["Controls"]


class Controls:
    """The calls to a started engine, and the objects that use them for weights, adapters and KV.

    Args:
        loaded: serials of the loaded weights and adapters.
    """

    def __init__(self, llm: "AsyncLLM", loaded: LoadSerials, capabilities: Capabilities) -> None:
        self.refusals = find_refusals(llm.vllm_config)
        self.calls = Calls(llm)
        self.kv_watch = KvWatch(self.calls)
        self.weights = VllmWeightLoader(
            llm,
            self.calls,
            loaded,
            load_refusal=self.refusals.weight_updates,
            transfer_refusal=self.refusals.weight_transfer,
        )
        self.adapters = Adapters(self.calls, loaded, max_loras=capabilities.max_loras, refusal=self.refusals.loras)
