"""New weights for a vLLM engine: from a checkpoint, or through vLLM's own transfer engine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ControlCode, ControlError
from workers.engines.vllm.calls import Calls
from workers.engines.vllm.loaded import Loaded
from workers.engines.vllm.reloading import FINISH_TRANSFER, INIT_TRANSFER, START_TRANSFER, UPDATE_TRANSFER

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["Weights"]

logger = logging.getLogger(__name__)


class Weights:
    """Replaces the weights; what is done inside of vLLM's worker processes is in `reloading`.

    Args:
        load_refusal: why no checkpoint can be loaded; None: it can.
        transfer_refusal: why nothing can be transferred.
    """

    def __init__(
        self,
        llm: "AsyncLLM",
        calls: Calls,
        loaded: Loaded,
        *,
        load_refusal: str | None,
        transfer_refusal: str | None,
    ) -> None:
        self._model_config = llm.vllm_config.model_config
        self._calls = calls
        self._loaded = loaded
        self._load_refusal = load_refusal
        self._transfer_refusal = transfer_refusal
        self._is_transferring = False

    async def load(self, path: Path) -> None:
        """Load a checkpoint; see `Engine.load_weights`."""
        _check_supported(self._load_refusal)
        self._is_transferring = False
        self._loaded.replace_weights()
        answers = await self._calls.on_workers("rollbus_load_weights", path=str(path))
        # As the worker processes have it.
        self._model_config.model = str(path)
        self._model_config.revision = None
        self._loaded.adapters.clear()
        logger.info("engine.weights_loaded path=%s compared=%d", path, min(answer["compared"] for answer in answers))

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to vLLM's transfer engine; see `Engine.init_weight_transfer`."""
        _check_supported(self._transfer_refusal)
        await self._calls.on_workers("rollbus_transfer", step=INIT_TRANSFER, info=dict(info))

    async def start_transfer(self) -> None:
        """Begin to take weights; see `Engine.start_weight_update`."""
        _check_supported(self._transfer_refusal)
        self._loaded.replace_weights()
        await self._transfer(START_TRANSFER)
        self._is_transferring = True

    async def take_chunk(self, info: Mapping[str, Any]) -> None:
        """Take some weights; see `Engine.update_weight_chunk`."""
        self._check_transferring()
        await self._transfer(UPDATE_TRANSFER, info=dict(info))

    async def finish_transfer(self) -> None:
        """All weights are there; see `Engine.finish_weight_update`."""
        self._check_transferring()
        await self._transfer(FINISH_TRANSFER)
        self._is_transferring = False
        self._loaded.adapters.clear()

    async def _transfer(self, step: str, **info: Any) -> None:
        try:
            await self._calls.on_workers("rollbus_transfer", step=step, **info)
        except ControlError:
            self._is_transferring = False
            raise

    def _check_transferring(self) -> None:
        _check_supported(self._transfer_refusal)
        if not self._is_transferring:
            raise ControlError(ControlCode.ENGINE_ERROR, "no weight update has been started; it begins with a start")


def _check_supported(refusal: str | None) -> None:
    if refusal is not None:
        raise ControlError(ControlCode.UNSUPPORTED, refusal)
