"""New weights for a vLLM engine: from a checkpoint, or through vLLM's own transfer engine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schemas.errors import ControlCode, ControlError
from workers.engines.vllm.calls import Calls
from workers.engines.vllm.loaded import Loaded

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
        try:
            answers = await self._calls.on_workers("rollbus_load_weights", path=str(path))
        except ControlError as exc:
            # The workers answer with what went wrong in them; this is something else, at any time.
            raise ControlError(ControlCode.HALF_WRITTEN, f"loading {path} failed: {exc.message}") from exc
        failed = [answer for answer in answers if answer["code"] is not None]
        if failed:
            codes = {answer["code"] for answer in failed}
            is_untouched = len(failed) == len(answers) and len(codes) == 1
            code = ControlCode(failed[0]["code"]) if is_untouched else ControlCode.HALF_WRITTEN
            raise ControlError(code, f"{path} was not loaded: {failed[0]['error']}")
        # As the worker processes have it.
        self._model_config.model = str(path)
        self._model_config.revision = None
        self._loaded.adapters.clear()
        logger.info("engine.weights_loaded path=%s compared=%d", path, min(answer["compared"] for answer in answers))

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Pass `info` to vLLM's transfer engine; see `Engine.init_weight_transfer`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        _check_supported(self._transfer_refusal)
        await self._calls.call("init_weight_transfer_engine", WeightTransferInitRequest(init_info=dict(info)))

    async def start_transfer(self) -> None:
        """Begin to take weights; see `Engine.start_weight_update`."""
        _check_supported(self._transfer_refusal)
        self._loaded.replace_weights()
        await self._calls.on_workers("rollbus_begin_reload")
        await self._transfer("start_weight_update")
        self._is_transferring = True

    async def take_chunk(self, info: Mapping[str, Any]) -> None:
        """Take some weights; see `Engine.update_weight_chunk`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_transferring()
        await self._transfer("update_weights", WeightTransferUpdateRequest(update_info=dict(info)))

    async def finish_transfer(self) -> None:
        """All weights are there; see `Engine.finish_weight_update`."""
        self._check_transferring()
        await self._transfer("finish_weight_update")
        try:
            await self._calls.on_workers("rollbus_end_reload")
        except ControlError as exc:
            raise ControlError(ControlCode.HALF_WRITTEN, f"the weights were not put in order: {exc.message}") from exc
        self._is_transferring = False
        self._loaded.adapters.clear()

    async def _transfer(self, name: str, *args: Any) -> None:
        try:
            await self._calls.call(name, *args)
        except ControlError as exc:
            self._is_transferring = False
            await self._calls.on_workers("rollbus_give_up_reload")
            raise ControlError(ControlCode.HALF_WRITTEN, f"{name} failed: {exc.message}") from exc

    def _check_transferring(self) -> None:
        _check_supported(self._transfer_refusal)
        if not self._is_transferring:
            raise ControlError(ControlCode.ENGINE_ERROR, "no weight update has been started; it begins with a start")


def _check_supported(refusal: str | None) -> None:
    if refusal is not None:
        raise ControlError(ControlCode.UNSUPPORTED, refusal)
